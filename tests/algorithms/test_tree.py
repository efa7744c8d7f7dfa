"""`tree` on any connected mesh."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ftmesh import PlanError, Topology, simulate, verify
from ftmesh.algorithms import registry, tree
from ftmesh.algorithms.tree import grow_trees
from ftmesh.algorithms.tree_rounds import NO_ROUND, order_messages
from ftmesh.schedule.schedule import SplitSchedule
from ftmesh.schedule.transfers import ADD, COPY
from ftmesh.topology.graph import LinkGraph


def check(topology, num_chunks, lag=0):
    """Build and prove a schedule, and check what all tree schedules have in common."""
    schedule = tree.build_schedule(topology, num_chunks, lag=lag)
    proof = verify(schedule)
    num_edges = topology.num_live - 1
    assert not isinstance(schedule, SplitSchedule)
    assert proof.is_neighbour_only
    assert proof.num_additions + proof.num_copies == 2 * num_chunks * num_edges
    # Sums meet between two chips, which both add, or at one.
    assert num_chunks * num_edges <= proof.num_additions <= num_chunks * (num_edges + 1)
    return schedule


@pytest.mark.parametrize(
    "topology",
    [
        Topology.grid("2"),
        Topology.grid("7"),
        Topology.grid("1x5"),
        Topology.grid("5", wrap=True),
        Topology.grid("2x2"),
        Topology.grid("3x3", failed="1x1@1,1"),
        Topology.grid("4x4", failed="1x1@0,1;1x1@2,2"),
        Topology.grid("7x9", failed="1x1@1,1;1x1@4,4;1x1@6,0", failed_links="2,2-3,2"),
        Topology.grid("6x6", failed="2x2@2,2", wrap=True),
        Topology.grid("3x4x4", failed="2x2x1@0,0,0"),
        Topology.grid("3x3x3", failed_links="0,0,0-1,0,0;1,1,1-1,1,2", wrap=(True, False, True)),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_chunks", [1, 2, 7, 40])
def test_any_mesh(topology, num_chunks):
    check(topology, num_chunks)


@st.composite
def damages(draw):
    """Chips and links failed anywhere, on one to three axes, some of which wrap."""
    shape = draw(st.sampled_from(["6", "4x4", "5x3", "6x6", "3x3x3", "2x3x4"]))
    sizes = tuple(map(int, shape.split("x")))
    coord = st.tuples(*(st.integers(0, n - 1) for n in sizes))
    wrap = draw(st.tuples(*(st.booleans() for _ in sizes)))
    failed = draw(st.lists(coord, max_size=4))
    assume(len(set(failed)) < np.prod(sizes) - 1)
    chips = Topology.grid(shape, failed=failed, wrap=wrap)
    links = (
        draw(st.lists(st.sampled_from(chips.links or [None]), max_size=3)) if chips.links else []
    )
    topology = Topology.grid(shape, failed=failed, failed_links=links, wrap=wrap)
    assume(len(topology.components()) == 1)
    return topology


@settings(max_examples=60)
@given(damages(), st.sampled_from([1, 3, 16]), st.sampled_from([0, 0, 1, 2]))
def test_any_damage(topology, num_chunks, lag):
    check(topology, num_chunks, lag)


@pytest.mark.parametrize(
    ("mesh", "failed", "wrap", "num_chunks", "rounds"),
    [
        ("8x8", "2x2@2,2", False, 256, 165),
        pytest.param("16x16", "4x2@4,4", False, 416, 248, marks=pytest.mark.slow),
        pytest.param("16x32", "4x2@6,14", False, 576, 345, marks=pytest.mark.slow),
        pytest.param("16x32", "4x2@2,2", False, 416, 272, marks=pytest.mark.slow),
        pytest.param("32x32", "4x2@14,14", False, 704, 425, marks=pytest.mark.slow),
        pytest.param("16x16", "2x2@2,2", True, 320, 165, marks=pytest.mark.slow),
        pytest.param("4x4x8", "2x2x1@0,0,0", False, 288, 133, marks=pytest.mark.slow),
        ("4x4x8", "2x2x1@0,0,0", True, 240, 83),
    ],
)
def test_number_of_rounds(mesh, failed, wrap, num_chunks, rounds):
    topology = Topology.grid(mesh, failed=failed, wrap=wrap)
    assert check(topology, num_chunks).num_rounds <= rounds


def test_schedules_are_deterministic():
    topology = Topology.grid("6x6", failed="1x1@1,2", failed_links="3,3-4,3")
    assert tree.build_schedule(topology, 30) == tree.build_schedule(topology, 30)


def test_lanes_are_directions_and_stay_permutations():
    transfers = check(Topology.grid("4x5x3", failed="1x1x1@1,2,1"), 20).transfers
    assert set(transfers.lane.tolist()) == set(range(6))
    for lane in range(6):
        here = transfers.take(transfers.lane == lane)
        pairs = set(zip(here.src.tolist(), here.dst.tolist(), strict=True))
        assert len(pairs) == len({s for s, _ in pairs}) == len({d for _, d in pairs})


def test_several_chunks_per_link_and_round():
    """Each has its own lane, and no link carries more than `width` in a round."""
    topology = Topology.grid("5x5", failed="1x1@1,2")
    schedule = tree.build_schedule(topology, 30, width=3)
    verify(schedule)
    verify(tree.build_schedule(topology, 30, width=3, lag=2))
    transfers = schedule.transfers
    link_and_round = np.stack([transfers.round, transfers.src, transfers.dst])
    _, carried = np.unique(link_and_round, axis=1, return_counts=True)
    assert carried.max() == 3
    assert set(transfers.lane.tolist()) == set(range(12))
    assert schedule.num_rounds < tree.build_schedule(topology, 10).num_rounds + 1
    seconds = simulate(schedule, payload_bytes=3_000_000, link=50e9, latency=0.5e-6).seconds
    assert seconds == pytest.approx(schedule.num_rounds * (0.5e-6 + 3 * 100_000 / 50e9), rel=0.1)


def test_answers_are_copied_and_crossing_messages_are_added():
    schedule = check(Topology.grid("2"), 1)
    assert schedule.transfers.op.tolist() == [ADD, ADD]
    line = check(Topology.grid("3"), 1).transfers
    assert sorted(zip(line.round.tolist(), line.op.tolist(), strict=True)) == [
        (0, ADD), (0, ADD), (1, COPY), (1, COPY)
    ]  # fmt: skip


def test_a_message_waits_for_all_others():
    """On a line, the middle receives from both sides before it sends to either."""
    graph = LinkGraph.from_topology(Topology.grid("5"))
    rounds = order_messages(graph, grow_trees(graph, 1, 1, balance=1.5), 1)[:, 0]
    ends = zip(graph.source.tolist(), graph.target.tolist(), rounds.tolist(), strict=True)
    assert sorted(ends) == [
        (0, 1, 0), (1, 0, 3), (1, 2, 1), (2, 1, 2), (2, 3, 2), (3, 2, 1), (3, 4, 3), (4, 3, 0)
    ]  # fmt: skip


def message_rounds(schedule):
    """(chunk, src, dst) -> round."""
    c = schedule.transfers
    ends = zip(c.chunk.tolist(), c.src.tolist(), c.dst.tolist(), strict=True)
    return dict(zip(ends, c.round.tolist(), strict=True))


def too_early(schedule, lag):
    """The messages that are sent before those they depend on have arrived, `lag` rounds late."""
    sent = message_rounds(schedule)
    into = {}
    for chunk, u, v in sent:
        into.setdefault((chunk, v), []).append(u)
    return [
        (chunk, u, v)
        for (chunk, u, v), index in sent.items()
        if not all(
            sent[chunk, w, u] + lag < index
            for w in into[chunk, u]
            if w != v or sent[chunk, w, u] < index
        )
    ]


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_messages_wait_for_those_in_flight(lag):
    topology = Topology.grid("5x4", failed="1x1@1,1", failed_links="3,3-4,3")
    schedule = tree.build_schedule(topology, 24, lag=lag)
    verify(schedule)
    assert not too_early(schedule, lag)
    assert too_early(schedule, lag + 1)


def test_trees_span_the_graph_and_balance_the_links():
    graph = LinkGraph.from_topology(Topology.grid("6x6", failed="2x2@2,2"))
    trees = grow_trees(graph, 24, 24, balance=1.5)
    assert ((trees == NO_ROUND).sum(axis=1) == 1).all()
    used = np.bincount(trees[trees != NO_ROUND] // 2, minlength=graph.num_links // 2)
    assert used.max() <= 1.35 * used.mean()
    for parents in trees:
        reached = {int(np.flatnonzero(parents == NO_ROUND)[0])}
        while len(reached) < graph.num_ranks:
            more = {r for r in range(graph.num_ranks) if int(graph.source[parents[r]]) in reached}
            assert more - reached
            reached |= more


class TestErrors:
    def test_a_disconnected_mesh(self):
        with pytest.raises(PlanError, match="is cut into 2 parts"):
            registry.build_schedule(Topology.grid("5", failed="1@2"), "tree")

    def test_a_negative_lag(self):
        with pytest.raises(PlanError, match="number of rounds, not -1"):
            registry.build_schedule(Topology.grid("4x4"), "tree", num_chunks=4, lag=-1)

    def test_no_chunks(self):
        with pytest.raises(PlanError, match="num_chunks must be 1 or more, not 0"):
            registry.build_schedule(Topology.grid("4x4"), "tree", num_chunks=0)


@pytest.mark.parametrize("failed", ["1@1", "3@1"])
def test_meshes_without_a_sum_raise(failed):
    with pytest.raises(PlanError, match=r"nothing to sum|no link joins"):
        tree.build_schedule(Topology.grid("4", failed=failed), 4)
