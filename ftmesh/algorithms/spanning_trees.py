"""Packs spanning trees into a graph so that they share its links evenly.

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

from ftmesh.schedule.transfers import Ints
from ftmesh.topology.graph import LinkGraph

LEAF_COST = 3.0  # of attaching a chip to a leaf, in hops
GOLDEN = 0.6180339887498949  # the fractional parts of its multiples are spread evenly


def grow_trees(
    graph: LinkGraph, num_trees: int, num_chunks: float, *, balance: float, lag: int = 0
) -> Ints:
    """Return spanning trees: ``[tree, rank]`` is the link from the parent to the rank, -1 at roots.

    Args:
        graph: the links.
        num_trees: number of trees.
        num_chunks: number of chunks that all trees together will carry.
        balance: cost of using a link once more than the others, in hops per chunk of a tree.
        lag: extra rounds that a transfer is under way.
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
