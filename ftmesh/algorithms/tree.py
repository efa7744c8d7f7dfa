"""`tree`: an all-reduce along many spanning trees at once, on any connected mesh.

Beyond the paper, and close to what the links allow. Each chunk is summed along a spanning tree of
the live chips that uses every edge once each way (`ftmesh.algorithms.tree_rounds`). Sums and
results travel at the same time; in return there is no reduce-scatter, and nobody owns a chunk. A
message that answers an earlier one is the result, and is copied; other messages are added. Small
payloads need few chunks, since every round has a latency, and large ones many, since the first and
the last rounds leave links idle.

Trees are grown one after the other, each from a chip near the middle. The chip with the lowest cost
is attached next: one near the root, over a link that few trees have used. In addition:

- A message towards a chip cannot exist before those from the chips farthest from it have arrived,
  so links that lead to remote chips count as used before they are.
- A chip with children is preferred to a leaf as parent. Leaves send first and receive last, and
  many of them keep links busy in the first and the last rounds.
- Use of a link away from the root is balanced as well as use of a cable in either direction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from ftmesh.algorithms.building_blocks import check_one_part
from ftmesh.algorithms.tree_rounds import NO_ROUND, Index, MessageRounds, order_messages
from ftmesh.errors import PlanError
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import Schedule
from ftmesh.schedule.transfers import ADD, COPY, Ints, Transfers, make_transfers, row_key
from ftmesh.topology.graph import LinkGraph
from ftmesh.topology.topology import Topology

MAX_TREES = 256
DEFAULT_CHUNKS = 256
BALANCES = (1.5, 3.0)  # see `grow_trees`; which is better is found by trying
LEAF_COST = 3.0  # of attaching a chip to a leaf, in hops
GOLDEN = 0.6180339887498949  # the fractional parts of its multiples are spread evenly
MAX_WORK = 250_000  # ranks times chunks, of all tries together
LARGE = 1_000_000  # ranks times chunks above which messages are reordered once: 1 round in 300 more


def build_schedule(
    topology: Topology,
    num_chunks: int = DEFAULT_CHUNKS,
    *,
    width: int = 1,
    balance: float | None = None,
    lag: int = 0,
    leaves_apart: bool = False,
) -> Schedule:
    """Return the schedule along packed trees.

    Args:
        topology: the mesh.
        num_chunks: parts that the payload is cut into.
        width: chunks that a link carries per round, each in its own lane.
        balance: see `grow_trees`. Default: several are tried, on large meshes one.
        lag: extra rounds that a transfer is under way, for an executor without barriers.
        leaves_apart: keep leaf chips out of the trees, see `LeafChips`.
    """
    if num_chunks < 1:
        raise PlanError(f"num_chunks must be 1 or more, not {num_chunks}")
    if lag < 0:
        raise PlanError(f"lag must be a number of rounds, not {lag}")
    check_one_part(topology)
    graph = LinkGraph.from_topology(topology)
    if not leaves_apart:
        trees = Phase("packed trees", _tree_transfers(graph, num_chunks, width, balance, lag))
        return Schedule(topology, "tree", num_chunks, (trees,))
    leaves = LeafChips.from_graph(graph)
    core = leaves.core_ranks
    if len(core) == 1 or not len(leaves.rank):
        which = "all" if len(core) == 1 else "none"
        raise PlanError(
            f"{which} of its {topology.noun}s are leaf chips: build without leaves_apart"
        )
    transfers = _tree_transfers(leaves.core_graph, num_chunks, width, balance, lag)
    transfers = transfers.replace(src=core[transfers.src], dst=core[transfers.dst])
    to_core = Phase("leaf chips to core", leaves.transfers_to_core(num_chunks))
    phases = to_core, Phase("packed trees", transfers), to_core.mirrored("core to leaf chips")
    return Schedule(topology, "tree", num_chunks, phases)


def _tree_transfers(
    graph: LinkGraph, num_chunks: int, width: int, balance: float | None, lag: int
) -> Transfers:
    work, num_trees = graph.num_ranks * num_chunks, min(MAX_TREES, num_chunks)
    passes = 1 if work > LARGE else 2

    def order(balance: float) -> MessageRounds:
        trees = grow_trees(graph, num_trees, num_chunks / width, balance=balance, lag=lag)
        return order_messages(graph, trees, num_chunks, passes=passes, width=width, lag=lag)

    balances = BALANCES[: max(1, MAX_WORK // work)] if balance is None else (balance,)
    rounds = min(map(order, balances), key=np.max)
    link, chunk = np.nonzero(rounds != NO_ROUND)
    sent, answered = rounds[link, chunk], rounds[link ^ 1, chunk]
    return make_transfers(
        round=sent,
        lane=graph.lane[link] * width + (_slot_in_round(link, sent) if width > 1 else 0),
        src=graph.source[link],
        dst=graph.target[link],
        chunk=chunk,
        op=np.where(answered < sent, COPY, ADD),
    )


def _slot_in_round(link: Index, sent: Ints) -> Index:
    """For each message, how many messages of its link and round come before it."""
    key = row_key(link, sent)
    order = np.argsort(key, kind="stable")
    slot = np.empty(len(key), np.intp)
    slot[order] = np.arange(len(key)) - np.searchsorted(key[order], key[order])
    return slot


def grow_trees(
    graph: LinkGraph, num_trees: int, num_chunks: float, *, balance: float, lag: int = 0
) -> Ints:
    """Return spanning trees: ``[tree, rank]`` is the link from the parent to the rank, -1 at roots.

    `num_chunks` are carried by all trees together. `balance` is the cost of using a link once more
    than the others, in hops per chunk of a tree.
    """
    chunks_per_tree = num_chunks / num_trees
    rounds_per_hop = 1 + lag
    diameter = max(1, rounds_per_hop * graph.diameter)
    share = min(1.0, max(0.3, 0.1 * num_chunks / diameter))
    remoteness = (share / chunks_per_tree * rounds_per_hop * graph.eccentricity).tolist()
    middle = np.flatnonzero(graph.eccentricity <= graph.eccentricity.min() + 1).tolist()
    cable_uses = [0] * (graph.num_links // 2)
    link_uses = [0] * graph.num_links
    weight = balance * chunks_per_tree / rounds_per_hop
    trees = np.full((num_trees, graph.num_ranks), -1, np.int32)
    for number in range(num_trees):
        root = middle[int(len(middle) * (number * GOLDEN % 1.0))]
        parents = _grow_tree(graph, root, cable_uses, link_uses, remoteness, weight, number)
        for link in parents:
            if link >= 0:
                cable_uses[link >> 1] += 1
                link_uses[link] += 1
        trees[number] = parents
    return trees


def _grow_tree(
    graph: LinkGraph,
    root: int,
    cable_uses: list[int],
    link_uses: list[int],
    remoteness: list[float],
    weight: float,
    number: int,
) -> list[int]:
    """The link to each rank from its parent, in the tree that grows from `root`."""
    neighbours = graph.neighbours
    parents = [-1] * graph.num_ranks
    depth = [-1] * graph.num_ranks
    is_leaf = [True] * graph.num_ranks
    depth[root], is_leaf[root] = 0, False
    queue: list[tuple[float, int, int, int]] = []
    counter = 1 + number * 7919  # breaks ties differently in every tree, but reproducibly
    changed, num_missing = [root], graph.num_ranks - 1
    while True:
        for parent in changed:
            base_cost = depth[parent] + 1 + LEAF_COST * is_leaf[parent]
            for rank, link in neighbours[parent]:
                if depth[rank] < 0:
                    uses: float = cable_uses[link >> 1]
                    uses_outwards = link_uses[link] + remoteness[rank]
                    if uses_outwards > uses:
                        uses = uses_outwards
                    counter += 1
                    cost = base_cost + weight * uses + 1e-3 * (counter * GOLDEN % 1.0)
                    heappush(queue, (cost, rank, link, parent))
        if not num_missing:
            return parents
        rank = root
        while depth[rank] >= 0:
            _, rank, link, parent = heappop(queue)
        num_missing -= 1
        depth[rank], parents[rank] = depth[parent] + 1, link
        changed = [parent, rank] if is_leaf[parent] else [rank]
        is_leaf[parent] = False


@dataclass(frozen=True, eq=False)
class LeafChips:
    """Chips with one link, and chains of chips that end in one, each before its parent.

    They can be handled apart from the others: their values go to the parent before these start, and
    the sum comes back after they end. Along a chain both travel in pieces, so all its links work.
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
