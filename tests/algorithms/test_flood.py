"""`flood` on any connected mesh."""

import hashlib
import math
import os
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest

import ftmesh
from ftmesh import PlanError, Topology, VerificationError, verify
from ftmesh.algorithms import flood, registry
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import SplitSchedule
from ftmesh.topology.graph import direction_lanes, lane_sources

ODD = Topology.grid("5x4", failed="1x1@1,1;1x1@3,2", failed_links="0,0-1,0")


def check(topo):
    """Build and prove a flood, and check what all floods have in common."""
    schedule = flood.build_schedule(topo)
    proof = verify(schedule)
    live = topo.num_live
    assert (proof.num_owners, proof.depth < live) == (live, True)
    assert proof.num_additions == proof.num_copies == schedule.num_chunks * (live - 1)
    assert np.bincount(schedule.owner).tolist() == [schedule.num_chunks // live] * live
    assert schedule.is_neighbour_only
    return schedule


def least_rounds(topo, schedule):
    """The lower bound of an all-gather: everything must cross the tightest cut."""
    return math.ceil(ftmesh.limits(topo).all_gather * schedule.num_chunks)


@pytest.mark.parametrize(
    ("shape", "failed", "wrap"),
    [
        ("8x8", "2x2@2,2", False),
        ("16x16", "4x2@4,4", False),
        ("16x32", "4x2@6,14", False),
        ("16x32", "4x2@2,2", False),
        pytest.param("32x32", "4x2@14,14", False, marks=pytest.mark.slow),
        ("16x16", "2x2@2,2", True),
        ("4x4x8", "2x2x1@0,0,0", False),
        ("4x4x8", "2x2x1@0,0,0", True),
        ("8x8", "", True),
        ("4x4x8", "", True),
        ("13", "", False),
        ("16x16", "1x1@3,3;1x1@4,9;2x1@10,10", True),
    ],
)
def test_the_all_gather_takes_the_fewest_rounds_possible(shape, failed, wrap):
    topo = Topology.grid(shape, failed=failed, wrap=wrap)
    schedule = check(topo)
    assert [phase.num_rounds for phase in schedule.phases] == [least_rounds(topo, schedule)] * 2


def random_damages(number, seed):
    """Connected meshes of one to three axes without up to a quarter of their chips, and links."""
    rng = np.random.default_rng(seed)
    while number:
        axes = rng.choice([1, 2, 2, 2, 2, 3])
        shape = tuple(map(int, rng.integers(3, 9, axes) if axes < 3 else (3, 3, 3)))
        wrap, chips = bool(rng.integers(2)), list(np.ndindex(shape))
        failed = rng.permutation(chips)[: rng.integers(len(chips) // 4 + 1)].tolist()
        links = [link for link in Topology.grid(shape, wrap=wrap).links if link[0] < link[1]]
        cables = rng.permutation(links)[: rng.integers(len(links) // 8 + 1)].tolist()
        topo = Topology.grid(shape, failed=failed, failed_links=cables, wrap=wrap)
        if len(topo.components()) == 1:
            number -= 1
            yield topo


@pytest.mark.parametrize(
    ("number", "seed"), [(40, 0), pytest.param(120, 1, marks=pytest.mark.slow)]
)
def test_any_connected_mesh(number, seed):
    ratios = []
    for topo in random_damages(number, seed):
        schedule = check(topo)
        limits = ftmesh.limits(topo)
        least = max(least_rounds(topo, schedule), limits.diameter)
        ratios.append(schedule.rounds_in_reduce_scatter / least)
    assert np.mean(ratios) < 1.02
    assert np.mean(np.array(ratios) > 1) < 0.1
    assert max(ratios) < 1.5


def test_a_link_carries_one_chunk_per_round_in_its_own_lane():
    schedule = check(ODD)
    for phase in schedule.phases:
        c = phase.transfers
        assert set(c.count.tolist()) == {1}
        lanes = {}
        for lane, *link in zip(c.lane.tolist(), c.src.tolist(), c.dst.tolist(), strict=True):
            assert lanes.setdefault(tuple(link), lane) == lane
        for lane in phase.lanes:
            links = [link for link, its_lane in lanes.items() if its_lane == lane]
            assert len({src for src, _ in links}) == len({dst for _, dst in links}) == len(links)
    first, second = (phase.transfers for phase in schedule.phases)
    assert np.array_equal(first.lane, direction_lanes(ODD, first.dst, first.src))
    assert np.array_equal(second.lane, direction_lanes(ODD, second.src, second.dst))


def test_direction_lanes_on_three_axes_that_wrap():
    topo = Topology.grid("3x3x2", failed="", wrap=True)
    coords = [(1, 0, 0), (2, 0, 0), (0, 1, 0), (0, 2, 0), (0, 0, 1)]
    ends = np.array([topo.rank(coord) for coord in coords])
    here = np.full_like(ends, topo.rank((0, 0, 0)))
    assert direction_lanes(topo, here, ends).tolist() == [0, 1, 2, 3, 4]
    assert direction_lanes(topo, ends, here).tolist() == [1, 0, 3, 2, 5]
    assert lane_sources(topo)[:, here[0]].tolist() == [
        ends[1],
        ends[0],
        ends[3],
        ends[2],
        18,
        ends[4],
    ]


@pytest.mark.parametrize(
    ("shape", "chunks", "rounds"),
    [("2x2", 2, 3), ("2x3", 2, 5), ("3x3", 1, 4), ("2", 1, 1), ("2x2x2", 3, 7), ("4x6", 1, 12)],
)
def test_small_meshes_use_chunks_that_fill_whole_rounds(shape, chunks, rounds):
    """So that they come within 5 % of the limit too."""
    topo = Topology.grid(shape)
    schedule = check(topo)
    assert (schedule.num_chunks, schedule.rounds_in_reduce_scatter) == (
        chunks * topo.num_live,
        rounds,
    )
    assert Fraction(rounds, schedule.num_chunks) <= 1.05 * ftmesh.limits(topo).all_gather


def test_chips_in_a_row_get_different_chunks_from_both_ends():
    """With a lookahead of one hop, both ends would bring many of the same chunks."""
    topo = Topology.grid("4x7", failed="1x1@1,1")
    sources = lane_sources(topo)
    near, far = (flood.flood(sources, 1, lookahead).num_rounds for lookahead in (1, 6))
    assert check(topo).rounds_in_reduce_scatter <= far < near


def test_a_pocket_receives_everything_over_its_one_link():
    topo = Topology.from_drawing("""
        .....
        .XXXX
        .....
        .....
    """)
    assert check(topo).rounds_in_reduce_scatter == topo.num_live - 1


def test_a_corner_behind_one_chip_gets_different_chunks_both_ways():
    """Chip (1, 6) sends to three others, which pass the chunks on to each other."""
    topo = Topology.grid("8x8", failed="1x1@0,5;1x1@2,7")
    schedule = check(topo)
    assert schedule.rounds_in_reduce_scatter <= least_rounds(topo, schedule) + 1


def test_tiles():
    chips = Topology.grid("6x6x4", failed="1x1x1@2,2,2", wrap=True)
    tiles = ftmesh.plan(ftmesh.TiledTopology.from_topology(chips, "2x2x2"), "flood")
    assert (tiles.proof.num_ranks, tiles.proof.num_positions) == (17, 8)


class TestErrors:
    def test_a_disconnected_mesh(self):
        cut = Topology.grid("8x8", failed="8x2@0,2")
        with pytest.raises(PlanError, match=r"32 chips around \(0, 4\), 16 chips around \(0, 0\)"):
            registry.build_schedule(cut, "flood")
        with pytest.raises(PlanError, match="no link joins some of its chips to the others"):
            flood.build_schedule(cut)

    def test_a_single_chip(self):
        with pytest.raises(PlanError, match="nothing to sum"):
            flood.build_schedule(Topology.grid("1"))


class TestWhenItIsTried:
    def test_not_if_another_has_a_reduce_scatter(self, monkeypatch):
        monkeypatch.setitem(registry.ALGORITHMS, "flood", None)
        for topo in (Topology.grid("4x4"), Topology.grid("4x4", failed="2x2@0,0")):
            assert "flood" not in registry.try_algorithms(topo)

    def test_if_no_other_works(self):
        outcomes = registry.try_algorithms(ODD)
        working = [name for name, o in outcomes.items() if not isinstance(o, PlanError)]
        assert working == ["flood"]
        assert ftmesh.plan(ODD).with_reduce_scatter.algorithm == "flood"

    def test_if_others_have_no_reduce_scatter(self, monkeypatch):
        split = registry.build_schedule(Topology.grid("4x4"), "ring")
        plain = ftmesh.Schedule(split.topology, "ring", split.num_chunks, split.phases)
        for name in ("two_dim", "row_pair", "ring"):
            monkeypatch.setitem(registry.ALGORITHMS, name, lambda topology: plain)
        assert registry.try_algorithms(split.topology)["flood"].algorithm == "flood"

    def test_by_name(self):
        assert ftmesh.plan(Topology.grid("4x4"), "flood").proof.num_owners == 16


PRINT_DIGEST = """
import hashlib, numpy as np
from ftmesh import Topology
from ftmesh.algorithms import registry
topo = Topology.grid("5x4", failed="1x1@1,1;1x1@3,2", failed_links="0,0-1,0")
columns = np.stack([*registry.build_schedule(topo, "flood").transfers])
print(hashlib.sha256(columns.astype("<i4").tobytes()).hexdigest())
"""


def test_every_process_builds_the_same_schedule():
    call = [sys.executable, "-c", PRINT_DIGEST]
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(call, capture_output=True, text=True, check=True, env=env)
    columns = np.stack([*flood.build_schedule(ODD).transfers]).astype("<i4")
    assert done.stdout.strip() == hashlib.sha256(columns.tobytes()).hexdigest()


def with_all_gather(schedule, transfers):
    reduce_scatter, all_gather = schedule.phases
    return SplitSchedule(
        topology=schedule.topology,
        algorithm="flood",
        num_chunks=schedule.num_chunks,
        phases=(reduce_scatter, Phase(all_gather.name, transfers)),
        owner=schedule.owner,
        rounds_in_reduce_scatter=schedule.rounds_in_reduce_scatter,
    )


def test_a_chunk_that_is_sent_before_it_arrives_is_found():
    """One transfer is moved to the round in which its chunk arrives, on a link that is free."""
    schedule = check(ODD)
    c = schedule.phases[1].transfers
    rows = list(zip(*(column.tolist() for column in c), strict=True))
    arrival = {(dst, chunk): now for now, _, _, dst, chunk, *_ in rows}
    busy = {(now, src, dst) for now, _, src, dst, *_ in rows}
    early, now = next(
        (i, now)
        for i, (_, _, src, dst, chunk, *_) in enumerate(rows)
        if (now := arrival.get((src, chunk))) is not None and (now, src, dst) not in busy
    )
    round_ = c.round.copy()
    round_[early] = now
    verify(with_all_gather(schedule, c))
    with pytest.raises(VerificationError, match=f"chunk {c.chunk[early]} "):
        verify(with_all_gather(schedule, c.replace(round=round_)))
