"""Messages: which chunk each link carries in which round, where chunks are summed along trees.

Each chunk has a spanning tree, and every edge of it carries one message each way. That from u to v
is ready when u has heard from all its *other* neighbours in the tree. So nobody is the root: sums
meet where they happen to, and spread from there. The same holds backwards in time. That is how a
good order is found: serve messages so that they are as late as they can be in reversed time, and
then, forward again, in the order that this gave.

Where rounds do not wait for each other, a message may be under way for longer than it keeps its
link. With a *lag* of so many rounds it is heard that much later. What it would answer then waits
for it: a message is added or copied, which must not depend on who was quicker.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from ftmesh.schedule.transfers import Ints
from ftmesh.topology.graph import LinkGraph

NONE = -1  # the round of a message that there is not

Rounds = NDArray[np.int32]  # [link, chunk]
Index = NDArray[np.intp]
Ready = tuple[Index, Index]  # links, and a chunk for each


def order_messages(
    graph: LinkGraph, trees: Ints, num_chunks: int, *, turns: int = 2, width: int = 1, lag: int = 0
) -> Rounds:
    """The round in which each link carries each chunk; in as few rounds as are found.

    Chunks go along `trees`, as `ftmesh.algorithms.spanning_trees.grow_trees` makes them, in turn. The order is
    turned backwards and forward again so many times. A link carries up to `width` chunks a round,
    and what it carries is heard `lag` rounds late.
    """
    links = _links_of(graph, trees)
    back = np.arange(graph.num_links) ^ 1

    def served(priority: NDArray[np.integer]) -> Rounds:
        return _one_by_one(_Heard(graph, links, num_chunks), priority, width, lag)

    to_go = (1 + lag) * (1 + _at_once(_Heard(graph, links, len(trees)))[back])
    chunks = np.arange(num_chunks)
    found = best = served(chunks // width - 2 * to_go[:, chunks % len(trees)])
    for _ in range(turns):
        mirrored = served(-found[back])
        late = np.where(mirrored == NONE, NONE, mirrored.max() - mirrored)[back]
        found = served(late)
        best = min(best, late, found, key=np.max)
    return best


def _links_of(graph: LinkGraph, trees: Ints) -> Index:
    """``[tree, rank, place]``: the links that lead from a rank to its neighbours in a tree."""
    tree, rank = np.nonzero(trees != NONE)
    down = trees[tree, rank].astype(np.intp)
    link = np.concatenate([down, down ^ 1])
    cell = np.tile(tree, 2) * graph.num_ranks + graph.source[link]
    order = np.lexsort((link, cell))
    cell, link = cell[order], link[order]
    place = np.arange(len(cell)) - np.searchsorted(cell, cell)
    found = np.full((trees.size, int(place.max()) + 1), NONE, np.intp)
    found[cell, place] = link
    return found.reshape(*trees.shape, -1)


class _Heard:
    """What each rank has heard from its neighbours in the tree of each chunk.

    A cell is a rank's part in a chunk: how many neighbours it is still to hear from, and the sum of
    the links that lead to these. Where one is left, that sum is the link that leads there.
    """

    def __init__(self, graph: LinkGraph, links: Index, num_chunks: int) -> None:
        self.graph, self.num_chunks, self._links = graph, num_chunks, links
        tree = np.arange(num_chunks) % len(links)
        is_used = links != NONE
        self._left = is_used.sum(axis=2, dtype=np.int8).T[:, tree].ravel()
        self._sum = np.where(is_used, links, 0).sum(axis=2).T[:, tree].ravel()
        self.num_messages = int(self._left.sum(dtype=np.int64))

    def first(self) -> Ready:
        """The messages that are ready at the beginning: those of leaves."""
        return self._last_ones(np.flatnonzero(self._left == 1))

    def hear(self, link: Index, chunk: Index) -> tuple[Ready, Ready]:
        """Let messages arrive; what is ready by that, some of it twice.

        Messages to the one neighbour that is left, and those of ranks that have heard from all, of
        which one may have been ready before.
        """
        rank = self.graph.target[link]
        cell = rank * np.intp(self.num_chunks) + chunk
        np.subtract.at(self._left, cell, np.int8(1))
        np.subtract.at(self._sum, cell, link ^ 1)
        after = self._left[cell]
        done = np.flatnonzero(after == 0)
        every = self._links[chunk[done] % len(self._links), rank[done]]
        row, place = np.nonzero(every != NONE)
        return self._last_ones(cell[after == 1]), (every[row, place], chunk[done[row]])

    def _last_ones(self, cell: Index) -> Ready:
        return self._sum[cell], cell % self.num_chunks


def _at_once(heard: _Heard) -> Rounds:
    """The rounds of messages if a link could carry any number of them in one."""
    found = np.full((heard.graph.num_links, heard.num_chunks), NONE, np.int32)
    every = found.ravel()
    link, chunk = heard.first()
    now = 0
    while len(link):
        message = np.unique(link * heard.num_chunks + chunk)
        message = message[every[message] == NONE]
        every[message] = now
        last, rest = heard.hear(*np.divmod(message, heard.num_chunks))
        link, chunk = map(np.concatenate, zip(last, rest, strict=True))
        now += 1
    return found


def _one_by_one(heard: _Heard, priority: NDArray[np.integer], width: int, lag: int) -> Rounds:
    """So many messages a link and round: of those that are ready, the ones with least priority.

    What is ready is a bit of a link, the bits in the order of priorities.
    """
    order = np.argsort(_short(priority), axis=1, kind="stable")
    place = np.empty(order.shape, np.int32)
    np.put_along_axis(place, order, np.arange(heard.num_chunks, dtype=np.int32)[None], axis=1)
    num_links = len(order)
    ready = np.zeros((num_links, -(-heard.num_chunks // 64)), np.uint64)
    found = np.full((num_links, heard.num_chunks), NONE, np.int32)
    rows, one = np.arange(num_links), np.uint64(1)
    under_way: deque[Ready] = deque([(rows[:0], rows[:0])] * lag)

    def note(link: Index, chunk: Index) -> None:
        at = place[link, chunk]
        np.bitwise_or.at(ready, (link, at >> 6), one << (at & 63).astype(np.uint64))

    def note_heard(link: Index, chunk: Index) -> None:
        last, rest = heard.hear(link, chunk)
        for some, wait_for in ((last, 1), (rest, 0)):  # an answer to what is under way waits
            is_new = found[some[0] ^ wait_for, some[1]] == NONE
            note(some[0][is_new], some[1][is_new])

    def hold_back(link: Index, chunk: Index) -> None:
        is_new = found[link, chunk] == NONE
        link, chunk = link[is_new], chunk[is_new]
        at = place[link, chunk]
        np.bitwise_and.at(ready, (link, at >> 6), ~(one << (at & 63).astype(np.uint64)))

    def take() -> Ready:
        word = (ready != 0).argmax(axis=1)
        bits = ready[rows, word]
        link = np.flatnonzero(bits)
        word, bits = word[link], bits[link]
        lowest = bits & (~bits + one)
        ready[link, word] = bits ^ lowest
        return link, order[link, 64 * word + np.bitwise_count(lowest - one)]

    note(*heard.first())
    left, now = heard.num_messages, 0
    while left:
        taken = [take() for _ in range(width)]
        link, chunk = map(np.concatenate, zip(*taken, strict=True))
        found[link, chunk] = now
        if lag:
            hold_back(link ^ 1, chunk)
        under_way.append((link, chunk))
        note_heard(*under_way.popleft())
        left -= len(link)
        now += 1
    return found


def _short(numbers: NDArray[np.integer]) -> NDArray[np.integer]:
    """The same in 16 bits where they fit, as those are sorted fastest."""
    fits = np.iinfo(np.int16).min <= numbers.min() and numbers.max() <= np.iinfo(np.int16).max
    return numbers.astype(np.int16) if fits else numbers
