"""The order of ranks: a ring through all live chips, by single hops wherever there is one."""

import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ftmesh.topology.ring_order as module
from ftmesh import (
    TiledTopology,
    Topology,
    VerificationError,
    jax_mesh,
)
from ftmesh.testing import cpu_grid
from ftmesh.topology.ranks import Ranks
from ftmesh.topology.ring_order import RingOrder, ring_order
from tests.support.more import more
from tests.support.random_damage import (
    fewest_long_steps,
    find_circuit_by_force,
    live_neighbours,
    random_damage,
)

ROOT = Path(__file__).parent.parent.parent
HOLE = Topology.grid("4x4", failed="2x2@2,2")
V6E = Topology.grid("16x16", failed="2x2@2,2")
SMALL_SHAPES = [(6, 6)]
SHAPES = [(12, 12), (4, 4, 8)]


def long_steps(order):
    """The number of steps that are not between neighbours, by the neighbours of the test."""
    neighbours = live_neighbours(order.topology)
    ring = order.coords
    return sum(b not in neighbours[a] for a, b in zip(ring, ring[1:] + ring[:1], strict=True))


# Circuits ---------------------------------------------------------------------------------------


def check_against_all_circuits(seed, count):
    """Compare with an exhaustive search, which gives up on a few; count what it says."""
    rng, counts = random.Random(seed), Counter()
    while counts.total() < count:
        topology = random_damage(rng, SMALL_SHAPES, most_failed=0.3)
        neighbours = live_neighbours(topology)
        if len(neighbours) < 3:
            continue
        order = ring_order(topology)
        try:
            exists = find_circuit_by_force(neighbours, max_steps=20_000) is not None
        except TimeoutError:
            counts["given up"] += 1
            continue
        counts[exists] += 1
        assert (long_steps(order) == 0) == exists, topology
        assert order.is_circuit == exists, topology
    return counts


def test_a_circuit_wherever_an_exhaustive_search_finds_one():
    counts = check_against_all_circuits(0, 300)
    assert counts[True] > 60
    assert counts[False] > 100
    assert counts["given up"] < 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=more) for n in range(2, 9))])
def test_a_circuit_wherever_an_exhaustive_search_finds_one_on_more_meshes(seed):
    counts = check_against_all_circuits(seed, 1_000)
    assert counts[True] > 200
    assert counts["given up"] < 30


@pytest.mark.parametrize(
    ("shape", "failed", "wrap"),
    [
        ("32x32", "4x2@5,3", False),
        ("64x64", "2x2@2,2", False),
        ("64x64", None, True),
        ("16x16x16", "2x2x1@2,2,2", True),
        ("16x20x28", "2x2x1@4,6,8", True),
    ],
)
def test_circuits_of_large_meshes_take_a_second(shape, failed, wrap):
    topology = Topology.grid(shape, failed=failed, wrap=wrap)
    seconds = []
    for _ in range(3):  # beside other work a run may take twice as long
        module._ring_order.cache_clear()
        start = time.thread_time()
        order = ring_order(topology)
        seconds.append(time.thread_time() - start)
        if seconds[-1] < 2:
            break
    assert min(seconds) < 2
    assert long_steps(order) == 0
    order.prove()


# Longer steps -----------------------------------------------------------------------------------


def check_damage(topology):
    """Check the ring of a damaged mesh; return its long steps, the bound on them, and blocks."""
    order = ring_order(topology)
    assert sorted(order.coords) == sorted(live_neighbours(topology))
    assert order.coords[0] == topology.coords[0]
    if order.blocked:
        with pytest.raises(VerificationError, match=r"the step of the ring from .* goes over"):
            order.prove()
    else:
        order.prove()
    num_long, bound = long_steps(order), fewest_long_steps(live_neighbours(topology))
    assert num_long >= bound
    assert order.is_circuit == (num_long == 0)
    assert f"{len(order.coords)} steps of the ring" in str(order)
    return num_long, bound, len(order.blocked)


def test_random_damages_have_rings():
    rng = random.Random(0)
    results = [check_damage(random_damage(rng, SHAPES)) for _ in range(60)]
    steps, bounds, blocked = map(np.array, zip(*results, strict=True))
    assert (steps == 0).sum() >= 20
    assert (steps - bounds).mean() < 1
    assert (blocked > 0).mean() < 0.2


@more
@pytest.mark.slow
def test_5000_random_damages_have_rings(capsys):
    """The figures of this test are printed: run it with -s."""
    rng, start = random.Random(1), time.process_time()
    results = [check_damage(random_damage(rng, SHAPES)) for _ in range(5_000)]
    seconds = time.process_time() - start
    steps, bounds, blocked = map(np.array, zip(*results, strict=True))
    with capsys.disabled():
        print(f"\n5,000 damages in {seconds:.0f} s: {(steps == 0).sum()} circuits")
        print(f"{'':24}" + "".join(f"{n:>6}" for n in (*range(8), "more")))
        rows = {
            "long steps": steps, "more than the bound": steps - bounds, "blocked steps": blocked,
        }  # fmt: skip
        for name, values in rows.items():
            counts = [*((values == n).sum() for n in range(8)), (values > 7).sum()]
            print(f"{name:24}" + "".join(f"{n:>6}" for n in counts))
    assert (steps == bounds).mean() > 0.7
    assert (steps - bounds).mean() < 0.6
    assert (blocked > 0).mean() < 0.13


def test_an_odd_number_of_chips_costs_one_step_of_two_hops():
    for shape in ("5x5", "7x3", "9x11"):
        order = ring_order(Topology.grid(shape))
        assert Counter(order.hops) == {1: len(order.coords) - 1, 2: 1}
        order.prove()
    assert str(ring_order(Topology.grid("5x5"))) == (
        "24 of 25 steps of the ring are one hop, 1 is two"
    )


def test_a_large_mesh_with_an_odd_number_of_chips():
    order = ring_order(Topology.grid("32x32", failed="1x1@13,9"))
    assert Counter(order.hops) == {1: 1022, 2: 1}
    order.prove()


def test_lines_one_chip_and_two():
    line = ring_order(Topology.grid("5x1"))
    assert Counter(line.hops) == {1: 4, 4: 1}
    line.prove()
    assert ring_order(Topology.grid("5x1", wrap=True)).is_circuit
    assert ring_order(Topology.grid("1x1")).steps == ()
    assert ring_order(Topology.grid("2x1")).coords == ((0, 0), (1, 0))


def test_two_parts_have_a_ring_too():
    """It is no use for sums, but ranks need an order."""
    order = ring_order(Topology.from_drawing("..X..\n..X.."))
    assert len(set(order.coords)) == 8
    assert order.blocked


# Determinism ------------------------------------------------------------------------------------


def test_processes_agree_whatever_their_hash_seeds():
    """Also where chips are in sets, and states are sampled at random."""
    program = """
import random, sys
from tests.support.random_damage import random_damage
import ftmesh.topology.ring_order as module
from ftmesh.topology.ring_order import ring_order
rng = random.Random(7)
for _ in range(15):
    print(ring_order(random_damage(rng, [(12, 12), (4, 4, 8)])).coords)
"""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) == 15


# The proof --------------------------------------------------------------------------------------


class TestProof:
    """A ring with a planted fault is rejected."""

    def test_two_chips_swapped(self):
        coords = list(ring_order(V6E).coords)
        coords[40], coords[41] = coords[41], coords[40]
        swapped = RingOrder(V6E, tuple(coords))
        assert long_steps(swapped) == 2
        assert Counter(swapped.hops) == {1: 250, 2: 2}
        assert not swapped.is_circuit

    def test_a_route_over_a_failed_chip(self):
        """In grid order: from the end of the last whole row, back over the row with the hole."""
        in_grid_order = RingOrder(HOLE, HOLE.coords)
        assert in_grid_order.blocked == (((3, 1), (0, 2)),)
        says = r"from \(0, 2\) to \(3, 1\) goes over failed chip \(2, 2\)"
        with pytest.raises(VerificationError, match=says):
            in_grid_order.prove()

    def test_a_route_over_a_failed_link(self):
        broken = Topology.grid("4x2", failed_links="1,0-2,0")
        whole = ring_order(Topology.grid("4x2")).coords
        says = r"from \(1, 0\) to \(2, 0\) goes over failed link \(1, 0\)-\(2, 0\)"
        with pytest.raises(VerificationError, match=says):
            RingOrder(broken, whole).prove()

    def test_a_chip_left_out_or_there_twice(self):
        coords = ring_order(HOLE).coords
        for wrong in (coords[:-1], (*coords, coords[0]), (*coords[:-1], coords[0])):
            with pytest.raises(VerificationError, match=r"expected \(\d, \d\) once on the ring"):
                RingOrder(HOLE, wrong).prove()

    def test_a_failed_chip_on_the_ring(self):
        coords = ring_order(HOLE).coords
        says = r"\(2, 2\) on the ring is no live chip of 4x4 less 2x2@2,2"
        with pytest.raises(VerificationError, match=says):
            RingOrder(HOLE, (*coords, (2, 2))).prove()


# Ranks ------------------------------------------------------------------------------------------


class TestRanks:
    def test_two_devices_of_a_chip_stand_side_by_side(self):
        bare = Topology.grid("4x2", failed="1x1@1,0")
        devices = tuple(f"{coord} core {core}" for coord in bare.coords for core in (0, 1))
        two = replace(bare, devices_per_chip=2, devices=devices)
        ranks = Ranks(two)
        assert ranks.num_ranks == ranks.num_live == 14
        expected = [f"{c} core {core}" for c in ring_order(bare).coords for core in (0, 1)]
        assert list(ranks.devices) == expected
        for chip, coord in enumerate(two.coords):
            own = [expected[rank] for rank in ranks.of_chips[chip]]
            assert own == [f"{coord} core 0", f"{coord} core 1"]

    def test_idle_devices_come_last(self):
        topology = cpu_grid("4x4", failed="2x2@1,1")
        ranks = Ranks(topology, with_idle=True)
        assert ranks.coords[:12] == ring_order(topology).coords
        assert ranks.coords[12:] == ((1, 1), (2, 1), (1, 2), (2, 2))
        assert ranks.live.tolist() == list(range(12))
        at = dict(zip(topology.all_coords(), topology.all_devices, strict=True))
        assert ranks.devices == tuple(at[coord] for coord in ranks.coords)
        mesh = jax_mesh(topology, "data", with_idle=True)
        assert mesh.devices.tolist() == list(ranks.devices)
        assert jax_mesh(topology, "data").devices.tolist() == list(ranks.devices[:12])

    def test_positions_are_places_along_the_axis(self):
        ranks = Ranks(V6E)
        assert sorted(ranks.position.tolist()) == list(range(252))
        for chip in (0, 17, 251):
            assert ranks.coords[ranks.position[chip]] == V6E.coords[chip]

    def test_tiles(self):
        tiles = TiledTopology.from_topology(cpu_grid("8x4", failed="1x1@3,1"), "2x1")
        ring = ring_order(tiles).coords
        assert len(ring) == 15
        assert (1, 1) not in ring
        devices = np.array(jax_mesh(tiles, ("data", "model")).devices)
        assert devices.shape == (15, 2)
        at = dict(zip(tiles.chips.all_coords(), tiles.chips.all_devices, strict=True))
        for rank, (x, y) in enumerate(ring):
            assert devices[rank].tolist() == [at[2 * x, y], at[2 * x + 1, y]]

    def test_the_order_of_a_mesh_is_a_circuit_of_its_devices(self):
        topology = cpu_grid("6x4", failed="2x2@2,0")
        coords = [topology.coord_of(device) for device in jax_mesh(topology, "data").devices]
        assert long_steps(RingOrder(topology, tuple(coords))) == 0
