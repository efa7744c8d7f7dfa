"""Trees: spanning trees that share out the links of a graph, grown one after the other.

Every tree is grown from a chip near the middle by hanging on it, again and again, the chip that
costs least: one that is near the root, over a link that few trees have used. Three things beside:

- a message towards a chip cannot exist before those from the chips farthest from it have come, so
  what leads to remote chips counts as used before it is;
- a chip that carries others already is preferred to a leaf: leaves speak first and hear last, and
  many of them keep links busy in the first and the last rounds;
- what leads away from the root, one way, is shared out as what crosses a cable either way is.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from ftmesh.schedule.transfers import Ints
from ftmesh.topology.graph import LinkGraph

LEAF = 3.0  # what it costs to hang something on a leaf, in hops
GOLDEN = 0.6180339887498949  # multiples of it, less whole numbers, are spread evenly


def grow_trees(graph: LinkGraph, num_trees: int, num_chunks: float, *, balance: float, lag: int = 0) -> Ints:
    """Trees for so many chunks in all: ``[tree, rank]``, the link that leads there from its parent.

    The root of each has none, which is -1. `balance` is what it costs to use a link once more than
    the others, in hops for each chunk of a tree.
    """
    times = num_chunks / num_trees
    hop = 1 + lag  # rounds
    diameter = max(1, hop * graph.diameter)
    share = min(1.0, max(0.3, 0.1 * num_chunks / diameter))
    late = (share / times * hop * graph.eccentricity).tolist()
    middle = np.flatnonzero(graph.eccentricity <= graph.eccentricity.min() + 1).tolist()
    crossed = [0] * (graph.num_links // 2)
    led = [0] * graph.num_links
    weight = balance * times / hop
    trees = np.full((num_trees, graph.num_ranks), -1, np.int32)
    for number in range(num_trees):
        root = middle[int(len(middle) * (number * GOLDEN % 1.0))]
        parents = _one(graph, root, crossed, led, late, weight, number)
        for link in parents:
            if link >= 0:
                crossed[link >> 1] += 1
                led[link] += 1
        trees[number] = parents
    return trees


def _one(
    graph: LinkGraph,
    root: int,
    crossed: list[int],
    led: list[int],
    late: list[float],
    weight: float,
    number: int,
) -> list[int]:
    """The links to each rank from its parent, in the tree that grows from `root`."""
    beside = graph.neighbours
    parents = [-1] * graph.num_ranks
    depth = [-1] * graph.num_ranks
    is_leaf = [True] * graph.num_ranks
    depth[root], is_leaf[root] = 0, False
    offers: list[tuple[float, int, int, int]] = []
    turn = 1 + number * 7919  # ties are broken another way in every tree, and alike everywhere
    speakers, missing = [root], graph.num_ranks - 1
    while True:
        for speaker in speakers:
            cost = depth[speaker] + 1 + LEAF * is_leaf[speaker]
            for other, link in beside[speaker]:
                if depth[other] < 0:
                    used: float = crossed[link >> 1]
                    led_there = led[link] + late[other]
                    if led_there > used:
                        used = led_there
                    turn += 1
                    price = cost + weight * used + 1e-3 * (turn * GOLDEN % 1.0)
                    heappush(offers, (price, other, link, speaker))
        if not missing:
            return parents
        rank = root
        while depth[rank] >= 0:
            _, rank, link, parent = heappop(offers)
        missing -= 1
        depth[rank], parents[rank] = depth[parent] + 1, link
        speakers = [parent, rank] if is_leaf[parent] else [rank]
        is_leaf[parent] = False
