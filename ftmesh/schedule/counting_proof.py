"""Counting: proofs that cost no more than reading the rounds, for schedules of the usual form.

**Sums.** Look at one chunk during the first half. If every contributor but the chunk's owner passes
its partial sum on exactly once, and nobody receives anything after having passed it on, then what
each rank sends holds its own contribution and all that it has received, and goes on to a rank that
sends later, or to the owner, who never does. So every contribution takes one way, which ends at the
owner, and is there exactly once: the additions form a tree. A chunk of any other form is left to
`ftmesh.schedule.set_proof`.

**Results.** The second half alone begins with each chunk at its owner and with anything elsewhere.
A copy makes a rank hold the result if the sender does; adding to it, or to anything, does not.

**Trees.** Without halves, look at all transfers of one chunk over N ranks. Let there be N - 1 pairs
of ranks with one transfer each way, every rank send to another only after all *others* that it
hears from have been heard, and an addition be what is sent before, or with, the transfer that comes
the other way, a copy what is sent after it. Round a circle of pairs each transfer would have to be
later than the one before, so there is none, and the pairs form a tree that spans all ranks. Then
what is added holds all contributions from the sender's side of the pair, once, and what is copied
holds all there are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ftmesh.schedule.rank_schedule import AnyRankSchedule
from ftmesh.schedule.transfers import ADD, Ints, CellMoves, cell_moves, lane_slices

Flags = NDArray[np.bool_]


def uncounted_chunks(script: AnyRankSchedule) -> NDArray[np.intp]:
    """The chunks whose sum at the owner cannot be shown by counting."""
    assert script.owner is not None
    ranks, chunks = script.num_ranks, script.num_chunks
    contributes = np.zeros(ranks, np.bool_)
    contributes[script.contributors] = True
    sent = np.zeros(ranks * chunks, np.bool_)
    odd = np.zeros(chunks, np.bool_)
    for now in (cell_moves(c, chunks) for phase in script.reduce_scatter for c in phase.rounds()):
        cells = sent.reshape(-1, now.size)
        wrong = np.zeros(len(now.src), np.bool_)
        for lane in lane_slices(now):  # a lane has each source once
            wrong[lane] = cells[now.src[lane]].any(axis=1)
            cells[now.src[lane]] = True
        wrong |= cells[now.dst].any(axis=1)
        if wrong.any():
            _mark(odd, now, wrong)
        if not now.adds.all():
            _mark(odd, now, ~now.adds)
    every = sent.reshape(ranks, chunks)
    expected = np.repeat(contributes[:, None], chunks, axis=1)
    expected[script.owner, np.arange(chunks)] = False
    odd |= (every != expected).any(axis=0)
    if not contributes.all():
        odd |= _received(script, ~contributes)
    return np.flatnonzero(odd)


def _received(script: AnyRankSchedule, ranks: Flags) -> Flags:
    """The chunks of which one of `ranks` receives something in the first half and does not own."""
    assert script.owner is not None
    found = np.zeros(script.num_chunks, np.bool_)
    for c in (c for phase in script.reduce_scatter for c in phase.rounds()):
        at = c.take(ranks[c.dst])
        row, chunk = at.expanded()
        found[chunk[script.owner[chunk] != at.dst[row]]] = True
    return found


def ungathered_chunks(script: AnyRankSchedule) -> NDArray[np.intp]:
    """The chunks that the second half alone does not take from their owners to every rank."""
    assert script.owner is not None
    ranks, chunks = script.num_ranks, script.num_chunks
    holds = np.zeros((ranks, chunks), np.bool_)
    holds[script.owner, np.arange(chunks)] = True
    flat = holds.reshape(-1)
    for now in (cell_moves(c, chunks) for phase in script.all_gather for c in phase.rounds()):
        cells = flat.reshape(-1, now.size)
        arriving = cells[now.src]
        if now.adds.any():
            arriving[now.adds] = False
        cells[now.dst] = arriving
    return np.flatnonzero(~holds.all(axis=0))


def unspanned_chunks(script: AnyRankSchedule) -> NDArray[np.intp]:
    """The chunks whose transfers cannot be shown, by counting, to sum them along a tree."""
    ranks, chunks = script.num_ranks, script.num_chunks
    if len(script.contributors) < ranks:
        return np.arange(chunks)
    chunk, src, dst, now, adds = _by_chunk(script)
    odd = np.bincount(chunk, minlength=chunks) != 2 * (ranks - 1)
    odd[chunk[src == dst]] = True
    base = chunk.astype(np.int64) * ranks
    there, back = (base + src) * ranks + dst, (base + dst) * ranks + src
    order, answers = np.argsort(there), np.argsort(back)
    there, back = there[order], back[answers]  # both have as many of each chunk
    chunk, now, adds, answered = chunk[order], now[order], adds[order], now[answers]
    odd[chunk[there != back]] = True
    odd[chunk[1:][there[1:] == there[:-1]]] = True
    odd[chunk[adds != (now <= answered)]] = True
    sender = there // ranks
    first = np.flatnonzero(np.concatenate(([True], sender[1:] != sender[:-1])))
    number = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(sender))))
    latest = np.maximum.reduceat(answered, first)[number]
    is_latest = answered == latest
    is_alone = np.add.reduceat(is_latest, first)[number] == 1
    second = np.maximum.reduceat(np.where(is_latest, -1, answered), first)[number]
    odd[chunk[now <= np.where(is_latest & is_alone, second, latest)]] = True
    return np.flatnonzero(odd)


def _by_chunk(script: AnyRankSchedule) -> tuple[Ints, ...]:
    """Of every chunk that is moved: it, where from and where to, in which round, and if added."""
    found = []
    for now, c in enumerate(c for phase in script.phases for c in phase.rounds()):
        row, chunk = c.expanded()
        columns = chunk, c.src[row], c.dst[row], np.full(len(row), now), (c.op == ADD)[row]
        found.append(np.stack(columns).astype(np.int32))
    return tuple(np.concatenate(found, axis=1))


def _mark(odd: Flags, now: CellMoves, which: Flags) -> None:
    for offset in range(now.size):
        odd[now.chunk[which] + offset] = True
