"""The live chips of a mesh as ranks, the links between them as integer arrays, and their lanes.

The direction of a link is its lane: ``2 * axis``, plus 1 for links that lead down the axis. Links
of one direction have distinct sources and distinct targets, so a lane is part of the same
permutation in all rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from ftmesh.topology.topology import Topology

Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class LinkGraph:
    """Directed links between ranks. Link ``i ^ 1`` is the reverse of link `i`."""

    num_ranks: int
    source: Ints
    target: Ints
    lane: Ints  # the direction of each link

    @staticmethod
    def from_topology(topology: Topology) -> LinkGraph:
        """Return the links between live ranks; the same object for equal topologies."""
        return _graph_of(topology.without_devices())

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
        reach = single_bits(self.num_ranks)
        full = np.bitwise_or.reduce(reach, axis=0)
        order = np.argsort(self.source, kind="stable")
        first = np.searchsorted(self.source[order], np.arange(self.num_ranks))
        hops = np.zeros(self.num_ranks, np.int32)
        while (incomplete := (reach != full).any(axis=1)).any():
            hops += incomplete
            reach = reach | np.bitwise_or.reduceat(reach[self.target[order]], first)
        return hops

    @property
    def diameter(self) -> int:
        return int(self.eccentricity.max())


@lru_cache(maxsize=32)
def _graph_of(topology: Topology) -> LinkGraph:
    pairs = [(a, b) for a, b in topology.links if topology.rank(a) < topology.rank(b)]
    links = [link for a, b in pairs for link in ((a, b), (b, a))]
    ends = np.array([[topology.rank(chip) for chip in link] for link in links], np.int32)
    source, target = np.ascontiguousarray(ends.reshape(-1, 2).T)
    graph = LinkGraph(topology.num_live, source, target, direction_lanes(topology, source, target))
    for column in (graph.source, graph.target, graph.lane):
        column.flags.writeable = False
    return graph


def single_bits(num_ranks: int) -> NDArray[np.uint64]:
    """Return sets of ranks, 64 to a word: row r has only rank r."""
    bits = np.zeros((num_ranks, -(-num_ranks // 64)), np.uint64)
    rank = np.arange(num_ranks)
    bits[rank, rank // 64] = np.uint64(1) << (rank % 64).astype(np.uint64)
    return bits


def direction_lanes(topology: Topology, src: Ints, dst: Ints) -> Ints:
    """Return the lane of each hop between neighbours; over the edge, that of the walk going on."""
    coords = np.array(topology.coords)
    step = coords[dst] - coords[src]
    downwards = np.where(abs(step) > 1, step > 0, step < 0).any(axis=1)
    lanes: Ints = (2 * (step != 0).argmax(axis=1) + downwards).astype(np.int32)
    return lanes


def lane_sources(topology: Topology) -> Ints:
    """Return the rank that sends to each rank, ``[lane, rank]``; `num_live` where none does."""
    graph = LinkGraph.from_topology(topology)
    sources = np.full((2 * len(topology.shape), graph.num_ranks), graph.num_ranks, np.int32)
    sources[graph.lane, graph.target] = graph.source
    return sources
