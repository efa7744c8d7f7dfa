"""Proofs that only count transfers, for schedules of the usual form.

They take no longer than reading the rounds. Chunks they cannot prove are left to
`ftmesh.schedule.set_proof`.

**Sums.** Take one chunk in the reduce-scatter. Let every contributor except the owner send its
partial sum exactly once, and let nobody receive after sending. Then what a rank sends holds its own
contribution and all that it received, and goes to a rank that sends later or to the owner, who
never sends. So every contribution takes one path, which ends at the owner: the additions form a
tree, and each contribution is there exactly once.

**Results.** The all-gather alone starts with each chunk at its owner and any value elsewhere. A
copy gives a rank the result if the sender has it; an addition never does.

**Trees.** Without a reduce-scatter, take all transfers of one chunk over N ranks. Let there be
N - 1 pairs of ranks with one transfer each way. Let every rank send to another only after it has
heard from all *other* ranks it hears from. Let a transfer be an addition if it is sent before, or
with, the transfer the other way, and a copy if it is sent after. Around a cycle of pairs each
transfer would have to be later than the one before, so there is no cycle, and the pairs form a tree
that spans all ranks. Then an addition carries all contributions from the sender's side of the pair
once, and a copy carries all contributions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ftmesh.schedule.schedule import AnyRankSchedule
from ftmesh.schedule.transfers import ADD, Ints, cell_moves, lane_slices

Flags = NDArray[np.bool_]


def uncounted_chunks(ranks: AnyRankSchedule) -> NDArray[np.intp]:
    """Return the chunks whose sum at the owner cannot be proved by counting."""
    assert ranks.owner is not None
    num_ranks, num_chunks = ranks.num_ranks, ranks.num_chunks
    contributes = np.zeros(num_ranks, np.bool_)
    contributes[ranks.contributors] = True
    sent = np.zeros(num_ranks * num_chunks, np.bool_)
    unproved = np.zeros(num_chunks, np.bool_)
    for phase in ranks.reduce_scatter:
        for moves in (cell_moves(transfers, num_chunks) for transfers in phase.rounds()):
            cells = sent.reshape(-1, moves.size)
            wrong = np.zeros(len(moves.src), np.bool_)
            for lane in lane_slices(moves):  # a lane has each source once
                wrong[lane] = cells[moves.src[lane]].any(axis=1)
                cells[moves.src[lane]] = True
            wrong |= cells[moves.dst].any(axis=1)
            wrong |= ~moves.adds
            unproved[moves.chunk[wrong][:, None] + np.arange(moves.size)] = True
    expected = np.repeat(contributes[:, None], num_chunks, axis=1)
    expected[ranks.owner, np.arange(num_chunks)] = False
    unproved |= (sent.reshape(num_ranks, num_chunks) != expected).any(axis=0)
    if not contributes.all():
        unproved |= _received_by(ranks, ~contributes)
    return np.flatnonzero(unproved)


def _received_by(ranks: AnyRankSchedule, receivers: Flags) -> Flags:
    """The chunks that one of `receivers` receives in the reduce-scatter without owning them."""
    assert ranks.owner is not None
    chunks = np.zeros(ranks.num_chunks, np.bool_)
    for phase in ranks.reduce_scatter:
        for transfers in phase.rounds():
            received = transfers.take(receivers[transfers.dst])
            row, chunk = received.expanded()
            chunks[chunk[ranks.owner[chunk] != received.dst[row]]] = True
    return chunks


def ungathered_chunks(ranks: AnyRankSchedule) -> NDArray[np.intp]:
    """Return the chunks that the all-gather alone does not bring from owners to every rank."""
    assert ranks.owner is not None
    num_chunks = ranks.num_chunks
    holds = np.zeros((ranks.num_ranks, num_chunks), np.bool_)
    holds[ranks.owner, np.arange(num_chunks)] = True
    flat = holds.reshape(-1)
    for phase in ranks.all_gather:
        for moves in (cell_moves(transfers, num_chunks) for transfers in phase.rounds()):
            cells = flat.reshape(-1, moves.size)
            cells[moves.dst] = cells[moves.src] & ~moves.adds[:, None]
    return np.flatnonzero(~holds.all(axis=0))


def unspanned_chunks(ranks: AnyRankSchedule) -> NDArray[np.intp]:
    """Return the chunks whose transfers cannot be proved, by counting, to sum along a tree."""
    num_ranks, num_chunks = ranks.num_ranks, ranks.num_chunks
    if len(ranks.contributors) < num_ranks:
        return np.arange(num_chunks)
    chunk, src, dst, sent, adds = _by_chunk(ranks)
    unproved = np.bincount(chunk, minlength=num_chunks) != 2 * (num_ranks - 1)
    unproved[chunk[src == dst]] = True
    base = chunk.astype(np.int64) * num_ranks
    there, back = (base + src) * num_ranks + dst, (base + dst) * num_ranks + src
    order, back_order = np.argsort(there), np.argsort(back)
    there, back = there[order], back[back_order]  # both have as many of each chunk
    chunk, sent, adds, answered = chunk[order], sent[order], adds[order], sent[back_order]
    unproved[chunk[there != back]] = True
    unproved[chunk[1:][there[1:] == there[:-1]]] = True
    unproved[chunk[adds != (sent <= answered)]] = True
    sender = there // num_ranks
    first = np.flatnonzero(np.concatenate(([True], sender[1:] != sender[:-1])))
    group = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(sender))))
    latest = np.maximum.reduceat(answered, first)[group]
    is_latest = answered == latest
    is_alone = np.add.reduceat(is_latest, first)[group] == 1
    second = np.maximum.reduceat(np.where(is_latest, -1, answered), first)[group]
    unproved[chunk[sent <= np.where(is_latest & is_alone, second, latest)]] = True
    return np.flatnonzero(unproved)


def _by_chunk(ranks: AnyRankSchedule) -> tuple[Ints, ...]:
    """For every chunk moved: the chunk, source, destination, round, and whether it is added."""
    parts = []
    rounds = (transfers for phase in ranks.phases for transfers in phase.rounds())
    for index, t in enumerate(rounds):
        row, chunk = t.expanded()
        columns = chunk, t.src[row], t.dst[row], np.full(len(row), index), (t.op == ADD)[row]
        parts.append(np.stack(columns).astype(np.int32))
    return tuple(np.concatenate(parts, axis=1))
