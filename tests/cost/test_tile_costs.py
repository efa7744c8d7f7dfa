"""Costs and lower bounds of all-reduces over tiles."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest

import ftmesh
from ftmesh import TiledTopology, Topology
from ftmesh.algorithms import registry
from ftmesh.cost.links import Network
from ftmesh.cost.lower_bounds import limits
from ftmesh.cost.simulate import MODES, Simulator
from ftmesh.planning.selection import select_algorithm
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import Schedule
from ftmesh.schedule.transfers import make_transfers

QUICK, SLOW = Network(50e9, 0.1e-6, 0.2e-6), Network(50e9, 500e-6)
PAYLOAD = 64_000_000


def tiled(shape, tile, failed="", cores=1):
    chips = replace(Topology.grid(shape, failed=failed), devices_per_chip=cores)
    return TiledTopology.from_topology(chips, tile)


def seconds(topology, algorithm, network=QUICK, mode="synchronous", payload=PAYLOAD):
    return Simulator(registry.build_schedule(topology, algorithm)).seconds(payload, network, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("algorithm", ["ring", "row_pair"])
def test_tiles_of_one_chip_cost_what_chips_cost(algorithm, mode):
    chips = Topology.grid("8x8", failed="2x2@2,2")
    tiles = TiledTopology.from_topology(chips, "1x1")
    assert seconds(tiles, algorithm, mode=mode) == seconds(chips, algorithm, mode=mode)


@pytest.mark.parametrize("network", [QUICK, SLOW], ids=["by bandwidth", "by latency"])
@pytest.mark.parametrize("tile", ["1x1", "2x1", "1x2", "2x2", "4x2"])
def test_a_ring_of_tiles(tile, network):
    tiles = tiled("16x16", tile)
    length, busy = max(tiles.tile), PAYLOAD / (2 * tiles.num_live * network.bandwidth)
    a_round = network.overhead + network.latency + busy + (length - 1) * max(network.latency, busy)
    assert seconds(tiles, "ring", network) == pytest.approx(2 * (tiles.num_live - 1) * a_round)


@pytest.mark.parametrize("mode", MODES)
def test_two_cores_share_the_links_of_their_chip(mode):
    tiles = tiled("8x8", "1x1", cores=2)
    busy = PAYLOAD / (2 * 64 * QUICK.bandwidth)
    a_round = QUICK.overhead + QUICK.latency + 2 * busy
    found = seconds(tiles, "ring", mode=mode)
    assert found == pytest.approx(2 * 63 * a_round, rel=1e-12 if mode == "synchronous" else 0.02)


@pytest.mark.parametrize(("tile", "step", "times"), [("2x2", 1, 2), ("4x1", 1, 4), ("4x1", 4, 1)])
def test_every_link_on_the_route_carries_the_length_of_a_tile(tile, step, times):
    """`step` 1 is to the next tile along x; on a grid of four, 4 is to the next along y."""
    tiles = tiled("16x4" if tile == "4x1" else "8x8", tile)
    pairs = [
        (a, a + step)
        for a in range(16 - step)
        if tiles.is_link(tiles.coords[a], tiles.coords[a + step])
    ]
    src, dst = zip(*pairs, strict=True)
    shift = Phase("shift", make_transfers(round=0, lane=0, src=src, dst=dst, chunk=0))
    schedule = Schedule(tiles, "shift", 1, (shift,))
    loads = schedule.link_loads(shift)
    between = {
        link: load
        for link, load in loads.items()
        if len({tuple(c // t for c, t in zip(chip, tiles.tile, strict=True)) for chip in link}) == 2
    }
    assert set(between.values()) == {times}
    assert max(loads.values()) == times
    crossing = tiles.num_positions * len(pairs)
    assert sum(between.values()) == crossing
    assert times == crossing / len(between), "the bound: positions for each link between tiles"


@pytest.mark.parametrize(
    ("shape", "tile", "failed"),
    [("8x8", "2x1", "2x2@2,2"), ("8x8", "2x2", "1x1@2,2"), ("12x12", "2x2", "4x4@4,4")],
)
def test_dataflow_is_between_the_lower_bound_and_synchronous(shape, tile, failed):
    tiles = tiled(shape, tile, failed)
    for schedule in registry.try_algorithms(tiles).values():
        if isinstance(schedule, Schedule):
            for payload in (10_000, 100_000_000):
                synchronous, dataflow = (
                    Simulator(schedule).seconds(payload, QUICK, mode) for mode in MODES
                )
                least = limits(tiles).all_reduce_seconds(payload, QUICK)
                assert least <= dataflow <= synchronous * (1 + 1e-12)


def test_report_of_a_simulation():
    tiles = tiled("8x8", "2x2", "1x1@2,2")
    found = ftmesh.simulate(registry.build_schedule(tiles, "row_pair"), payload_bytes=PAYLOAD)
    assert set(found.link_bytes) <= set(tiles.chips.links)
    hops = sum(
        total * len(list(pairwise(found.schedule.on_chips.routes[pair])))
        for phase in found.schedule.on_chips.phases
        for pair, total in phase.traffic.items()
    )
    assert sum(found.link_bytes.values()) == pytest.approx(PAYLOAD / 16 * hops)
    assert 0 < found.utilisation < 1
    assert "on 8x8 less 1x1@2,2 in 4x4 tiles of 2x2: 64 MB in" in str(found)


class TestSelection:
    def test_the_fastest_on_the_links_of_chips(self):
        for tile in ("2x1", "2x2"):
            for payload in (10_000, 100_000_000):
                tiles = tiled("8x16", tile)
                found = {
                    name: seconds(tiles, name, payload=payload)
                    for name in ("ring", "row_pair", "two_dim")
                }
                selection = select_algorithm(tiles, payload, QUICK, reduce_scatter=True)
                assert selection.algorithm == min(found, key=found.__getitem__)
                assert selection.candidates[0].seconds == min(found.values())

    def test_tiles_may_need_another_algorithm_than_a_mesh_of_their_shape(self):
        tiles, mesh = tiled("16x16", "2x1"), Topology.grid("8x16")
        assert select_algorithm(tiles, 400_000_000, reduce_scatter=True).algorithm == "two_dim"
        assert select_algorithm(mesh, 400_000_000, reduce_scatter=True).algorithm == "ring"

    def test_partial_sums_in_a_wider_dtype(self):
        tiles = tiled("8x8", "2x2")
        wide, narrow = (
            select_algorithm(tiles, PAYLOAD, QUICK, kind, reduce_scatter=True)
            for kind in ("float32", "bfloat16")
        )
        by_name = {one.algorithm: one.seconds for one in wide.candidates}
        for one in narrow.candidates:
            if one.partial_sum_dtype == "float32" and not one.rejection:
                assert by_name[one.algorithm] < one.seconds < 2 * by_name[one.algorithm]

    def test_row_pairs_along_the_less_busy_axis(self):
        tiles = tiled("16x32", "2x2", "4x2@6,14")
        schedule = registry.build_schedule(tiles, "row_pair")
        assert schedule.phases[0].name == "column-pair rings, reduce-scatter"
        assert 1e6 * seconds(tiles, "row_pair", Network(50e9, 0.5e-6), payload=10**8) < 5100


class TestLimits:
    @pytest.mark.parametrize("side", [1, 2, 4])
    @pytest.mark.parametrize("failed", ["", "1x1@1,1", "2x1@2,3"])
    def test_square_tiles_are_a_mesh_with_less_bandwidth(self, side, failed):
        """Between two tiles there are `side` links for the square of `side` positions."""
        mesh = Topology.grid("5x6", failed=failed)
        blocks = [tuple(side * c for c in chip) for chip in mesh.failed]
        holes = ";".join(f"{side}x{side}@{x},{y}" for x, y in blocks)
        tiles = tiled(f"{5 * side}x{6 * side}", f"{side}x{side}", holes)
        small, large = limits(mesh), limits(tiles)
        assert (large.all_gather, large.all_reduce) == (
            side * small.all_gather,
            side * small.all_reduce,
        )
        assert large.diameter >= side * small.diameter
        assert (large.live, large.links) == (small.live, side * small.links)

    def test_long_tiles(self):
        found = limits(tiled("8x8", "2x1"))
        assert (found.all_gather, found.all_reduce) == (Fraction(2 * 31, 32 * 3), Fraction(62, 80))
        assert found.diameter == 6 + 7
        assert found.why_all_gather == "tile (0, 0) hangs on 3 links shared by 2 positions"

    def test_live_chips_of_failed_tiles_may_forward(self):
        found = limits(tiled("8x8", "2x2", "1x1@2,2"))
        assert found.all_reduce == Fraction(4 * 3, 10)
        assert limits(tiled("8x8", "2x2", "2x2@2,2")).all_reduce == Fraction(4 * 3, 8)
        assert found.why_all_reduce == (
            "the 3 tiles 2x1@0,0;1x1@0,1 each for itself, the other 12 together: 10 links shared "
            "by 4 positions for 3 joins"
        )

    def test_cores_share_the_links_of_a_chip(self):
        one, two = (limits(tiled("4x4", "1x1", cores=cores)) for cores in (1, 2))
        assert (two.all_gather, two.all_reduce) == (2 * one.all_gather, 2 * one.all_reduce)
