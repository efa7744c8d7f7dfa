"""Lower bounds compared with brute force, the published table and their own proofs."""

import itertools
import random
from dataclasses import replace
from fractions import Fraction
from functools import cache
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from ftmesh.cost.links import Network
from ftmesh.cost.lower_bounds import limits
from ftmesh.cost.min_cut import tightest_cut, weakest_partition
from ftmesh.errors import ArgumentError, TopologyError
from ftmesh.topology.topology import Topology


def check_proofs(bounds):
    """Check the proofs of lower bounds, link by link."""
    topology = bounds.topology
    pairs_of_chips = {frozenset(link) for link in topology.links}
    assert bounds.links == len(pairs_of_chips)
    part_of = {chip: number for number, part in enumerate(bounds.partition) for chip in part}
    assert sorted(part_of) == sorted(topology.coords)
    assert sum(map(len, bounds.partition)) == bounds.live
    between = sum(len({part_of[chip] for chip in pair}) == 2 for pair in pairs_of_chips)
    assert bounds.all_reduce * between == len(bounds.partition) - 1
    assert bounds.strength * (len(bounds.partition) - 1) == between
    cut = set(bounds.cut)
    assert set() < cut < set(topology.coords)
    leaving = sum(len(pair & cut) == 1 for pair in pairs_of_chips)
    assert bounds.all_gather * leaving * bounds.live == bounds.live - len(cut)
    return bounds


@cache
def all_partitions(count):
    """Every partition of `count` vertices, a row each: the number of each vertex's part."""
    rows = [[0]]
    for _ in range(count - 1):
        rows = [[*row, part] for row in rows for part in range(max(row) + 2)]
    return np.array(rows)


def brute_strength(count, edges):
    rows = all_partitions(count)
    between = sum((rows[:, a] != rows[:, b]).astype(int) for a, b in edges)
    joins = rows.max(axis=1)
    return min(Fraction(int(e), int(j)) for e, j in set(zip(between, joins, strict=True)) if j)


def brute_cut(count, edges):
    """The most vertices outside a set per edge that leaves it."""
    sets = np.array(list(itertools.product((0, 1), repeat=count)))[1:-1]
    leaving = sum((sets[:, a] != sets[:, b]).astype(int) for a, b in edges)
    outside = count - sets.sum(axis=1)
    return max(Fraction(int(s), int(d)) for s, d in set(zip(outside, leaving, strict=True)))


def edges_of(topology):
    ranks = [(topology.rank(a), topology.rank(b)) for a, b in topology.links]
    return [(a, b) for a, b in ranks if a < b]


@st.composite
def small_meshes(draw):
    """The largest connected piece of a small mesh with chips and links failed at random."""
    shape = draw(st.sampled_from(["3x3", "2x4", "2x2x2", "9", "4x2", "1x6"]))
    whole = Topology.grid(shape, failed="", wrap=draw(st.booleans()))
    failed = draw(st.sets(st.sampled_from(whole.coords), max_size=len(whole.coords) - 2))
    pairs_of_chips = sorted({tuple(sorted(link)) for link in whole.links})
    failed_links = draw(st.sets(st.sampled_from(pairs_of_chips), max_size=3))
    broken = replace(whole, failed=frozenset(failed), failed_links=frozenset(failed_links))
    largest = broken.components()[0]
    return replace(broken, failed=frozenset(whole.coords) - set(largest))


@settings(max_examples=150)
@given(small_meshes())
def test_small_meshes_by_brute_force(topology):
    bounds = limits(topology)
    if bounds.live == 1:
        assert (bounds.all_gather, bounds.all_reduce, bounds.strength) == (0, 0, None)
        return
    check_proofs(bounds)
    edges = edges_of(topology)
    assert bounds.strength == brute_strength(bounds.live, edges)
    assert bounds.all_gather * bounds.live == brute_cut(bounds.live, edges)


@st.composite
def graphs(draw):
    """A random tree and some more edges, parallel ones too."""
    count = draw(st.integers(2, 8))
    tree = [(draw(st.integers(0, vertex - 1)), vertex) for vertex in range(1, count)]
    pairs = st.sampled_from(list(itertools.combinations(range(count), 2)))
    return count, tree + draw(st.lists(pairs, max_size=16))


@settings(max_examples=150)
@given(graphs())
def test_small_graphs_by_brute_force(graph):
    count, edges = graph
    parts = weakest_partition(count, edges)
    between = sum(parts[a] != parts[b] for a, b in edges)
    assert sorted(set(parts)) == list(range(max(parts) + 1))
    assert Fraction(between, max(parts)) == brute_strength(count, edges)
    cut = set(tightest_cut(count, edges))
    leaving = sum((a in cut) != (b in cut) for a, b in edges)
    assert 0 < len(cut) < count
    assert Fraction(count - len(cut), leaving) == brute_cut(count, edges)


@pytest.mark.parametrize(
    ("mesh", "failed", "live", "links", "strength", "all_gather", "all_reduce", "diameter"),
    [
        ("16x32", "", 512, 976, 1.910, 0.4990, 0.5236, 46),
        ("16x32", "4x2@6,14", 504, 954, 1.897, 0.4990, 0.5273, 46),
        ("16x32", "4x2@2,2", 504, 954, 1.625, 0.4990, 0.6154, 46),
        ("32x32", "4x2@14,14", 1016, 1962, 1.933, 0.4995, 0.5173, 62),
    ],
)
def test_the_published_table(mesh, failed, live, links, strength, all_gather, all_reduce, diameter):
    bounds = check_proofs(limits(Topology.grid(mesh, failed=failed)))
    assert (bounds.live, bounds.links, bounds.diameter) == (live, links, diameter)
    assert round(float(bounds.strength), 3) == strength
    assert round(float(bounds.all_gather), 4) == all_gather
    assert round(float(bounds.all_reduce), 4) == all_reduce


def pack_trees(count, edges, strength):
    """The weight that Cunningham's greedy method packs into the edges, by a flow for every edge.

    Weights of at most the denominator of `strength`, of which no set A of vertices holds more than
    its numerator times (|A| - 1). Strength is no less exactly if the whole graph holds as much.
    """
    per_vertex, per_edge = strength.numerator, strength.denominator
    weights = np.zeros(len(edges), np.int32)
    names = np.arange(count, count + len(edges))
    source, sink = count + len(edges), count + len(edges) + 1
    ends = np.array(edges).T
    rows = [np.full(len(edges), source), names, names, np.arange(count)]
    columns = [names, *ends, np.full(count, sink)]
    for number, edge in enumerate(edges):
        room = np.full(count, per_vertex, np.int32)
        room[list(edge)] = 0
        amounts = np.concatenate([weights, weights, weights, room])
        places = (np.concatenate(rows), np.concatenate(columns))
        network = csr_array((amounts, places), shape=(sink + 1, sink + 1))
        free = per_vertex - weights.sum() + maximum_flow(network, source, sink).flow_value
        weights[number] = min(per_edge, free)
    return weights.sum()


def damaged_at_random(seed):
    """Most of a mesh or torus from which chips and links have gone."""
    rng = np.random.default_rng(seed)
    whole = Topology.grid(("8x8", "6x9", "3x4x5")[seed % 3], failed="", wrap=seed % 2 == 1)
    pairs_of_chips = sorted({tuple(sorted(link)) for link in whole.links})
    failed = rng.choice(whole.num_live, seed, replace=False)
    broken = replace(
        whole,
        failed=frozenset(whole.coords[rank] for rank in failed),
        failed_links=frozenset(
            pairs_of_chips[i] for i in rng.choice(len(pairs_of_chips), seed, replace=False)
        ),
    )
    return replace(broken, failed=frozenset(whole.coords) - set(broken.components()[0]))


@pytest.mark.parametrize(
    "topology",
    [
        Topology.grid("8x8", failed=""),
        Topology.grid("8x8", failed="2x2@2,2"),
        Topology.grid("8x8", failed="3x3@1,1"),
        Topology.grid("6x6", failed="1x1@2,3", wrap=True),
        Topology.grid("4x4x4", failed="2x1x2@1,0,1"),
        *map(damaged_at_random, range(1, 11)),
    ],
    ids=str,
)
def test_flows_confirm_the_strength_of_meshes_too_large_for_brute_force(topology):
    bounds = check_proofs(limits(topology))
    joins, edges = bounds.live - 1, edges_of(topology)
    assert pack_trees(bounds.live, edges, bounds.strength) == bounds.strength.numerator * joins
    higher = bounds.strength + Fraction(1, 1000)
    assert pack_trees(bounds.live, edges, higher) < higher.numerator * joins


def clustered_graph(seed):
    """A graph with dense clusters, which are merged one after another."""
    rng = random.Random(seed)
    count = rng.randint(8, 14)
    cluster = [rng.randrange(1 + count // 4) for _ in range(count)]
    edges = [(rng.randrange(vertex), vertex) for vertex in range(1, count)]
    pairs = list(itertools.combinations(range(count), 2))
    weights = [1 + 7 * (cluster[a] == cluster[b]) for a, b in pairs]
    edges += rng.choices(pairs, weights, k=rng.randint(count, 3 * count))
    rng.shuffle(edges)
    return count, edges


@pytest.mark.parametrize("seed", range(40, 55))
def test_flows_confirm_the_strength_of_clustered_graphs(seed):
    count, edges = clustered_graph(seed)
    parts = weakest_partition(count, edges)
    strength = Fraction(sum(parts[a] != parts[b] for a, b in edges), max(parts))
    assert pack_trees(count, edges, strength) == strength.numerator * (count - 1)


def test_on_a_torus_reduce_scatter_and_all_gather_reach_the_bound():
    bounds = check_proofs(limits(Topology.grid("8x8", failed="", wrap=True)))
    assert bounds.all_gather == Fraction(63, 4 * 64)
    assert bounds.all_reduce == 2 * bounds.all_gather
    assert bounds.diameter == 8


def test_three_axes():
    bounds = check_proofs(limits(Topology.grid("4x4x4", failed="2x1x2@1,0,1")))
    assert (bounds.live, bounds.links, bounds.strength) == (60, 128, 2)
    assert bounds.cut == ((0, 0, 0),)
    assert len(bounds.partition) == 13
    assert check_proofs(limits(Topology.grid("4x4x4", failed="", wrap=True))).diameter == 6


def test_failed_links_make_bottlenecks_too():
    topology = Topology.grid("6x6", failed="", failed_links="0,0-1,0;1,3-2,3")
    bounds = check_proofs(limits(topology))
    assert (bounds.cut, bounds.strength) == (((0, 0),), 1)
    assert bounds.why_all_gather == "chip (0, 0) hangs on 1 link"
    assert bounds.why_all_reduce == "chip (0, 0) alone, the other 35 together: 1 link for 1 join"


def test_half_a_mesh_on_one_link():
    bounds = check_proofs(limits(Topology.grid("8x8", failed="1x7@4,0")))
    assert bounds.why_all_gather == "the 24 chips 3x8@5,0 hang on 1 link"
    assert bounds.why_all_reduce == (
        "the 24 chips 3x8@5,0 together, chip (4, 7) alone, the other 32 together: "
        "2 links for 2 joins"
    )
    assert bounds.all_gather == Fraction(33, 57)


def test_a_scattered_bottleneck_is_described_by_its_box():
    topology = Topology.from_drawing("""
        .X.X.X.X.X.
        ...........
        ...........""")
    bounds = check_proofs(limits(topology))
    assert bounds.why_all_reduce == (
        "the 6 chips between (0, 0) and (10, 0) each for itself, the other 22 together: "
        "6 links for 6 joins"
    )


@pytest.mark.parametrize("shape", ["1", "1x1", "1x1x1"])
def test_a_single_chip_needs_no_time(shape):
    bounds = limits(Topology.grid(shape, failed=""))
    assert (bounds.live, bounds.links, bounds.diameter, bounds.cut) == (1, 0, 0, ())
    assert bounds.strength is None
    assert bounds.all_gather_seconds(1e8, 50e9) == 0
    assert bounds.all_reduce_seconds(1e8, Network(50e9, 1e-6, overhead=1e-6)) == 0
    assert "a single chip has it all" in str(bounds)


def test_two_chips_swap_half_or_all():
    bounds = check_proofs(limits(Topology.grid("2", failed="")))
    assert (bounds.all_gather, bounds.all_reduce, bounds.diameter) == (Fraction(1, 2), 1, 1)


def test_disconnected_parts_are_named():
    with pytest.raises(TopologyError, match=r"2 parts .* 32 chips around \(0, 4\), 16 chips"):
        limits(Topology.grid("8x8", failed="8x2@0,2"))


def test_the_slower_of_bandwidth_and_latency():
    bounds = limits(Topology.grid("16x32", failed="4x2@2,2"))
    assert bounds.all_reduce_seconds(1e8, 50e9) == pytest.approx(1e8 / 1.625 / 50e9)
    assert bounds.all_gather_seconds(1e8, 50e9) == pytest.approx(1e8 * 503 / 504 / 2 / 50e9)
    slow = Network(50e9, latency=1e-3, overhead=1e-4)
    assert bounds.all_reduce_seconds(1e8, slow) == pytest.approx(46e-3 + 1e-4)
    assert bounds.all_reduce_seconds(1e12, slow) == bounds.all_reduce_seconds(1e12, 50e9)
    with pytest.raises(ArgumentError, match="bandwidth must be above 0"):
        bounds.all_reduce_seconds(1e8, 0)
    for wrong in (True, 10**400):
        with pytest.raises(ArgumentError, match="positive whole number"):
            bounds.all_reduce_seconds(wrong, 50e9)


@pytest.mark.parametrize("failed", ["", "2x3@1,1", "1x7@4,0;1x1@0,4"])
@pytest.mark.parametrize("wrap", [False, True])
def test_diameter_by_breadth_first_search(failed, wrap):
    topology = Topology.grid("8x8", failed=failed, wrap=wrap)
    furthest = 0
    for start in topology.coords:
        hops = {start: 0}
        for chip in (order := [start]):
            for near in topology.neighbours(chip):
                if near not in hops:
                    hops[near] = hops[chip] + 1
                    order.append(near)
        furthest = max(furthest, *hops.values())
    assert limits(topology).diameter == furthest


def test_distances_computed_in_batches(monkeypatch):
    topology = Topology.grid("7x9", failed="2x3@1,1")
    whole = limits(topology)
    monkeypatch.setattr(import_module("ftmesh.cost.lower_bounds"), "_SOURCES", 8)
    assert limits(topology) == whole


@pytest.mark.parametrize(
    "wrong",
    [
        lambda bounds: replace(bounds, partition=bounds.partition[:-1]),
        lambda bounds: replace(bounds, partition=(*bounds.partition, bounds.partition[-1])),
        lambda bounds: replace(
            bounds, partition=(bounds.partition[0] + bounds.partition[1], *bounds.partition[2:])
        ),
        lambda bounds: replace(bounds, all_reduce=bounds.all_reduce * Fraction(17, 16)),
        lambda bounds: replace(bounds, cut=((3, 0),)),
        lambda bounds: replace(bounds, cut=()),
        lambda bounds: replace(bounds, all_gather=bounds.all_gather / 2),
        lambda bounds: replace(bounds, links=bounds.links + 1),
    ],
)
def test_wrong_proofs_are_noticed(wrong):
    bounds = check_proofs(limits(Topology.grid("8x8", failed="2x2@2,2")))
    with pytest.raises(AssertionError):
        check_proofs(wrong(bounds))
