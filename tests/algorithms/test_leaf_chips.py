"""Leaf chips: how they are found, and schedules that keep them out of the trees."""

import numpy as np
import pytest

from ftmesh import PlanError, Topology, verify
from ftmesh.algorithms import tree
from ftmesh.algorithms.tree import LeafChips
from ftmesh.schedule.transfers import ADD, COPY
from ftmesh.topology.graph import LinkGraph

ONE = """
    .X..
    ....
    ....
"""
CHAIN = """
    .X....
    .X....
    ......
"""
FORK = """
    .X....
    .X....
    ......
    .X....
    .X....
"""


def draw(picture):
    return Topology.from_drawing("\n".join(line.strip() for line in picture.split()))


def heights(picture):
    topology = draw(picture)
    leaves = LeafChips.from_graph(LinkGraph.from_topology(topology))
    return {topology.coords[r]: int(h) for r, h in zip(leaves.rank, leaves.height, strict=True)}


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        ("... ... ...", {}),
        (ONE, {(0, 0): 0}),
        (CHAIN, {(0, 0): 0, (0, 1): 1, (0, 2): 2, (1, 2): 3}),
        (FORK, {(0, 0): 0, (0, 1): 1, (0, 4): 0, (0, 3): 1, (0, 2): 2, (1, 2): 3}),
    ],
)
def test_leaves_are_removed_until_none_is_left(picture, expected):
    assert heights(picture) == expected


@pytest.mark.parametrize("picture", [ONE, CHAIN, FORK])
@pytest.mark.parametrize("num_chunks", [1, 6, 16])
@pytest.mark.parametrize("lag", [0, 1])
def test_leaf_chips_send_before_and_receive_after_the_trees(picture, num_chunks, lag):
    topology = draw(picture)
    schedule = tree.build_schedule(topology, num_chunks, lag=lag, leaves_apart=True)
    proof = verify(schedule)
    assert proof.num_additions + proof.num_copies == 2 * num_chunks * (topology.num_live - 1)
    first, trees, last = schedule.phases
    assert [phase.name for phase in schedule.phases] == [
        "leaf chips to core",
        "packed trees",
        "core to leaf chips",
    ]
    leaves = set(LeafChips.from_graph(LinkGraph.from_topology(topology)).rank.tolist())
    assert set(first.transfers.src.tolist()) == set(last.transfers.dst.tolist()) == leaves
    assert not leaves & {*trees.transfers.src.tolist(), *trees.transfers.dst.tolist()}
    assert (first.transfers.op == ADD).all()
    assert (last.transfers.op == COPY).all()


def test_a_chain_sends_several_pieces_and_a_single_leaf_one():
    assert tree.build_schedule(draw(ONE), 16, leaves_apart=True).phases[0].num_rounds == 1
    chain = tree.build_schedule(draw(CHAIN), 16, leaves_apart=True).phases[0]
    assert chain.num_rounds == 8 + 3
    assert chain.counts == [2]


@pytest.mark.parametrize(("shape", "which"), [("4x4", "none"), ("1x5", "all")])
def test_no_leaf_chips_or_only_leaf_chips_raise(shape, which):
    with pytest.raises(PlanError, match=f"{which} of its chips are leaf chips"):
        tree.build_schedule(Topology.grid(shape), 4, leaves_apart=True)


def test_the_core_graph():
    topology = draw(CHAIN)
    graph = LeafChips.from_graph(LinkGraph.from_topology(topology)).core_graph
    np.testing.assert_array_equal(graph.source[::2], graph.target[1::2])
    assert graph.num_ranks == topology.num_live - 4
    assert graph.num_links == len(topology.links) - 2 * 4
