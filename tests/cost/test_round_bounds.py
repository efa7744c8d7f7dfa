"""Bounds in rounds: against the published column, against brute force, and below real plans."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftmesh import Topology, limits
from ftmesh.algorithms import tree
from ftmesh.cost import round_bounds
from ftmesh.cost.links import DEFAULT, Network
from ftmesh.cost.round_bounds import RoundBound, all_reduce_round_bound, tree_round_bound
from ftmesh.topology.graph import LinkGraph


@pytest.mark.parametrize(
    ("mesh", "failed", "wrap", "microseconds"),
    [
        ("8x8", "2x2@2,2", False, 1270),
        ("16x16", "4x2@4,4", False, 1255),
        pytest.param("16x32", "4x2@6,14", False, 1322, marks=pytest.mark.slow),
        ("16x32", "4x2@2,2", False, 1374),
        pytest.param("32x32", "4x2@14,14", False, 1380, marks=pytest.mark.slow),
        ("16x16", "2x2@2,2", True, 1034),
        ("4x4x8", "2x2x1@0,0,0", False, 943),
        ("4x4x8", "2x2x1@0,0,0", True, 688),
    ],
)
def test_the_published_column(mesh, failed, wrap, microseconds):
    """100 MB; the seventh is computed as 940.4."""
    bounds = limits(Topology.grid(mesh, failed=failed, wrap=wrap))
    seconds = tree_round_bound(bounds).seconds(10**8, DEFAULT)
    assert 1e6 * seconds == pytest.approx(microseconds, rel=0.003)
    assert bounds.all_reduce_seconds(10**8, DEFAULT) < seconds
    assert all_reduce_round_bound(bounds).seconds(10**8, DEFAULT) <= seconds


def brute_force(topology, num_chunks):
    """The bound of the best set and the best far chip of all, as the module defines it."""
    graph = LinkGraph.from_topology(topology)
    best = 0.0
    for far in range(graph.num_ranks):
        hops = round_bounds._distances(graph, far)
        others = [rank for rank in range(graph.num_ranks) if rank != far]
        for size in range(1, len(others) + 1):
            for some in itertools.combinations(others, size):
                inside = np.isin(np.arange(graph.num_ranks), some)
                to, of = inside[graph.target], inside[graph.source]
                touching = (to & ~of).sum() + (to & of).sum() // 2
                idle = hops[graph.source[to & ~of]].sum()
                best = max(best, (num_chunks * size + idle) / touching)
    return best


@pytest.mark.parametrize("shape", ["3x3", "2x4", "9", "2x2x2"])
@pytest.mark.parametrize("num_chunks", [8, 64])
def test_no_set_is_better_on_small_meshes(shape, num_chunks, monkeypatch):
    monkeypatch.setattr(round_bounds, "FAR_CHIPS", 99)
    topology = Topology.grid(shape, failed=[(1,) + (0,) * shape.count("x")] if "x" in shape else "")
    lines = round_bounds._tree_lines.__wrapped__(topology)
    bounds = max(a + b * num_chunks for a, b in lines)
    assert bounds == pytest.approx(brute_force(topology, num_chunks), rel=1e-3)


@settings(max_examples=10)
@given(
    st.sampled_from(["4x4", "5x3", "3x3x2", "7"]),
    st.sets(st.integers(0, 14), max_size=3),
    st.booleans(),
    st.sampled_from([1, 5, 24]),
)
def test_no_plan_has_fewer_rounds(shape, failed, wrap, num_chunks):
    whole = Topology.grid(shape, wrap=wrap)
    dead = [whole.coords[rank] for rank in failed if rank < whole.num_live - 2]
    broken = Topology.grid(shape, failed=dead, wrap=wrap)
    topology = Topology.grid(
        shape, failed=set(whole.coords) - set(broken.components()[0]), wrap=wrap
    )
    if topology.num_live < 2:
        return
    rounds = tree.build_schedule(topology, num_chunks).num_rounds
    assert tree_round_bound(limits(topology)).rounds(num_chunks) <= rounds + 1e-9


def test_a_bound_is_the_highest_of_its_lines():
    bound = RoundBound(((10.0, 0.5), (0.0, 1.0)))
    assert [bound.rounds(k) for k in (4, 20, 40)] == [12.0, 20.0, 40.0]
    assert bound.best_num_chunks(1.0, 40.0) == 20.0, "where they meet"
    assert bound.best_num_chunks(1.0, 5.0) == 10.0, "where the first is least"
    assert bound.best_num_chunks(0.0, 5.0) == np.inf
    assert bound.seconds(5e9, Network(1e9, 1.0)) == 15 * 1.5
    assert bound.seconds(5e9, Network(1e9, 0.0)) == 5.0


@pytest.mark.parametrize(("latency", "least"), [(1e-12, 2000 / 1.625), (0.1, 46e5)])
def test_by_bytes_or_by_hops(latency, least):
    bounds = limits(Topology.grid("16x32", failed="4x2@2,2"))
    seconds = all_reduce_round_bound(bounds).seconds(10**8, Network(50e9, latency))
    assert least <= 1e6 * seconds < 1.06 * least


def test_large_meshes_are_left_out(monkeypatch):
    monkeypatch.setattr(round_bounds, "MAX_CHIPS", 15)
    assert tree_round_bound(limits(Topology.grid("4x4"))) is None
    assert tree_round_bound(limits(Topology.grid("3x5"))) is not None


@pytest.mark.parametrize("shape", ["1", "1x1"])
def test_a_single_chip_needs_no_rounds(shape):
    bounds = limits(Topology.grid(shape))
    assert all_reduce_round_bound(bounds).seconds(10**8, DEFAULT) == 0
    assert tree_round_bound(bounds).seconds(10**8, DEFAULT) == 0


def test_a_wrong_line_is_noticed():
    """Of two chips, one chunk takes a round: a line that asks for more would exclude the plan."""
    bounds = limits(Topology.grid("2"))
    rounds = tree.build_schedule(bounds.topology, 3).num_rounds
    assert tree_round_bound(bounds).rounds(3) == 3 == rounds
    wrong = RoundBound((*tree_round_bound(bounds).lines, (0.5, 1.0)))
    assert wrong.rounds(3) > rounds
