"""LeafChips: chips that hang on one link, and those beyond them, which can be fed apart from others.

All that a pendant gives and gets crosses one link. It can be kept out of what the others do: its
value goes to its neighbour before they begin, and the sum comes back when they have ended. Along a
chain of pendants both travel in pieces, so that its links work at the same time.

>>> from ftmesh.topology.topology import Topology
>>> pendants = LeafChips.from_graph(LinkGraph.from_topology(Topology.grid("4x3", failed="1x2@1,0")))
>>> pendants.rank.tolist(), pendants.height.tolist(), pendants.others.tolist()
([0, 3, 6, 7], [0, 1, 2, 3], [1, 2, 4, 5, 8, 9])
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ftmesh.schedule.transfers import Transfers, Ints, make_transfers
from ftmesh.topology.graph import LinkGraph


@dataclass(frozen=True, eq=False)
class LeafChips:
    """Those of a graph, each before the one it hangs on."""

    graph: LinkGraph
    rank: Ints
    link: Ints  # to whom it hangs on
    height: Ints  # of the longest chain beyond it

    @staticmethod
    def from_graph(graph: LinkGraph) -> LeafChips:
        """Take away chips with one link, until no chip that is left has so few."""
        beside = [dict(links) for links in graph.neighbours]
        height = [0] * graph.num_ranks
        left = [rank for rank, links in enumerate(beside) if len(links) == 1]
        found = []
        while left:
            rank = left.pop(0)
            if not beside[rank]:
                continue  # the last one: what hangs together by single links hangs on it
            ((other, link),) = beside[rank].items()
            found.append((rank, link, height[rank]))
            height[other] = max(height[other], height[rank] + 1)
            del beside[other][rank]
            if len(beside[other]) == 1:
                left.append(other)
        return LeafChips(graph, *np.array(found, np.int32).reshape(-1, 3).T)

    @property
    def others(self) -> Ints:
        """The ranks that are left."""
        return np.setdiff1d(np.arange(self.graph.num_ranks, dtype=np.int32), self.rank)

    @property
    def graph_of_others(self) -> LinkGraph:
        """What is left, its ranks numbered anew."""
        graph = self.graph
        number = np.full(graph.num_ranks, -1, np.int32)
        number[self.others] = np.arange(len(self.others))
        source, target = number[graph.source], number[graph.target]
        stays = (source >= 0) & (target >= 0)
        return LinkGraph(len(self.others), source[stays], target[stays], graph.lane[stays])

    def fed(self, num_chunks: int) -> Transfers:
        """The transfers that bring the values of pendants to the others; mirrored, the sums back.

        In one piece where nothing hangs on a pendant; or in as many as trees would have chunks,
        if they were as deep as the longest chain.
        """
        highest = int(self.height.max())
        wanted = num_chunks * math.sqrt(highest / max(1, self.graph.diameter))
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
