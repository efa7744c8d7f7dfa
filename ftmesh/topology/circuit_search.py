"""Search for a closed walk through as many vertices of a graph as possible, once each.

Vertices are visited in order, and every set of edges chosen so far is a set of paths. What can
follow depends only on which open ends belong together among the vertices that still have edges to
come, the *frontier*; so of several choices that leave the same pairs of ends, the one that left out
fewest vertices is kept. If all are kept the search is exact. On large graphs only a limited number
are, some of each number of vertices left out; with more of them the result can only be better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DONE = -1  # in place of a mate: the vertex has both of its edges
_WIDTHS = (64, 1_024, 8_192)  # numbers of states to keep, one after the other
_MAX_WORK = 3 * 10**8  # states times edges times frontier, about a second

Edge = tuple[int, int]
_Mates = NDArray[np.int16]


def longest_cycle(num_vertices: int, edges: Sequence[Edge], at_most: int) -> list[int]:
    """Return the vertices of a long cycle in order; empty if the graph has none.

    The search ends at a cycle of `at_most` vertices, the most that the caller knows can be. The
    result depends on the arguments alone, never on the time that the search takes.

    >>> longest_cycle(5, [(0, 1), (1, 2), (2, 3), (3, 0), (3, 4)], 5)
    [0, 1, 2, 3]
    """
    sweep = _Sweep.from_edges(num_vertices, edges)
    best: list[int] = []
    for width in _WIDTHS:
        work = width * len(edges) * sweep.num_slots
        if width > _WIDTHS[0] and work > _MAX_WORK:
            break
        search = _Search(sweep, width)
        cycle = search.run()
        best = max(best, cycle, key=len)
        if len(best) >= at_most or search.is_exact:
            break
    return best


@dataclass(frozen=True)
class _Sweep:
    """The edges to later vertices, vertex by vertex, and each vertex's slot in the frontier."""

    num_vertices: int
    later: list[list[int]]
    slot: list[int]
    leaves_after: list[list[int]]  # the vertices whose last edge is that of this vertex
    num_slots: int

    @staticmethod
    def from_edges(num_vertices: int, edges: Sequence[Edge]) -> _Sweep:
        later: list[list[int]] = [[] for _ in range(num_vertices)]
        last = list(range(num_vertices))
        for a, b in {(min(edge), max(edge)) for edge in edges}:
            later[a].append(b)
            last[b] = max(last[b], a)
        for ends in later:
            ends.sort()
        leaves_after: list[list[int]] = [[] for _ in range(num_vertices)]
        for vertex in range(num_vertices):
            own = vertex if later[vertex] else last[vertex]
            leaves_after[max(own, last[vertex])].append(vertex)
        slot, used = [-1] * num_vertices, 0
        free: list[int] = []
        for vertex in range(num_vertices):
            for new in (vertex, *later[vertex]):
                if slot[new] < 0:
                    if not free:
                        free.append(used)
                        used += 1
                    slot[new] = free.pop()
            free.extend(slot[gone] for gone in leaves_after[vertex])
        return _Sweep(num_vertices, later, slot, leaves_after, used)


class _Search:
    """One pass over all vertices, with at most `width` states after each."""

    def __init__(self, sweep: _Sweep, width: int) -> None:
        self.sweep, self.width = sweep, width
        self.is_exact = True
        self.mates: _Mates = np.full((1, sweep.num_slots), DONE, np.int16)
        self.left_out = np.zeros(1, np.int32)
        self.history: list[tuple[Edge | None, NDArray[np.int32], NDArray[np.bool_]]] = []
        self.rng = np.random.default_rng(0)
        self.hash = self.rng.integers(1, 2**62, sweep.num_slots, dtype=np.int64) | 1
        self.best = sweep.num_vertices, -1, 0  # left out, where in the history, and which state

    def run(self) -> list[int]:
        sweep = self.sweep
        entered = [False] * sweep.num_vertices
        for vertex in range(sweep.num_vertices):
            for new in (vertex, *sweep.later[vertex]):
                if not entered[new]:
                    entered[new] = True
                    self.mates[:, sweep.slot[new]] = sweep.slot[new]
            num_unseen = entered.count(False)
            for other in sweep.later[vertex]:
                self._decide((vertex, other), num_unseen)
            for gone in sweep.leaves_after[vertex]:
                self._leave(sweep.slot[gone])
            self._prune()
            if not len(self.mates):
                break
        return self._cycle()

    def _decide(self, edge: Edge, num_unseen: int) -> None:
        """Take or leave an edge, in every state."""
        a, b = (self.sweep.slot[end] for end in edge)
        of_a, of_b = self.mates[:, a], self.mates[:, b]
        closes = np.flatnonzero((of_a == b) & (of_b == a))
        if len(closes):
            self._record_cycles(edge, closes, num_unseen)
        taken = np.flatnonzero((of_a != DONE) & (of_b != DONE) & (of_a != b)).astype(np.int32)
        mates, rows = self.mates[taken], np.arange(len(taken))
        mate_a, mate_b = of_a[taken], of_b[taken]
        mates[:, a] = mates[:, b] = DONE
        mates[rows, mate_a], mates[rows, mate_b] = mate_b, mate_a
        everyone = np.arange(len(self.mates), dtype=np.int32)
        parent = np.concatenate([everyone, taken])
        is_taken = np.arange(len(parent)) >= len(everyone)
        self.history.append((edge, parent, is_taken))
        self.mates = np.concatenate([self.mates, mates])
        self.left_out = self.left_out[parent]

    def _record_cycles(self, edge: Edge, closing: NDArray[np.intp], num_unseen: int) -> None:
        """Remember the best cycle that this edge closes; all that is not on it is left out."""
        mates = self.mates[closing].copy()
        mates[:, [self.sweep.slot[end] for end in edge]] = DONE
        is_single = mates == np.arange(mates.shape[1], dtype=np.int16)
        is_whole = ((mates == DONE) | is_single).all(axis=1)
        if not is_whole.any():
            return
        left_out = self.left_out[closing] + is_single.sum(axis=1) + num_unseen
        left_out = np.where(is_whole, left_out, self.sweep.num_vertices)
        least = int(left_out.argmin())
        if left_out[least] < self.best[0]:
            self.best = int(left_out[least]), len(self.history), int(closing[least])
            self.closing_edge = edge

    def _leave(self, slot: int) -> None:
        """Drop the states in which a vertex without further edges is the end of a path."""
        mate = self.mates[:, slot]
        is_single = mate == slot
        keep = np.flatnonzero((mate == DONE) | is_single).astype(np.int32)
        self.left_out = (self.left_out + is_single)[keep]
        self.mates = self.mates[keep]
        self.mates[:, slot] = DONE
        self._keep(keep)

    def _prune(self) -> None:
        """Keep one state of those that are alike, and `width` in all, of every cost alike."""
        keep = np.argsort(self.left_out, kind="stable")
        key = (self.mates.astype(np.int64) @ self.hash)[keep]
        _, first = np.unique(key, return_index=True)  # the first of each has the lowest cost
        keep = keep[np.sort(first)]
        keep = keep[self.left_out[keep] < self.best[0]]
        if len(keep) > self.width:
            self.is_exact = False
            keep = self._sample(keep)
        self.mates, self.left_out = self.mates[keep], self.left_out[keep]
        self._keep(keep.astype(np.int32))

    def _sample(self, states: NDArray[np.intp]) -> NDArray[np.intp]:
        """`width` of some states: the cheapest costs get equal shares, at random within a cost."""
        costs = self.left_out[states]
        chosen, left = [], self.width
        levels = np.unique(costs)[:4]
        for i, cost in enumerate(levels):
            same = states[costs == cost]
            share = left // (len(levels) - i)
            chosen.append(self.rng.permutation(same)[:share])
            left -= len(chosen[-1])
        return np.concatenate(chosen)

    def _keep(self, keep: NDArray[np.int32]) -> None:
        self.history.append((None, keep, np.zeros(0, np.bool_)))

    def _cycle(self) -> list[int]:
        _, when, state = self.best
        if when < 0:
            return []
        joined: dict[int, list[int]] = {}
        edges = [self.closing_edge]
        for edge, parent, is_taken in reversed(self.history[:when]):
            if edge is not None and is_taken[state]:
                edges.append(edge)
            state = int(parent[state])
        for a, b in edges:
            joined.setdefault(a, []).append(b)
            joined.setdefault(b, []).append(a)
        start = min(joined)
        walk, here = [start], min(joined[start])
        while here != start:
            before = walk[-1]
            walk.append(here)
            first, second = joined[here]
            here = second if first == before else first
        return walk
