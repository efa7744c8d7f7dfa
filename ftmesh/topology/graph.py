"""The live chips of a mesh as ranks, the links between them as integer arrays, and their lanes.

The direction of a link is its lane: ``2 * axis``, plus 1 for links that lead down the axis. Links
of one direction have distinct sources and distinct targets, so a lane is part of the same
permutation in all rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ftmesh.topology.topology import Topology

Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class LinkGraph:
    """Directed links between ranks. Link ``i ^ 1`` is the reverse of link `i`.

    >>> graph = LinkGraph.from_topology(Topology.grid("2x2"))
    >>> graph.num_ranks, graph.num_links, graph.eccentricity.tolist()
    (4, 8, [2, 2, 2, 2])
    >>> [(int(graph.source[link]), int(graph.target[link])) for link in (2, 3)]
    [(0, 2), (2, 0)]
    """

    num_ranks: int
    source: Ints
    target: Ints
    lane: Ints  # the direction of each link

    @staticmethod
    def from_topology(topology: Topology) -> LinkGraph:
        """Return the graph of the live chips of `topology`."""
        pairs = [(a, b) for a, b in topology.links if topology.rank(a) < topology.rank(b)]
        links = [link for a, b in pairs for link in ((a, b), (b, a))]
        ends = np.array([[topology.rank(chip) for chip in link] for link in links], np.int32)
        source, target = ends.reshape(-1, 2).T
        lane = direction_lanes(topology, source, target)
        return LinkGraph(topology.num_live, source, target, lane)

    @property
    def num_links(self) -> int:
        """Number of directed links: two for each cable."""
        return len(self.source)

    @cached_property
    def neighbours(self) -> list[list[tuple[int, int]]]:
        """The neighbours of each rank, each with the link that leads to it."""
        neighbours: list[list[tuple[int, int]]] = [[] for _ in range(self.num_ranks)]
        for link, rank in enumerate(self.source.tolist()):
            neighbours[rank].append((int(self.target[link]), link))
        return neighbours

    @cached_property
    def eccentricity(self) -> Ints:
        """For each rank, the hops to the rank farthest from it."""
        words = -(-self.num_ranks // 64)
        rank = np.arange(self.num_ranks)
        reach = np.zeros((self.num_ranks, words), np.uint64)
        reach[rank, rank // 64] = np.uint64(1) << (rank % 64).astype(np.uint64)
        full = np.bitwise_or.reduce(reach, axis=0)
        order = np.argsort(self.source, kind="stable")
        first = np.searchsorted(self.source[order], rank)
        hops = np.zeros(self.num_ranks, np.int32)
        while (incomplete := (reach != full).any(axis=1)).any():
            hops += incomplete
            reach = reach | np.bitwise_or.reduceat(reach[self.target[order]], first)
        return hops

    @property
    def diameter(self) -> int:
        """Hops between the two ranks that are farthest apart."""
        return int(self.eccentricity.max())


def direction_lanes(topology: Topology, src: Ints, dst: Ints) -> Ints:
    """Return the lane of each hop between neighbouring ranks.

    A hop over the wrapping edge has the direction of the walk that continues over it.
    """
    coords = np.array(topology.coords)
    step = coords[dst] - coords[src]
    downwards = np.where(abs(step) > 1, step > 0, step < 0).any(axis=1)
    lanes: Ints = (2 * (step != 0).argmax(axis=1) + downwards).astype(np.int32)
    return lanes


def lane_sources(topology: Topology) -> Ints:
    """Return the rank that sends to each rank, ``[lane, rank]``; `num_live` where none does.

    >>> lane_sources(Topology.grid("3")).tolist()
    [[3, 0, 1], [1, 2, 3]]
    """
    live = topology.num_live
    sources = np.full((2 * len(topology.shape), live), live, np.int32)
    if topology.links:
        ends = [[topology.rank(a), topology.rank(b)] for a, b in topology.links]
        src, dst = np.array(ends, np.int32).T
        sources[direction_lanes(topology, src, dst), dst] = src
    return sources
