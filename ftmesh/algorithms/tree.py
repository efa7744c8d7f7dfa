"""`tree`: an all-reduce along many spanning trees at once, on any connected mesh.

Beyond the paper, and close to what the links allow. Each chunk is summed along a spanning tree of
the live chips that uses every edge once each way (`ftmesh.algorithms.tree_rounds`). Sums and
results travel at the same time, so links are busy from the start to the end. In return there is no
reduce-scatter, and nobody owns a chunk. A message that answers an earlier one is the result, and is
copied; other messages are added.

The best number of chunks depends on the payload: few for a small one, since every round has a
latency, and many for a large one, since the first and the last rounds leave links idle.

Trees are grown one after the other, each from a chip near the middle. The chip with the lowest cost
is attached next: one near the root, over a link that few trees have used. In addition:

- A message towards a chip cannot exist before those from the chips farthest from it have arrived,
  so links that lead to remote chips count as used before they are.
- A chip with children is preferred to a leaf as parent. Leaves send first and receive last, and
  many of them keep links busy in the first and the last rounds.
- Use of a link away from the root is balanced as well as use of a cable in either direction.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from ftmesh.algorithms.leaf_chips import LeafChips
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
        lag: extra rounds that a transfer is under way while its link goes on, for an executor
            without barriers.
        leaves_apart: keep leaf chips out of the trees: their values are added before the trees
            start, and they get the results after these end (`ftmesh.algorithms.leaf_chips`).
    """
    if num_chunks < 1:
        raise PlanError(f"num_chunks must be 1 or more, not {num_chunks}")
    if lag < 0:
        raise PlanError(f"lag must be a number of rounds, not {lag}")
    if topology.num_live < 2:
        raise PlanError(f"a single {topology.noun} has nothing to sum")
    if len(topology.components()) > 1:
        raise PlanError(f"no link joins some of its {topology.noun}s to the others")
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
    tries = BALANCES[: max(1, MAX_WORK // (graph.num_ranks * num_chunks))]
    balances = tries if balance is None else (balance,)
    rounds = min((_message_rounds(graph, num_chunks, width, b, lag) for b in balances), key=np.max)
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


def _message_rounds(
    graph: LinkGraph, num_chunks: int, width: int, balance: float, lag: int
) -> MessageRounds:
    num_trees = min(MAX_TREES, num_chunks)
    trees = grow_trees(graph, num_trees, num_chunks / width, balance=balance, lag=lag)
    passes = 1 if graph.num_ranks * num_chunks > LARGE else 2
    return order_messages(graph, trees, num_chunks, passes=passes, width=width, lag=lag)


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
