"""LinkGraph: the live chips of a mesh as numbers, and the links between them, for planners of any mesh.

>>> graph = LinkGraph.from_topology(Topology.grid("2x2"))
>>> graph.num_ranks, graph.num_links, graph.eccentricity.tolist()
(4, 8, [2, 2, 2, 2])
>>> [(int(graph.source[link]), int(graph.target[link])) for link in (2, 3)]
[(0, 2), (2, 0)]

Compass lanes: one for each direction of travel, ``2 * axis``, and one more if backwards.

Every link has one direction, so a lane is part of the same permutation in all rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ftmesh.schedule.transfers import Ints
from ftmesh.topology.topology import Topology


@dataclass(frozen=True, eq=False)
class LinkGraph:
    """Directed links between ranks; link ``i ^ 1`` leads back from where link `i` leads to."""

    num_ranks: int
    source: Ints
    target: Ints
    lane: Ints  # the direction of a link

    @staticmethod
    def from_topology(topology: Topology) -> LinkGraph:
        """The live part of `topology`."""
        pairs = [(a, b) for a, b in topology.links if topology.rank(a) < topology.rank(b)]
        both_ways = [way for a, b in pairs for way in ((a, b), (b, a))]
        ends = np.array([[topology.rank(chip) for chip in link] for link in both_ways], np.int32)
        source, target = ends.reshape(-1, 2).T
        return LinkGraph(topology.num_live, source, target, direction_lanes(topology, source, target))

    @property
    def num_links(self) -> int:
        """Each cable counts twice, once for each direction."""
        return len(self.source)

    @cached_property
    def neighbours(self) -> list[list[tuple[int, int]]]:
        """For each rank its neighbours, and the link to each."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.num_ranks)]
        for link, (a, b) in enumerate(zip(self.source.tolist(), self.target.tolist(), strict=True)):
            found[a].append((b, link))
        return found

    @cached_property
    def eccentricity(self) -> Ints:
        """How many hops the farthest rank is from each."""
        words = -(-self.num_ranks // 64)
        rank = np.arange(self.num_ranks)
        reach = np.zeros((self.num_ranks, words), np.uint64)
        reach[rank, rank // 64] = np.uint64(1) << (rank % 64).astype(np.uint64)
        full = np.bitwise_or.reduce(reach, axis=0)
        order = np.argsort(self.source, kind="stable")
        first = np.searchsorted(self.source[order], rank)
        hops = np.zeros(self.num_ranks, np.int32)
        while (short := (reach != full).any(axis=1)).any():
            hops += short
            reach = reach | np.bitwise_or.reduceat(reach[self.target[order]], first)
        return hops

    @property
    def diameter(self) -> int:
        """How many hops the two ranks that are farthest apart are from each other."""
        return int(self.eccentricity.max())


def direction_lanes(topology: Topology, src: Ints, dst: Ints) -> Ints:
    """The lane of each hop between neighbouring ranks; one over the edge goes on, not back."""
    coords = np.array(topology.coords)
    step = coords[dst] - coords[src]
    over_edge = abs(step) > 1
    backwards = np.where(over_edge, step > 0, step < 0).any(axis=1)
    axis = (step != 0).argmax(axis=1)
    lanes: Ints = (2 * axis + backwards).astype(np.int32)
    return lanes


def lane_sources(topology: Topology) -> Ints:
    """The rank that each lane brings something from to each rank, ``[lane, rank]``.

    Where a lane has no link, that is `num_live`, which is no rank.

    >>> lane_sources(Topology.grid("3")).tolist()
    [[3, 0, 1], [1, 2, 3]]
    """
    live = topology.num_live
    found = np.full((2 * len(topology.shape), live), live, np.int32)
    if topology.links:
        ends = [[topology.rank(a), topology.rank(b)] for a, b in topology.links]
        src, dst = np.array(ends, np.int32).T
        found[direction_lanes(topology, src, dst), dst] = src
    return found
