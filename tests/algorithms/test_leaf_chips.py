"""Chips that hang on one link: found, and fed before and after the trees of the others."""

import numpy as np
import pytest

from ftmesh import PlanError, Topology, verify
from ftmesh.algorithms import tree
from ftmesh.algorithms.leaf_chips import LeafChips
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


def drawn(picture):
    return Topology.from_drawing("\n".join(line.strip() for line in picture.split()))


def pendants(picture):
    topology = drawn(picture)
    found = LeafChips.from_graph(LinkGraph.from_topology(topology))
    return {topology.coords[r]: int(h) for r, h in zip(found.rank, found.height, strict=True)}


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        ("... ... ...", {}),
        (ONE, {(0, 0): 0}),
        (CHAIN, {(0, 0): 0, (0, 1): 1, (0, 2): 2, (1, 2): 3}),
        (FORK, {(0, 0): 0, (0, 1): 1, (0, 4): 0, (0, 3): 1, (0, 2): 2, (1, 2): 3}),
    ],
)
def test_taken_away_until_none_is_left(picture, expected):
    assert pendants(picture) == expected


@pytest.mark.parametrize("picture", [ONE, CHAIN, FORK])
@pytest.mark.parametrize("num_chunks", [1, 6, 16])
@pytest.mark.parametrize("lag", [0, 1])
def test_fed_before_and_after(picture, num_chunks, lag):
    topology = drawn(picture)
    schedule = tree.build_schedule(topology, num_chunks, lag=lag, feeding=True)
    proof = verify(schedule)
    assert proof.num_additions + proof.num_copies == 2 * num_chunks * (topology.num_live - 1)
    first, trees, last = schedule.phases
    assert [phase.name for phase in schedule.phases] == ["feeding in", "packed trees", "handing on"]
    hung = set(LeafChips.from_graph(LinkGraph.from_topology(topology)).rank.tolist())
    assert set(first.transfers.src.tolist()) == set(last.transfers.dst.tolist()) == hung
    assert not hung & {*trees.transfers.src.tolist(), *trees.transfers.dst.tolist()}
    assert (first.transfers.op == ADD).all()
    assert (last.transfers.op == COPY).all()


def test_one_goes_in_a_piece_and_a_chain_in_several():
    assert tree.build_schedule(drawn(ONE), 16, feeding=True).phases[0].num_rounds == 1
    chain = tree.build_schedule(drawn(CHAIN), 16, feeding=True).phases[0]
    assert chain.num_rounds == 8 + 3
    assert chain.counts == [2]


@pytest.mark.parametrize(("shape", "which"), [("4x4", "none"), ("1x5", "all")])
def test_where_there_is_nothing_to_feed(shape, which):
    with pytest.raises(PlanError, match=f"{which} of its chips hang on one link"):
        tree.build_schedule(Topology.grid(shape), 4, feeding=True)


def test_the_graph_of_the_others():
    topology = drawn(CHAIN)
    found = LeafChips.from_graph(LinkGraph.from_topology(topology))
    graph = found.graph_of_others
    np.testing.assert_array_equal(graph.source[::2], graph.target[1::2])
    assert graph.num_ranks == topology.num_live - 4
    assert graph.num_links == len(topology.links) - 2 * 4
