"""Partners: each rank has one on another host, no two the same, and the ways are short."""

from itertools import permutations

import numpy as np
import pytest

from ftmesh.topology.backup_ranks import backup_ranks
from ftmesh.topology.topology import Topology


def hosts_of(topology, shape):
    """The hosts of chips, each with a block of that shape."""
    sizes = [-(-size // part) for size, part in zip(topology.shape, shape, strict=True)]
    places = np.array(topology.coords) // np.array(shape)
    return (places @ np.cumprod([1, *sizes[:-1]])).tolist()


def ways(topology, found):
    coords = np.array(topology.coords)
    off = np.abs(coords - coords[found])
    return np.where(topology.wrap, np.minimum(off, np.array(topology.shape) - off), off).sum(-1)


def assert_partners(found, hosts):
    assert sorted(found) == list(range(len(hosts)))
    assert all(hosts[rank] != hosts[partner] for rank, partner in enumerate(found))


@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (8, 1)])
def test_504_chips(shape):
    topology = Topology.grid("16x32", failed="4x2@6,14")
    hosts = hosts_of(topology, shape)
    found = backup_ranks(topology, hosts)
    assert_partners(found, hosts)
    assert ways(topology, found).max() <= sum(shape)


@pytest.mark.parametrize("failed", ["", "2x1@2,3", "2x2@2,2", "4x2@0,2", "1x1@0,0"])
def test_what_is_left_of_16_chips(failed):
    topology = Topology.grid("4x4", failed=failed)
    hosts = hosts_of(topology, (2, 2))
    assert_partners(backup_ranks(topology, hosts), hosts)


def test_the_ways_are_as_short_as_can_be():
    topology = Topology.grid("3x2")
    hosts = [0, 0, 1, 1, 2, 2]
    allowed = [
        way
        for way in permutations(range(6))
        if all(hosts[rank] != hosts[partner] for rank, partner in enumerate(way))
    ]
    best = min(ways(topology, np.array(way)).sum() for way in allowed)
    assert ways(topology, backup_ranks(topology, hosts)).sum() == best


def test_over_the_edge_of_a_torus():
    topology = Topology.grid("6x1", wrap=(True, False))
    found = backup_ranks(topology, [0, 0, 0, 1, 1, 1])
    assert ways(topology, found).sum() == 10  # in a line 18


def test_two_devices_on_a_chip():
    topology = Topology((4, 1), (False, False), devices_per_chip=2)
    hosts = [0, 0, 0, 0, 1, 1, 1, 1]
    assert_partners(backup_ranks(topology, hosts), hosts)


@pytest.mark.parametrize("hosts", [[0] * 6, [0, 0, 0, 0, 1, 1]])
def test_where_there_are_none(hosts):
    assert backup_ranks(Topology.grid("3x2"), hosts) is None
