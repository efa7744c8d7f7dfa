"""backup_ranks: each rank has its own backup on another host, as near as possible."""

from itertools import permutations

import numpy as np
import pytest

from ftmesh.topology.ranks import Ranks, backup_ranks
from ftmesh.topology.topology import Topology


def hosts_of(topology, shape):
    """The host of each rank, where every host has a block of `shape`."""
    sizes = [-(-size // part) for size, part in zip(topology.shape, shape, strict=True)]
    blocks = np.array(Ranks(topology).coords) // np.array(shape)
    return (blocks @ np.cumprod([1, *sizes[:-1]])).tolist()


def distances(topology, backups):
    coords = np.array(Ranks(topology).coords)
    offsets = np.abs(coords - coords[backups])
    wrapped = np.array(topology.shape) - offsets
    return np.where(topology.wrap, np.minimum(offsets, wrapped), offsets).sum(-1)


def is_on_other_hosts(backups, hosts):
    return all(hosts[rank] != hosts[backup] for rank, backup in enumerate(backups))


def check_backups(backups, hosts):
    assert sorted(backups) == list(range(len(hosts)))
    assert is_on_other_hosts(backups, hosts)


@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (8, 1)])
def test_504_chips(shape):
    topology = Topology.grid("16x32", failed="4x2@6,14")
    hosts = hosts_of(topology, shape)
    backups = backup_ranks(topology, hosts)
    check_backups(backups, hosts)
    assert distances(topology, backups).max() <= sum(shape)


@pytest.mark.parametrize("failed", ["", "2x1@2,3", "2x2@2,2", "4x2@0,2", "1x1@0,0"])
def test_damaged_meshes(failed):
    topology = Topology.grid("4x4", failed=failed)
    hosts = hosts_of(topology, (2, 2))
    check_backups(backup_ranks(topology, hosts), hosts)


def test_the_total_distance_is_minimal():
    topology = Topology.grid("3x2")
    hosts = [0, 0, 1, 1, 2, 2]
    allowed = [order for order in permutations(range(6)) if is_on_other_hosts(order, hosts)]
    best = min(distances(topology, np.array(order)).sum() for order in allowed)
    assert distances(topology, backup_ranks(topology, hosts)).sum() == best


def test_distances_wrap_on_a_torus():
    topology = Topology.grid("6x1", wrap=(True, False))
    backups = backup_ranks(topology, [0, 0, 0, 1, 1, 1])
    assert distances(topology, backups).sum() == 10  # 18 without wrapping


def test_two_devices_on_a_chip():
    topology = Topology((4, 1), (False, False), devices_per_chip=2)
    hosts = [0, 0, 0, 0, 1, 1, 1, 1]
    check_backups(backup_ranks(topology, hosts), hosts)


@pytest.mark.parametrize("hosts", [[0] * 6, [0, 0, 0, 0, 1, 1]])
def test_none_if_there_is_no_assignment(hosts):
    assert backup_ranks(Topology.grid("3x2"), hosts) is None
