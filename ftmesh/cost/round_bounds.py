"""Round bounds: in how few rounds k chunks can be summed, if a link carries one in each.

`ftmesh.cost.lower_bounds` bounds any all-reduce by what links carry. In rounds there is more to say, as
nothing can arrive before it has come all the way. For any algorithm, k chunks take at least

- k over the strength of the graph, and
- at every chip v, its eccentricity less 1 until what is farthest begins to come in, and then k over
  its number of links.

Where every chunk is summed along a spanning tree of its own, as `ftmesh.algorithms.tree` does, take a
chip f and a set S of others. In each tree every chip of S has one link towards f, so that links
that touch S are used k |S| times, and each carries at most one such chunk a round. A link into S
from a chip u outside carries what comes from f, and that is not at u before round dist(f, u). So

    rounds * (links that touch S)  >=  k |S| + sum of dist(f, u) over links into S from u outside.

For an f and a number of chunks the best S is a minimum cut, found anew until no set is better. Each
of these is a line in k, and the bound is the highest of them.

>>> from ftmesh.cost.lower_bounds import limits
>>> bound = tree_bound(limits(Topology.grid("8x8", failed="2x2@2,2")))
>>> bound.rounds(10), round(bound.rounds(200), 1)
(18.0, 121.9)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from ftmesh.cost.links import Network
from ftmesh.cost.lower_bounds import Limits
from ftmesh.topology.graph import Graph
from ftmesh.topology.topology import Topology

MOST_CHIPS = 4096  # beyond, minimum cuts take longer than they are worth
FAR_CHIPS = 4  # each gives a bound; those of one distance from the others give much the same
CHUNKS = tuple(2**n for n in range(13))  # for which the best sets are looked for
MANY = 100_000  # chunks
WHOLE = 2**29  # what all capacities of a flow are kept below, in whole numbers

Floats = NDArray[np.float64]
Line = tuple[float, float]  # rounds for nothing, and for each chunk


@dataclass(frozen=True)
class RoundBound:
    """At least ``most(a + b k)`` rounds for k chunks, over lines ``(a, b)``."""

    lines: tuple[Line, ...]

    def rounds(self, num_chunks: float) -> float:
        """The least number of rounds for so many chunks, and parts of rounds."""
        return max(a + b * num_chunks for a, b in self.lines)

    def best_number(self, each: float, whole: float) -> float:
        """The number of chunks for which rounds of ``each + whole / chunks`` take least in all.

        That is a convex function of the number, and least where one line's is or where two meet.
        """
        if not each:
            return math.inf
        own = [math.sqrt(a * whole / (b * each)) for a, b in self.lines if b]
        meeting = [_meet(*pair) for pair in combinations(self.lines, 2)]
        numbers = [max(1.0, number) for number in (1.0, *own, *meeting)]
        return min(numbers, key=lambda number: self.rounds(number) * (each + whole / number))

    def seconds(self, payload_bytes: float, on: Network) -> float:
        """The least time for a payload in synchronous rounds, over all numbers of chunks."""
        each, whole = on.latency + on.overhead, payload_bytes / on.bandwidth
        best = self.best_number(each, whole)
        if best > MANY:  # so that parts of rounds matter little
            if math.isinf(best):
                return max(b for _, b in self.lines) * whole
            return self.rounds(best) * (each + whole / best)
        numbers = np.arange(1, 4 * math.ceil(best) + 64)
        rounds = np.max([a + b * numbers for a, b in self.lines], axis=0)
        rounds = np.ceil(np.maximum(rounds - 1e-9, 0.0))
        return float((rounds * (each + whole / numbers)).min())


def any_bound(found: Limits) -> RoundBound:
    """The bound of any all-reduce, on the mesh of these limits."""
    graph = Graph.of(found.topology)
    degree = np.bincount(graph.source, minlength=graph.num_ranks)
    last: dict[int, int] = {}
    for links, hops in zip(degree.tolist(), graph.eccentricity.tolist(), strict=True):
        last[links] = max(hops - 1, last.get(links, 0))
    lines = [(float(hops), 1 / links) for links, hops in last.items() if links]
    return RoundBound(_highest([(0.0, float(found.all_reduce)), *lines]))


def tree_bound(found: Limits) -> RoundBound | None:
    """The bound of sums along trees; None for meshes of more than `MOST_CHIPS`."""
    if found.topology.num_live > MOST_CHIPS:
        return None
    return RoundBound(_highest([*any_bound(found).lines, *_lines(found.topology)]))


@lru_cache(maxsize=64)
def _lines(topology: Topology) -> tuple[Line, ...]:
    graph = Graph.of(topology)
    far = np.flatnonzero(graph.eccentricity == graph.diameter)
    far = far[:: -(-len(far) // FAR_CHIPS)] if topology.num_live > 1 else far[:0]
    lines: list[Line] = []
    for chip in far.tolist():
        cuts = _Cuts(graph, chip)
        for number in CHUNKS:
            lines.append(cuts.best(number, max((a + b * number for a, b in lines), default=1.0)))
    return tuple(_highest(lines)) if lines else ()


def _highest(lines: list[Line]) -> tuple[Line, ...]:
    """Those that are the highest for some number of chunks, the flattest first."""
    found: list[Line] = []
    for a, b in sorted(set(lines), key=lambda line: (line[1], line[0])):
        while found and found[-1][0] <= a:
            found.pop()
        while len(found) > 1 and _meet(found[-2], (a, b)) <= _meet(found[-2], found[-1]):
            found.pop()
        found.append((a, b))
    return tuple(found)


def _meet(flat: Line, steep: Line) -> float:
    return (flat[0] - steep[0]) / (steep[1] - flat[1])


class _Cuts:
    """Sets of chips that do not hold one far chip."""

    def __init__(self, graph: Graph, far: int) -> None:
        self.graph, self.far = graph, far
        self.hops = _distances(graph, far)
        self.source, self.target = graph.source.astype(np.intp), graph.target.astype(np.intp)

    def best(self, num_chunks: int, rounds: float) -> Line:
        """The line that is highest at so many chunks, from a first guess of their rounds on."""
        inside = np.arange(self.graph.num_ranks) != self.far
        line = self._line(inside)
        rounds = max(rounds, line[0] + line[1] * num_chunks)
        while True:
            inside = self._cut(num_chunks, rounds)
            if not inside.any():
                return line
            other = self._line(inside)
            now = other[0] + other[1] * num_chunks
            if now <= rounds * (1 + 1e-6):
                return line
            line, rounds = other, now

    def _line(self, inside: NDArray[np.bool_]) -> Line:
        """What a set proves."""
        into = inside[self.target] & ~inside[self.source]
        touching = into.sum() + (inside[self.target] & inside[self.source]).sum() // 2
        return float(self.hops[self.source[into]].sum() / touching), float(inside.sum() / touching)

    def _cut(self, num_chunks: int, rounds: float) -> NDArray[np.bool_]:
        """The set that falls short most of what so many rounds can carry, or none.

        Of a link, the chips at its ends pay for the rounds together, and for what is idle on it
        when they are on one side, they pay apart: this is a minimum cut.
        """
        from scipy.sparse import csr_array  # JAX brings it
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        num, hops = self.graph.num_ranks, np.minimum(self.hops, rounds / 2)
        idle = hops[self.source]  # if its target is in the set, and its source is not
        pays = (rounds + idle[_back(idle)] - idle) / 2
        apart = (rounds - idle - idle[_back(idle)]) / 2
        gain = num_chunks - np.bincount(self.target, pays, num)
        scale = WHOLE / (abs(gain).sum() + num_chunks * num)
        gain[self.far] = -2 * num_chunks * num
        begin, end = num, num + 1
        on, off = np.flatnonzero(gain > 0), np.flatnonzero(gain < 0)
        rows = np.concatenate([self.source, np.full(len(on), begin), off])
        columns = np.concatenate([self.target, on, np.full(len(off), end)])
        amounts = np.concatenate([apart, gain[on], -gain[off]]) * scale
        network = csr_array((amounts.astype(np.int32), (rows, columns)), shape=(num + 2, num + 2))
        left = network - maximum_flow(network, begin, end).flow
        left.eliminate_zeros()
        reached = np.zeros(num + 2, np.bool_)
        reached[breadth_first_order(left, begin, return_predecessors=False)] = True
        return reached[:num]


def _back(links: Floats) -> NDArray[np.intp]:
    return np.arange(len(links)) ^ 1


def _distances(graph: Graph, start: int) -> Floats:
    """Hops from one chip to each."""
    hops = np.full(graph.num_ranks, -1.0)
    hops[start] = 0
    now = [start]
    while now:
        fresh = {other for chip in now for other, _ in graph.beside[chip] if hops[other] < 0}
        hops[list(fresh)] = hops[now[0]] + 1
        now = list(fresh)
    return hops
