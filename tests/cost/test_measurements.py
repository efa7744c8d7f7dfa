"""What others have measured on TPUs, next to what the model says of it."""

from dataclasses import replace

import pytest

import ftmesh
from ftmesh import PlanError, Topology
from ftmesh.cost.executors import (
    ALONG_RING,
    LAX_PSUM,
    lax_psum_peers,
    lax_psum_seconds,
    native_mesh_seconds,
    native_obstacle,
    native_ring_seconds,
)
from ftmesh.cost.links import DEFAULT, NETWORKS
from ftmesh.cost.references import MEASUREMENTS
from ftmesh.topology.ring_order import RingOrder, ring_order
from ftmesh.topology.tiles import TiledTopology

NAMES = [f"{one.generation} {one.operation} {one.num_bytes}" for one in MEASUREMENTS]


@pytest.mark.parametrize("one", MEASUREMENTS, ids=NAMES)
def test_the_model_is_within_15_percent_of_each(one):
    assert one.modelled() == pytest.approx(one.seconds, rel=0.15)


@pytest.mark.parametrize("one", MEASUREMENTS, ids=NAMES)
def test_a_rate_that_is_off_is_noticed(one):
    """The check has force: other constants, off by as much as published figures were, fail it."""
    network = NETWORKS[one.generation]
    off = replace(
        network,
        bandwidth=1.4 * network.bandwidth,
        collective_launch=network.collective_launch / 4,
        device_model=replace(network.device_model, launch=0.0),
    )
    assert one.modelled(off) < 0.85 * one.seconds


def test_measurements_are_of_every_kind():
    """Permutations, all-gathers and sums, on lines, rings and a torus, from 4 KiB to 600 MB."""
    assert {one.operation for one in MEASUREMENTS} == {"ppermute", "all_gather", "psum"}
    assert {one.generation for one in MEASUREMENTS} == {"v5e", "v5p", "v6e", "v7x"}
    assert min(one.num_bytes for one in MEASUREMENTS) == 4096
    assert max(one.num_bytes for one in MEASUREMENTS) > 600_000_000


@pytest.mark.parametrize("name", NETWORKS)
def test_a_range_is_around_the_estimate(name):
    network, torus = NETWORKS[name], Topology.grid("8x8", wrap=True)
    for num_bytes in (1_000, 10**6, 10**9):
        low, middle, high = (
            native_mesh_seconds(torus, num_bytes, one)
            for one in (network.fastest, network, network.slowest)
        )
        assert low < middle <= high
    launches = [one.device_model.launch for one in (network.fastest, network, network.slowest)]
    assert launches == sorted(launches)
    assert network.fastest.bandwidth >= network.bandwidth >= network.slowest.bandwidth
    assert DEFAULT.fastest is DEFAULT.slowest is DEFAULT


def test_the_slow_end_waits_for_all_hops_of_a_ring():
    network, ring = NETWORKS["v6e"], Topology.grid("16", wrap=True)
    for one, hops in ((network.fastest, 8), (network, 8), (network.slowest, 15)):
        seconds = one.collective_launch + 2 * hops * one.latency
        assert native_mesh_seconds(ring, 0, one) == pytest.approx(seconds)


class TestWholeMeshes:
    """Closed forms of an all-gather on links of a byte a second."""

    UNIT = replace(DEFAULT, bandwidth=1.0, latency=0.0)

    @pytest.mark.parametrize(
        ("shape", "wrap", "payloads"),
        [
            ("4", False, 3 / 4),  # all from the left over one link
            ("4", True, 3 / 8),  # half from each side
            ("2", True, 1 / 2),  # two chips have one link
            ("4x4", True, 3 / 16 + 3 / 64),  # halves of each axis, then quarters of halves
            ("4x4", False, 2 * (3 / 16 + 3 / 64)),
            ("1x4", True, 3 / 8),
            ("1", False, 0),
        ],
    )
    def test_bytes(self, shape, wrap, payloads):
        seconds = native_mesh_seconds(Topology.grid(shape, wrap=wrap), 64, self.UNIT, "all_gather")
        assert seconds == pytest.approx(64 * payloads)
        both = native_mesh_seconds(Topology.grid(shape, wrap=wrap), 64, self.UNIT)
        assert both == pytest.approx(2 * seconds)

    def test_hops(self):
        hop = replace(DEFAULT, latency=1.0, bandwidth=1e30)
        for wrap, hops in ((False, 3 + 7), (True, 2 + 4)):
            mesh = Topology.grid("4x8", wrap=wrap)
            assert native_mesh_seconds(mesh, 1, hop, "all_gather") == pytest.approx(hops)


class TestPeers:
    def test_on_a_damaged_mesh_in_the_order_of_coordinates(self):
        hole, network = Topology.grid("8x8", failed="2x2@2,2"), NETWORKS["v6e"]
        natural, along = lax_psum_peers(hole, 10**8, network)
        assert (natural.name, along.name) == (LAX_PSUM, ALONG_RING)
        order = RingOrder(hole, hole.coords)
        assert natural.seconds == native_ring_seconds(order, 10**8, network)
        assert along.seconds == native_ring_seconds(ring_order(hole), 10**8, network)
        assert natural.seconds > 1.9 * along.seconds
        assert "5 of its steps go over failed chips" in natural.note
        assert along.note == "all 60 steps of the ring are one hop"

    def test_on_a_torus_the_order_of_coordinates_is_nearly_a_ring(self):
        """A row's end is linked to its start, so only the hole is in the way."""
        torus = Topology.grid("16x16", failed="2x2@2,2", wrap=True)
        natural, along = lax_psum_peers(torus, 10**8, NETWORKS["v6e"])
        assert along.seconds == pytest.approx(natural.seconds, rel=0.02)
        assert "2 of its steps go over failed chips" in natural.note

    def test_on_a_whole_mesh_all_axes_at_once(self):
        torus = Topology.grid("16x16", wrap=True)
        (natural,) = lax_psum_peers(torus, 10**8, NETWORKS["v6e"])
        assert natural.note == "over all axes at once"
        assert natural.seconds == native_mesh_seconds(torus, 10**8, NETWORKS["v6e"])
        ring = native_ring_seconds(ring_order(torus), 10**8, NETWORKS["v6e"])
        assert ring == natural.seconds  # whatever the order
        hole = Topology.grid("16x16", failed="2x2@2,2", wrap=True)
        assert 2 * natural.seconds < lax_psum_seconds(hole, 10**8, NETWORKS["v6e"])

    def test_xla_knows_of_no_failed_link(self):
        """With all chips of a slice it sums over all axes, and crosses the link."""
        whole, one_link = Topology.grid("4x4"), Topology.grid("4x4", failed_links="0,0-1,0")
        (peer,) = lax_psum_peers(one_link, 10**8, DEFAULT)
        assert peer.note == "over all axes at once, failed links included"
        assert peer.seconds == native_mesh_seconds(whole, 10**8, DEFAULT)
        assert not native_obstacle(ring_order(whole))
        assert "also over failed links" in native_obstacle(ring_order(one_link))
        with pytest.raises(PlanError, match="mark a chip at each as failed"):
            ftmesh.plan(one_link, executor="xla")
        assert ftmesh.plan(one_link).executor == "ppermute"
        assert "not summed by XLA: XLA sums over all axes" in str(ftmesh.plan(one_link))
        marked = one_link.with_failed([(0, 0)])
        assert not native_obstacle(ring_order(marked))

    def test_nothing_is_claimed_for_tiles(self):
        tiles = TiledTopology.from_topology(Topology.grid("4x4"), "2x1")
        assert lax_psum_peers(tiles, 10**8, DEFAULT) == ()
