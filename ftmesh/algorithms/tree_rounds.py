"""Decides in which round each link carries each chunk, where chunks are summed along trees.

Each chunk has a spanning tree, and every edge of it carries one message each way. The message from
u to v is ready when u has received from all its *other* neighbours in the tree. So there is no
root: sums meet wherever they happen to, and results spread from there. The same holds backwards in
time, and this is how a good order is found: send messages as late as possible in reversed time, and
then, forwards again, in the order that this gave.

With a *lag*, a message arrives that many rounds late. The message that it would answer waits for
it, since whether a message is added or copied must not depend on which was faster.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from ftmesh.schedule.transfers import Ints
from ftmesh.topology.graph import LinkGraph

NO_ROUND = -1  # of a message that does not exist

MessageRounds = NDArray[np.int32]  # [link, chunk]
Index = NDArray[np.intp]
Messages = tuple[Index, Index]  # links, and a chunk for each


def order_messages(
    graph: LinkGraph, trees: Ints, num_chunks: int, *, passes: int = 2, width: int = 1, lag: int = 0
) -> MessageRounds:
    """Return the round in which each link carries each chunk, with as few rounds as are found.

    Chunks take the `trees` (see `ftmesh.algorithms.tree.grow_trees`) in turn. Messages are
    reordered backwards and forwards `passes` times. A link carries `width` chunks per round.
    """
    tree_links = _tree_links(graph, trees)
    reverse = np.arange(graph.num_links) ^ 1

    def send(priority: NDArray[np.integer]) -> MessageRounds:
        return _send_by_priority(_Inbox(graph, tree_links, num_chunks), priority, width, lag)

    to_go = (1 + lag) * (1 + _send_unlimited(_Inbox(graph, tree_links, len(trees)))[reverse])
    chunks = np.arange(num_chunks)
    rounds = best = send(chunks // width - 2 * to_go[:, chunks % len(trees)])
    for _ in range(passes):
        backwards = send(-rounds[reverse])
        late = np.where(backwards == NO_ROUND, NO_ROUND, backwards.max() - backwards)[reverse]
        rounds = send(late)
        best = min(best, late, rounds, key=np.max)
    return best


def _tree_links(graph: LinkGraph, trees: Ints) -> Index:
    """``[tree, rank, slot]``: the links from a rank to its neighbours in a tree, or -1."""
    tree, rank = np.nonzero(trees != NO_ROUND)
    down = trees[tree, rank].astype(np.intp)
    link = np.concatenate([down, down ^ 1])
    cell = np.tile(tree, 2) * graph.num_ranks + graph.source[link]
    order = np.lexsort((link, cell))
    cell, link = cell[order], link[order]
    slot = np.arange(len(cell)) - np.searchsorted(cell, cell)
    links = np.full((trees.size, int(slot.max()) + 1), NO_ROUND, np.intp)
    links[cell, slot] = link
    return links.reshape(*trees.shape, -1)


class _Inbox:
    """What each rank has received from its neighbours in the tree of each chunk.

    A cell is a (rank, chunk). It has the number of neighbours that it has not yet received from,
    and the sum of the links to them. If one is left, that sum is the link to it.
    """

    def __init__(self, graph: LinkGraph, tree_links: Index, num_chunks: int) -> None:
        self.graph, self.num_chunks, self._tree_links = graph, num_chunks, tree_links
        tree = np.arange(num_chunks) % len(tree_links)
        is_used = tree_links != NO_ROUND
        self._num_left = is_used.sum(axis=2, dtype=np.int8).T[:, tree].ravel()
        self._link_sum = np.where(is_used, tree_links, 0).sum(axis=2).T[:, tree].ravel()
        self.num_messages = int(self._num_left.sum(dtype=np.int64))

    def initial(self) -> Messages:
        """The messages that are ready at the start: those of leaves."""
        return self._to_last_neighbour(np.flatnonzero(self._num_left == 1))

    def receive(self, link: Index, chunk: Index) -> tuple[Messages, Messages]:
        """Deliver messages, and return those that become ready.

        To the last neighbour; and from ranks that have received from all, one maybe not new.
        """
        rank = self.graph.target[link]
        cell = rank * np.intp(self.num_chunks) + chunk
        np.subtract.at(self._num_left, cell, np.int8(1))
        np.subtract.at(self._link_sum, cell, link ^ 1)
        num_left = self._num_left[cell]
        done = np.flatnonzero(num_left == 0)
        links = self._tree_links[chunk[done] % len(self._tree_links), rank[done]]
        row, slot = np.nonzero(links != NO_ROUND)
        return self._to_last_neighbour(cell[num_left == 1]), (links[row, slot], chunk[done[row]])

    def _to_last_neighbour(self, cell: Index) -> Messages:
        return self._link_sum[cell], cell % self.num_chunks


def _send_unlimited(inbox: _Inbox) -> MessageRounds:
    """The rounds of messages if a link could carry any number of them per round."""
    rounds = np.full((inbox.graph.num_links, inbox.num_chunks), NO_ROUND, np.int32)
    flat = rounds.ravel()
    link, chunk = inbox.initial()
    index = 0
    while len(link):
        message = np.unique(link * inbox.num_chunks + chunk)
        message = message[flat[message] == NO_ROUND]
        flat[message] = index
        last, rest = inbox.receive(*np.divmod(message, inbox.num_chunks))
        link, chunk = map(np.concatenate, zip(last, rest, strict=True))
        index += 1
    return rounds


def _send_by_priority(
    inbox: _Inbox, priority: NDArray[np.integer], width: int, lag: int
) -> MessageRounds:
    """The rounds if each link sends, per round, the `width` ready messages of lowest priority.

    Ready messages are bits of a link, in the order of priorities.
    """
    order = np.argsort(_narrowed(priority), axis=1, kind="stable")
    slot = np.empty(order.shape, np.int32)
    np.put_along_axis(slot, order, np.arange(inbox.num_chunks, dtype=np.int32)[None], axis=1)
    num_links = len(order)
    ready = np.zeros((num_links, -(-inbox.num_chunks // 64)), np.uint64)
    rounds = np.full((num_links, inbox.num_chunks), NO_ROUND, np.int32)
    rows, one = np.arange(num_links), np.uint64(1)
    in_flight: deque[Messages] = deque([(rows[:0], rows[:0])] * lag)

    def mark_ready(link: Index, chunk: Index) -> None:
        at = slot[link, chunk]
        np.bitwise_or.at(ready, (link, at >> 6), one << (at & 63).astype(np.uint64))

    def receive(link: Index, chunk: Index) -> None:
        last, rest = inbox.receive(link, chunk)
        for messages, is_answer in ((last, 1), (rest, 0)):  # an answer waits for what is in flight
            is_new = rounds[messages[0] ^ is_answer, messages[1]] == NO_ROUND
            mark_ready(messages[0][is_new], messages[1][is_new])

    def hold_back(link: Index, chunk: Index) -> None:
        is_new = rounds[link, chunk] == NO_ROUND
        link, chunk = link[is_new], chunk[is_new]
        at = slot[link, chunk]
        np.bitwise_and.at(ready, (link, at >> 6), ~(one << (at & 63).astype(np.uint64)))

    def take() -> Messages:
        word = (ready != 0).argmax(axis=1)
        bits = ready[rows, word]
        link = np.flatnonzero(bits)
        word, bits = word[link], bits[link]
        lowest = bits & (~bits + one)
        ready[link, word] = bits ^ lowest
        return link, order[link, 64 * word + np.bitwise_count(lowest - one)]

    mark_ready(*inbox.initial())
    num_left, index = inbox.num_messages, 0
    while num_left:
        taken = [take() for _ in range(width)]
        link, chunk = map(np.concatenate, zip(*taken, strict=True))
        rounds[link, chunk] = index
        if lag:
            hold_back(link ^ 1, chunk)
        in_flight.append((link, chunk))
        receive(*in_flight.popleft())
        num_left -= len(link)
        index += 1
    return rounds


def _narrowed(values: NDArray[np.integer]) -> NDArray[np.integer]:
    """The same in 16 bits if they fit, since those sort fastest."""
    fits = np.iinfo(np.int16).min <= values.min() and values.max() <= np.iinfo(np.int16).max
    return values.astype(np.int16) if fits else values
