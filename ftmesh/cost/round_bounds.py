"""Lower bounds on the rounds of an all-reduce of k chunks, if a link carries one chunk per round.

`ftmesh.cost.lower_bounds` bounds any all-reduce by what links carry. In rounds there is more to
say, since nothing arrives before it has travelled all the way. For any algorithm, k chunks take at
least

- k over the strength of the graph, and
- at every chip v, its eccentricity less 1 until data of the farthest chip begins to arrive, and
  then k over its number of links.

If every chunk is summed along a spanning tree of its own, as `ftmesh.algorithms.tree` does, take a
chip f and a set S of others. In each tree every chip of S has one link towards f, so links that
touch S are used k |S| times, and each carries at most one such chunk per round. A link into S from
a chip u outside carries data that comes from f, which is not at u before round dist(f, u). So

    rounds * (links that touch S)  >=  k |S| + sum of dist(f, u) over links into S from u outside.

For given f and k the best S is a minimum cut, found repeatedly until no set is better. Each of
these bounds is a line in k, and the bound is the highest of them.

>>> from ftmesh.cost.lower_bounds import limits
>>> bound = tree_round_bound(limits(Topology.grid("8x8", failed="2x2@2,2")))
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
from ftmesh.topology.graph import LinkGraph
from ftmesh.topology.topology import Topology

MAX_CHIPS = 4096  # minimum cuts take too long beyond
FAR_CHIPS = 4  # each gives a bound; chips at the same distance from the others give much the same
CHUNK_COUNTS = tuple(2**n for n in range(13))  # for which the best sets are searched
MANY_CHUNKS = 100_000
MAX_CAPACITY = 2**29  # below which the sum of all integer capacities of a flow is kept

Line = tuple[float, float]  # rounds for no chunk, and for each chunk


@dataclass(frozen=True)
class RoundBound:
    """At least ``max(a + b k)`` rounds for k chunks, over lines ``(a, b)``."""

    lines: tuple[Line, ...]

    def rounds(self, num_chunks: float) -> float:
        """The bound for `num_chunks`, not rounded up."""
        return max(a + b * num_chunks for a, b in self.lines)

    def best_num_chunks(self, round_seconds: float, payload_seconds: float) -> float:
        """The number of chunks for which all rounds together take least time.

        A round has a fixed time, and the payload its time on a link. The time is convex in the
        number, and least where that of one line is or where two meet.
        """
        if not round_seconds:
            return math.inf
        own = [math.sqrt(a * payload_seconds / (b * round_seconds)) for a, b in self.lines if b]
        meeting = [_intersection(*pair) for pair in combinations(self.lines, 2)]
        numbers = [max(1.0, number) for number in (1.0, *own, *meeting)]
        return min(numbers, key=lambda k: self.rounds(k) * (round_seconds + payload_seconds / k))

    def seconds(self, payload_bytes: float, network: Network) -> float:
        """The least time of a payload in synchronous rounds, over all numbers of chunks."""
        round_seconds = network.latency + network.overhead
        payload_seconds = payload_bytes / network.bandwidth
        best = self.best_num_chunks(round_seconds, payload_seconds)
        if best > MANY_CHUNKS:  # rounding up makes little difference
            if math.isinf(best):
                return max(b for _, b in self.lines) * payload_seconds
            return self.rounds(best) * (round_seconds + payload_seconds / best)
        numbers = np.arange(1, 4 * math.ceil(best) + 64)
        rounds = np.max([a + b * numbers for a, b in self.lines], axis=0)
        rounds = np.ceil(np.maximum(rounds - 1e-9, 0.0))
        return float((rounds * (round_seconds + payload_seconds / numbers)).min())


def all_reduce_round_bound(bounds: Limits) -> RoundBound:
    """The bound on any all-reduce, on the mesh of `bounds`."""
    graph = LinkGraph.from_topology(bounds.topology)
    degree = np.bincount(graph.source, minlength=graph.num_ranks)
    wait: dict[int, int] = {}  # rounds before the farthest data arrives, by degree of the chip
    for links, hops in zip(degree.tolist(), graph.eccentricity.tolist(), strict=True):
        wait[links] = max(hops - 1, wait.get(links, 0))
    lines = [(float(hops), 1 / links) for links, hops in wait.items() if links]
    return RoundBound(_upper_envelope([(0.0, float(bounds.all_reduce)), *lines]))


def tree_round_bound(bounds: Limits) -> RoundBound | None:
    """The bound on sums along trees; None for meshes of more than `MAX_CHIPS`."""
    if bounds.topology.num_live > MAX_CHIPS:
        return None
    lines = [*all_reduce_round_bound(bounds).lines, *_tree_lines(bounds.topology)]
    return RoundBound(_upper_envelope(lines))


@lru_cache(maxsize=64)
def _tree_lines(topology: Topology) -> tuple[Line, ...]:
    graph = LinkGraph.from_topology(topology)
    far = np.flatnonzero(graph.eccentricity == graph.diameter)
    far = far[:: -(-len(far) // FAR_CHIPS)] if topology.num_live > 1 else far[:0]
    lines: list[Line] = []
    for chip in far.tolist():
        cuts = _Cuts(graph, chip)
        for number in CHUNK_COUNTS:
            lines.append(cuts.best(number, max((a + b * number for a, b in lines), default=1.0)))
    return tuple(_upper_envelope(lines)) if lines else ()


def _upper_envelope(lines: list[Line]) -> tuple[Line, ...]:
    """The lines that are the highest for some number of chunks, the flattest first."""
    envelope: list[Line] = []
    for a, b in sorted(set(lines), key=lambda line: (line[1], line[0])):
        while envelope and envelope[-1][0] <= a:
            envelope.pop()
        while len(envelope) > 1 and _intersection(envelope[-2], (a, b)) <= _intersection(
            envelope[-2], envelope[-1]
        ):
            envelope.pop()
        envelope.append((a, b))
    return tuple(envelope)


def _intersection(flat: Line, steep: Line) -> float:
    return (flat[0] - steep[0]) / (steep[1] - flat[1])


class _Cuts:
    """Sets of chips that do not contain the chip `far`."""

    def __init__(self, graph: LinkGraph, far: int) -> None:
        self.graph, self.far = graph, far
        self.hops = _distances(graph, far)
        self.source, self.target = graph.source.astype(np.intp), graph.target.astype(np.intp)

    def best(self, num_chunks: int, rounds: float) -> Line:
        """The line that is highest at `num_chunks`, starting from a first guess of `rounds`."""
        inside = np.arange(self.graph.num_ranks) != self.far
        line = self._line(inside)
        rounds = max(rounds, line[0] + line[1] * num_chunks)
        while True:
            inside = self._cut(num_chunks, rounds)
            if not inside.any():
                return line
            candidate = self._line(inside)
            height = candidate[0] + candidate[1] * num_chunks
            if height <= rounds * (1 + 1e-6):
                return line
            line, rounds = candidate, height

    def _line(self, inside: NDArray[np.bool_]) -> Line:
        """The bound that a set proves."""
        into = inside[self.target] & ~inside[self.source]
        touching = into.sum() + (inside[self.target] & inside[self.source]).sum() // 2
        return float(self.hops[self.source[into]].sum() / touching), float(inside.sum() / touching)

    def _cut(self, num_chunks: int, rounds: float) -> NDArray[np.bool_]:
        """The set for which `rounds` are furthest too few, or an empty one.

        The chips at the two ends of a link pay for its rounds together, and for its idle rounds if
        both are on one side; if they are on different sides, they pay `apart`. This makes it a
        minimum cut.
        """
        from scipy.sparse import csr_array  # a dependency of JAX
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        num, hops = self.graph.num_ranks, np.minimum(self.hops, rounds / 2)
        idle = hops[self.source]  # if its target is in the set, and its source is not
        back = idle[np.arange(len(idle)) ^ 1]  # of the link in the other direction
        pays = (rounds + back - idle) / 2
        apart = (rounds - idle - back) / 2
        gain = num_chunks - np.bincount(self.target, pays, num)
        scale = MAX_CAPACITY / (abs(gain).sum() + num_chunks * num)
        gain[self.far] = -2 * num_chunks * num
        begin, end = num, num + 1
        gains, losses = np.flatnonzero(gain > 0), np.flatnonzero(gain < 0)
        rows = np.concatenate([self.source, np.full(len(gains), begin), losses])
        columns = np.concatenate([self.target, gains, np.full(len(losses), end)])
        amounts = np.concatenate([apart, gain[gains], -gain[losses]]) * scale
        capacity = csr_array((amounts.astype(np.int32), (rows, columns)), shape=(num + 2, num + 2))
        residual = capacity - maximum_flow(capacity, begin, end).flow
        residual.eliminate_zeros()
        reached = np.zeros(num + 2, np.bool_)
        reached[breadth_first_order(residual, begin, return_predecessors=False)] = True
        return reached[:num]


def _distances(graph: LinkGraph, start: int) -> NDArray[np.float64]:
    hops = np.full(graph.num_ranks, -1.0)
    hops[start] = 0
    front = [start]
    while front:
        fresh = {other for chip in front for other, _ in graph.neighbours[chip] if hops[other] < 0}
        hops[list(fresh)] = hops[front[0]] + 1
        front = list(fresh)
    return hops
