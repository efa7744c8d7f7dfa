"""Leaf chips: chips with one link, and chains of chips that end in one.

Everything a leaf chip sends and receives crosses one link. So it can be handled apart from the
others: its value goes to its neighbour before they start, and the sum comes back after they end.
Along a chain of leaf chips both travel in pieces, so that its links work at the same time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ftmesh.schedule.transfers import Ints, Transfers, make_transfers
from ftmesh.topology.graph import LinkGraph


@dataclass(frozen=True, eq=False)
class LeafChips:
    """The leaf chips of a graph, each before its parent: the chip that it is attached to.

    >>> from ftmesh.topology.topology import Topology
    >>> graph = LinkGraph.from_topology(Topology.grid("4x3", failed="1x2@1,0"))
    >>> leaves = LeafChips.from_graph(graph)
    >>> leaves.rank.tolist(), leaves.height.tolist(), leaves.core_ranks.tolist()
    ([0, 3, 6, 7], [0, 1, 2, 3], [1, 2, 4, 5, 8, 9])
    """

    graph: LinkGraph
    rank: Ints
    link: Ints  # from each to its parent
    height: Ints  # the length of the longest chain of leaf chips beyond each

    @staticmethod
    def from_graph(graph: LinkGraph) -> LeafChips:
        """Remove chips with one link until no remaining chip has only one."""
        neighbours = [dict(links) for links in graph.neighbours]
        height = [0] * graph.num_ranks
        queue = [rank for rank, links in enumerate(neighbours) if len(links) == 1]
        leaves = []
        while queue:
            rank = queue.pop(0)
            if not neighbours[rank]:
                continue  # the last chip of a tree is no leaf
            ((parent, link),) = neighbours[rank].items()
            leaves.append((rank, link, height[rank]))
            height[parent] = max(height[parent], height[rank] + 1)
            del neighbours[parent][rank]
            if len(neighbours[parent]) == 1:
                queue.append(parent)
        return LeafChips(graph, *np.array(leaves, np.int32).reshape(-1, 3).T)

    @property
    def core_ranks(self) -> Ints:
        """The ranks that are not leaf chips."""
        return np.setdiff1d(np.arange(self.graph.num_ranks, dtype=np.int32), self.rank)

    @property
    def core_graph(self) -> LinkGraph:
        """The graph without leaf chips, with ranks renumbered in the order of `core_ranks`."""
        graph, core = self.graph, self.core_ranks
        new_rank = np.full(graph.num_ranks, -1, np.int32)
        new_rank[core] = np.arange(len(core))
        source, target = new_rank[graph.source], new_rank[graph.target]
        stays = (source >= 0) & (target >= 0)
        return LinkGraph(len(core), source[stays], target[stays], graph.lane[stays])

    def transfers_to_core(self, num_chunks: int) -> Transfers:
        """Return the transfers that add the values of leaf chips to the core.

        The payload travels in one piece if there are no chains of leaf chips. Else it travels in
        as many as a tree as deep as the longest chain would have chunks.
        """
        longest = int(self.height.max())
        wanted = num_chunks * math.sqrt(longest / max(1, self.graph.diameter))
        pieces = max(n for n in range(1, num_chunks + 1) if num_chunks % n == 0 and n <= 1 + wanted)
        piece = np.arange(pieces)[:, None]
        return make_transfers(
            round=self.height + piece,
            lane=self.graph.lane[self.link],
            src=self.rank,
            dst=self.graph.target[self.link],
            chunk=piece * (num_chunks // pieces),
            count=num_chunks // pieces,
        )
