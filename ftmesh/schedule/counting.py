"""Counting: proofs that cost no more than reading the rounds, for schedules of the usual form.

**Sums.** Look at one chunk during the first half. If every contributor but the chunk's owner passes
its partial sum on exactly once, and nobody receives anything after having passed it on, then what
each rank sends holds its own contribution and all that it has received, and goes on to a rank that
sends later, or to the owner, who never does. So every contribution takes one way, which ends at the
owner, and is there exactly once: the additions form a tree. A chunk of any other form is left to
`ftmesh.schedule.sets`.

**Results.** The second half alone begins with each chunk at its owner and with anything elsewhere.
A copy makes a rank hold the result if the sender does; adding to it, or to anything, does not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ftmesh.schedule.moves import Moves, lanes_of, moves
from ftmesh.schedule.script import AnyScript

Flags = NDArray[np.bool_]


def uncounted_chunks(script: AnyScript) -> NDArray[np.intp]:
    """The chunks whose sum at the owner cannot be shown by counting."""
    assert script.owner is not None
    ranks, chunks = script.num_ranks, script.num_chunks
    contributes = np.zeros(ranks, np.bool_)
    contributes[script.contributors] = True
    sent = np.zeros(ranks * chunks, np.bool_)
    odd = np.zeros(chunks, np.bool_)
    for now in (moves(c, chunks) for phase in script.scatter for c in phase.rounds()):
        cells = sent.reshape(-1, now.size)
        wrong = np.zeros(len(now.src), np.bool_)
        for lane in lanes_of(now):  # a lane has each source once
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


def _received(script: AnyScript, ranks: Flags) -> Flags:
    """The chunks of which one of `ranks` receives something in the first half and does not own."""
    assert script.owner is not None
    found = np.zeros(script.num_chunks, np.bool_)
    for c in (c for phase in script.scatter for c in phase.rounds()):
        at = c.take(ranks[c.dst])
        row, chunk = at.expanded()
        found[chunk[script.owner[chunk] != at.dst[row]]] = True
    return found


def ungathered_chunks(script: AnyScript) -> NDArray[np.intp]:
    """The chunks that the second half alone does not take from their owners to every rank."""
    assert script.owner is not None
    ranks, chunks = script.num_ranks, script.num_chunks
    holds = np.zeros((ranks, chunks), np.bool_)
    holds[script.owner, np.arange(chunks)] = True
    flat = holds.reshape(-1)
    for now in (moves(c, chunks) for phase in script.gather for c in phase.rounds()):
        cells = flat.reshape(-1, now.size)
        arriving = cells[now.src]
        if now.adds.any():
            arriving[now.adds] = False
        cells[now.dst] = arriving
    return np.flatnonzero(~holds.all(axis=0))


def _mark(odd: Flags, now: Moves, which: Flags) -> None:
    for offset in range(now.size):
        odd[now.chunk[which] + offset] = True
