"""The search for the longest cycle of a graph, against all cycles of small ones."""

import random
from itertools import combinations

import pytest

from ftmesh.topology.circuit_search import longest_cycle
from tests.support.random_damage import find_circuit_by_force


def longest_by_force(num_vertices, edges):
    """The length of the longest cycle, by trying every path from its lowest vertex."""
    joined = {vertex: set() for vertex in range(num_vertices)}
    for a, b in edges:
        joined[a].add(b)
        joined[b].add(a)
    longest = 0

    def extend(start, here, seen):
        nonlocal longest
        for there in joined[here]:
            if there == start and len(seen) > 2:
                longest = max(longest, len(seen))
            elif there > start and there not in seen:
                extend(start, there, seen | {there})

    for start in range(num_vertices):
        extend(start, start, {start})
    return longest


def check_cycle(cycle, edges):
    """A cycle visits a vertex once, by edges of the graph."""
    known = {frozenset(edge) for edge in edges}
    assert len(set(cycle)) == len(cycle)
    for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        assert frozenset((a, b)) in known


@pytest.mark.parametrize("num_vertices", range(3, 9))
def test_small_graphs_of_any_kind(num_vertices):
    rng = random.Random(num_vertices)
    pairs = list(combinations(range(num_vertices), 2))
    lengths = set()
    for _ in range(40):
        edges = rng.sample(pairs, rng.randint(2, min(len(pairs), 2 * num_vertices)))
        cycle = longest_cycle(num_vertices, edges, num_vertices)
        assert len(cycle) == longest_by_force(num_vertices, edges), edges
        check_cycle(cycle, edges)
        lengths.add(len(cycle))
    assert {0, num_vertices} <= lengths


def test_edges_may_be_given_in_any_order():
    edges = [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]
    cycles = {
        tuple(longest_cycle(4, [edge[::-1] if flip else edge for edge in order], 4))
        for order in (edges, edges[::-1])
        for flip in (False, True)
    }
    assert cycles == {(0, 1, 2, 3)}


def test_no_cycle():
    assert longest_cycle(1, [], 1) == []
    assert longest_cycle(4, [(0, 1), (1, 2), (2, 3)], 4) == []


def test_the_search_ends_at_the_length_that_is_known_to_be_the_most():
    """4x5 less a corner: nineteen chips, of which eighteen fit on a cycle."""
    chips = [(x, y) for x in range(4) for y in range(5)][1:]
    index = {chip: i for i, chip in enumerate(chips)}
    edges = [
        (index[x, y], index[end])
        for x, y in chips
        for end in ((x + 1, y), (x, y + 1))
        if end in index
    ]
    cycle = longest_cycle(19, edges, 18)
    assert len(cycle) == 18
    check_cycle(cycle, edges)
    neighbours = {i: [] for i in range(19)}
    for a, b in edges:
        neighbours[a].append(b)
        neighbours[b].append(a)
    assert find_circuit_by_force(neighbours) is None


def test_a_large_graph_of_many_states():
    """Too many states to keep them all: 12x12 less a third of a diagonal."""
    chips = [(x, y) for x in range(12) for y in range(12) if x != y or x % 3]
    index = {chip: i for i, chip in enumerate(chips)}
    edges = [
        (index[x, y], index[end])
        for x, y in chips
        for end in ((x + 1, y), (x, y + 1))
        if end in index
    ]
    even = sum((x + y) % 2 == 0 for x, y in chips)
    most = 2 * min(even, len(chips) - even)
    cycle = longest_cycle(len(chips), edges, most)
    assert len(cycle) == most == 136
    check_cycle(cycle, edges)
    assert cycle == longest_cycle(len(chips), edges, most)
