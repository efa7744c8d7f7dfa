"""The flood of large meshes: groups gather their shares at one chip, which broadcasts them.

Where every chip floods its own share, a mesh of 9,000 chips takes 1,500 rounds each way. Here
neighbours along the ring of ranks form groups. Each group gathers its shares at its *head*, which
broadcasts several at a time along a spanning tree of shortest paths. Run backwards, sums
arrive at the heads and are handed to their owners.

An all-gather brings everything to every chip, so it takes at least as long as the chip with the
fewest links needs to receive it. Trees are grown one after the other, and each chip takes the
parent whose link is used least. Then trees move from links that are used more than that bound
allows to others of the same chip, as long as no chip becomes its own ancestor.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ftmesh.schedule.transfers import ADD, COPY, Ints, Transfers, make_transfers
from ftmesh.topology.graph import LinkGraph
from ftmesh.topology.ring_order import ring_order
from ftmesh.topology.topology import Topology

MAX_TREES = 256  # more would use links more evenly by less than they take to grow
ROUNDS_PER_HOP = 6  # rounds of the flood per hop of the diameter; a tenth of them fills the links
SPREAD = 0.75  # heads are in this part of their groups, not all in the middle, on one plane
GOLDEN = 0.6180339887498949  # the fractional parts of its multiples are spread evenly
NO_LINK = -1
MAX_SWEEPS = 8

Index = NDArray[np.intp]


class Messages(NamedTuple):
    """Messages of an all-gather; each is sent once `after`, another message, has arrived, or -1."""

    link: Index
    chunk: Index
    after: Index
    hops_left: Index  # how far what it carries still travels, with its own link

    def rounds(self) -> Ints:
        """The round of each, if every link sends first what has farthest to go."""
        order = np.argsort(self.after, kind="stable")
        first = np.searchsorted(self.after[order], np.arange(len(order) + 1))
        key = self.hops_left.max(initial=0) - self.hops_left
        rounds = np.full(len(order), -1, np.int32)
        waiting = np.flatnonzero(self.after < 0)
        index = 0
        while len(waiting):
            waiting = waiting[np.lexsort((key[waiting], self.link[waiting]))]
            link = self.link[waiting]
            goes = np.append(True, link[1:] != link[:-1])
            sent = waiting[goes]
            rounds[sent] = index
            waiting = np.append(waiting[~goes], order[_ranges(first[sent], first[sent + 1])])
            index += 1
        return rounds


def shares_per_message(num_ranks: int, diameter: int, fewest_links: int) -> int:
    """Return how many shares travel together, so that rounds are some times the diameter.

    As few as possible are left over, since each of those takes a tree of its own.

    >>> shares_per_message(4_092, 24, 5), shares_per_message(8_956, 32, 5)
    (6, 9)
    """
    wanted = num_ranks / (ROUNDS_PER_HOP * diameter * fewest_links)
    sizes = range(max(1, round(0.8 * wanted)), max(1, round(1.25 * wanted)) + 1)
    return min(sizes, key=lambda size: (num_ranks % size, abs(size - wanted)))


def build_phases(
    topology: Topology, size: int | None = None
) -> tuple[list[tuple[str, Transfers]], Ints]:
    """Return the phases of the reduce-scatter, and the rank that owns each chunk.

    Args:
        topology: The mesh.
        size: Shares that travel together; see `shares_per_message`.
    """
    graph = LinkGraph.from_topology(topology)
    if size is None:
        fewest_links = int(np.bincount(graph.target).min())
        size = shares_per_message(graph.num_ranks, graph.diameter, fewest_links)
    owner = np.array([topology.rank(coord) for coord in ring_order(topology).coords], np.int32)
    num_messages = graph.num_ranks // size
    num_trees = min(MAX_TREES, num_messages)
    tree_of = np.arange(num_messages) * num_trees // num_messages
    group = np.repeat(tree_of, size)  # of each share that does not travel alone
    alone = owner[len(group) :]
    first, length = np.searchsorted(group, np.arange(num_trees)), np.bincount(group)
    place = (1 - SPREAD) / 2 + SPREAD * (np.arange(num_trees) * GOLDEN % 1.0)
    heads = owner[first + (place * length).astype(np.intp)]
    weights = np.append(np.bincount(tree_of), np.zeros(len(alone), np.intp))
    trees = grow_trees(graph, np.append(heads, alone), weights)
    flood = _flood(graph, trees[:num_trees], tree_of)
    phases = [("flood", _backwards(graph, flood, size, np.full(len(flood.link), ADD)))]
    if len(heads) < graph.num_ranks:
        shares = _to_heads(graph, trees, group, owner)
        op = np.where(shares.chunk < len(group), COPY, ADD)
        phases.append(("groups", _backwards(graph, shares, 1, op)))
    return phases, owner


def _backwards(graph: LinkGraph, messages: Messages, size: int, op: Index) -> Transfers:
    rounds = messages.rounds()
    return make_transfers(
        round=rounds.max(initial=0) - rounds,
        lane=graph.lane[messages.link ^ 1],
        src=graph.target[messages.link],
        dst=graph.source[messages.link],
        chunk=messages.chunk * size,
        count=size,
        op=op,
    )


# Trees ------------------------------------------------------------------------------------------


def grow_trees(graph: LinkGraph, roots: Ints, weights: Index) -> Ints:
    """Return trees of shortest paths from each root that use the links into a chip evenly.

    ``[tree, rank]`` is the link from the parent, -1 at roots. `weights` are messages per tree.
    """
    links_in = _links_in(graph)
    is_link = links_in != NO_LINK
    before = graph.source[links_in]
    hops = _hops(graph, roots)
    uses = np.zeros(graph.num_links, np.intp)
    trees = np.full(hops.shape, NO_LINK, np.int32)
    ranks = np.arange(graph.num_ranks)
    for number, (root, weight) in enumerate(zip(roots.tolist(), weights.tolist(), strict=True)):
        leads_here = is_link & (hops[number][before] < hops[number][:, None])
        tie = (ranks[:, None] + number + np.arange(links_in.shape[1])) % links_in.shape[1]
        cost = np.where(leads_here, uses[links_in] * links_in.shape[1] + tie, np.iinfo(np.intp).max)
        links = links_in[ranks, cost.argmin(axis=1)]
        links[root] = NO_LINK
        trees[number] = links
        uses[links[links != NO_LINK]] += weight
    _balance(graph, trees, weights, uses, links_in)
    return trees


def _links_in(graph: LinkGraph) -> Index:
    """``[rank, slot]``: the links into each rank, or -1."""
    order = np.argsort(graph.target, kind="stable")
    target = graph.target[order]
    slot = np.arange(len(order)) - np.searchsorted(target, target)
    table = np.full((graph.num_ranks, int(slot.max()) + 1), NO_LINK, np.intp)
    table[target, slot] = order
    return table


def _hops(graph: LinkGraph, roots: Ints) -> NDArray[np.int16]:
    """The hops from each root to every rank."""
    from scipy.sparse import csr_array  # a dependency of JAX
    from scipy.sparse.csgraph import dijkstra

    shape = graph.num_ranks, graph.num_ranks
    edges = csr_array((np.ones(graph.num_links), (graph.source, graph.target)), shape=shape)
    parts = [
        dijkstra(edges, unweighted=True, indices=some).astype(np.int16)
        for some in np.array_split(roots, -(-len(roots) // 64))
    ]
    return np.concatenate(parts)


def _balance(graph: LinkGraph, trees: Ints, weights: Index, uses: Index, links_in: Index) -> None:
    """Move trees from overused links into a chip to others into it, where there are any."""
    fewest = int((links_in != NO_LINK).sum(axis=1).min())
    most = -(-int(weights.sum()) // fewest)
    parents = np.where(trees == NO_LINK, -1, graph.source[trees])
    for _ in range(MAX_SWEEPS):
        over = np.flatnonzero(uses > most)
        moved = False
        for link in over[np.argsort(-uses[over], kind="stable")].tolist():
            rank = int(graph.target[link])
            others = links_in[rank][links_in[rank] != NO_LINK]
            for other in others[np.argsort(uses[others], kind="stable")].tolist():
                number = min(uses[link] - most, most - uses[other])
                if number > 0:
                    moved |= _move(graph, trees, parents, weights, uses, link, other, number)
        if not moved:
            return


def _move(
    graph: LinkGraph,
    trees: Ints,
    parents: Index,
    weights: Index,
    uses: Index,
    link: int,
    other: int,
    number: int,
) -> bool:
    """Give up to `number` messages' trees the parent over `other` in place of that over `link`.

    Those that become least deep go first; a chip below the rank cannot become its parent.
    """
    rank, parent = graph.target[link], graph.source[other]
    candidates = np.flatnonzero((trees[:, rank] == link) & (weights > 0))
    above = np.full(len(candidates), parent)
    depth = np.zeros(len(candidates), np.intp)
    climbs = (above >= 0) & (above != rank)
    while climbs.any():
        above = np.where(climbs, parents[candidates, above], above)
        depth += climbs
        climbs = (above >= 0) & (above != rank)
    candidates, depth = candidates[above < 0], depth[above < 0]
    candidates = candidates[np.argsort(depth, kind="stable")]
    candidates = candidates[np.cumsum(weights[candidates]) <= number]
    trees[candidates, rank], parents[candidates, rank] = other, parent
    amount = int(weights[candidates].sum())
    uses[link] -= amount
    uses[other] += amount
    return bool(amount)


# Messages ---------------------------------------------------------------------------------------


def _heights(graph: LinkGraph, trees: Ints) -> NDArray[np.int16]:
    """The hops from each rank to the farthest rank below it in each tree."""
    parents = np.where(trees == NO_LINK, np.arange(trees.shape[1]), graph.source[trees])
    depth = np.zeros(trees.shape, np.int16)
    if not len(trees):
        return depth
    above = parents
    while (climbs := above != np.take_along_axis(parents, above, axis=1)).any():
        depth += climbs
        above = np.take_along_axis(parents, above, axis=1)
    depth += trees != NO_LINK
    heights = np.zeros(trees.shape, np.int16)
    for level in range(int(depth.max()), 0, -1):
        tree, rank = np.nonzero(depth == level)
        np.maximum.at(heights, (tree, parents[tree, rank]), heights[tree, rank] + np.int16(1))
    return heights


def _down_tree(
    graph: LinkGraph, tree: Ints, heights: NDArray[np.int16]
) -> tuple[Index, Index, Index]:
    """The messages that spread something from the root: link, message before, and hops left."""
    reached = np.flatnonzero(tree != NO_LINK)
    number = np.full(len(tree), -1, np.intp)  # of the message to each rank
    number[reached] = np.arange(len(reached))
    link = tree[reached].astype(np.intp)
    return link, number[graph.source[link]], heights[reached] + np.intp(1)


def _flood(graph: LinkGraph, trees: Ints, tree_of: Index) -> Messages:
    """The messages of the heads to all: the first of every tree first, then the second."""
    heights = _heights(graph, trees)
    turn = np.arange(len(tree_of)) - np.searchsorted(tree_of, tree_of)
    longest = int(heights.max()) + 1
    spread = [_down_tree(graph, *pair) for pair in zip(trees, heights, strict=True)]
    per_tree = graph.num_ranks - 1
    parts = []
    for number, tree in enumerate(tree_of.tolist()):
        link, after, hops_left = spread[tree]
        after = np.where(after < 0, -1, after + number * per_tree)
        chunk = np.full(per_tree, number)
        parts.append((link, chunk, after, hops_left - longest * turn[number]))
    return Messages(*map(np.concatenate, zip(*parts, strict=True)))


def _to_heads(graph: LinkGraph, trees: Ints, group: Index, owner: Ints) -> Messages:
    """The messages that bring shares up to their heads, and those of shares that travel alone."""
    chunk: Index = np.arange(len(group))
    before: Index = np.full(len(group), -1)
    length: Index = np.zeros(len(group), np.intp)
    rank: Index = owner[chunk].astype(np.intp)
    parts, total = [], 0
    while True:
        link = trees[group[chunk], rank]
        chunk, link, before = (part[link != NO_LINK] for part in (chunk, link, before))
        if not len(chunk):
            break
        parts.append((link.astype(np.intp) ^ 1, chunk, before, -length[chunk]))
        before, rank = total + np.arange(len(chunk)), graph.source[link].astype(np.intp)
        total += len(chunk)
        length[chunk] += 1
    parts = [(link, chunk, before, length[chunk] + left) for link, chunk, before, left in parts]
    alone = trees[int(group[-1]) + 1 :]
    for number, (tree, heights) in enumerate(zip(alone, _heights(graph, alone), strict=True)):
        down, after, hops_left = _down_tree(graph, tree, heights)
        after = np.where(after < 0, -1, after + total)
        parts.append((down, np.full(len(down), len(group) + number), after, hops_left))
        total += len(down)
    return Messages(*map(np.concatenate, zip(*parts, strict=True)))


def _ranges(starts: Index, stops: Index) -> Index:
    """The whole numbers from each start up to its stop, one after the other."""
    lengths = stops - starts
    first = np.cumsum(lengths) - lengths
    numbers: Index = np.arange(int(lengths.sum())) + np.repeat(starts - first, lengths)
    return numbers
