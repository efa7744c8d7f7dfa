"""Replay one chunk with whole numbers, and tell what became of each contribution.

Slow and exact: proofs call it for the chunks in which something looks wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ftmesh.schedule.rank_schedule import AnyRankSchedule
from ftmesh.schedule.transfers import ADD

MANY = 2**31  # counts stop here: a contribution that is there so often never becomes right again

Move = tuple[int, int, int]  # round, source, destination


@dataclass(frozen=True)
class Replay:
    """What every rank holds of one chunk after some rounds, and how it came about.

    ``counts[r, s]`` says how many times rank r holds the contribution of rank s.
    """

    script: AnyRankSchedule
    chunk: int
    num_rounds: int
    counts: NDArray[np.int64]
    travelled: dict[int, Move]  # contribution -> its last move
    doubled: dict[int, Move]  # contribution -> the move that first doubled it

    def complaint(self, rank: int) -> str | None:
        """What is wrong with the sum at `rank`; None where each contribution is there once."""
        names, expected = self.script.names, self.script.contributors
        found = self.counts[rank, expected]
        stray = np.setdiff1d(np.flatnonzero(self.counts[rank]), expected)
        if (found == 1).all() and not len(stray):
            return None
        says = (
            f"after round {self.num_rounds - 1}, chunk {self.chunk} at {names[rank]}: "
            f"expected each of {len(expected)} contributions exactly once, found "
        )
        parts = []
        if len(stray):
            parts.append(f"what the idle {names[stray[0]]} began with")
        often = expected[found > 1].tolist()
        if often:
            worst = min(often, key=lambda s: self.doubled[s])
            times = self.counts[rank, worst]
            parts.append(
                f"{len(often)} too often, such as {names[worst]}'s {times} times "
                f"(first doubled {self._move(self.doubled[worst])})"
            )
        missing = expected[found == 0].tolist()
        if missing:
            nearest = max(missing, key=lambda s: self.travelled.get(s, (-1, 0, 0)))
            if nearest in self.travelled:
                how = f"which last travelled {self._move(self.travelled[nearest])}"
            else:
                how = "which never left it"
            parts.append(f"{len(missing)} missing, such as {names[nearest]}'s, {how}")
        return says + "; ".join(parts)

    def _move(self, move: Move) -> str:
        now, src, dst = move
        return f"in round {now}, {self.script.names[src]} to {self.script.names[dst]}"


def replay(script: AnyRankSchedule, chunk: int, num_rounds: int) -> Replay:
    """Run the first `num_rounds` rounds for `chunk` alone."""
    counts = np.eye(script.num_ranks, dtype=np.int64)
    travelled: dict[int, Move] = {}
    doubled: dict[int, Move] = {}
    for now, this in script.transfers_of_chunk(chunk):
        if now >= num_rounds:
            break
        read = counts[this.src]
        for src, dst, op, value in zip(this.src, this.dst, this.op, read, strict=True):
            before = counts[dst].copy()
            counts[dst] = np.minimum(before + value, MANY) if op == ADD else value
            move = (now, int(src), int(dst))
            for s in np.flatnonzero((before == 0) & (counts[dst] > 0)):
                travelled[int(s)] = move
            for s in np.flatnonzero((counts[dst] > 1) & (counts[dst] > before)):
                doubled.setdefault(int(s), move)
    return Replay(script, chunk, num_rounds, counts, travelled, doubled)


def all_gather_error(script: AnyRankSchedule, chunk: int) -> str:
    """Why the second half alone does not take `chunk` from its owner to every rank."""
    assert script.owner is not None
    owner = int(script.owner[chunk])
    holds, spoilt = {owner}, {}
    for now, this in script.transfers_of_chunk(chunk):
        if now < script.rounds_in_reduce_scatter:
            continue
        held = frozenset(holds)
        for src, dst, op in zip(*(c.tolist() for c in (this.src, this.dst, this.op)), strict=True):
            if op != ADD and src in held:
                holds.add(dst)
            else:
                holds.discard(dst)
                spoilt[dst] = (now, src, dst, op)
    rank = min(set(range(script.num_ranks)) - holds)
    says = (
        f"the all-gather half alone does not bring chunk {chunk} to {script.names[rank]}: it "
        f"begins with that chunk at its owner, {script.names[owner]}, and with anything elsewhere; "
        "expected copies of it at every rank, found "
    )
    if rank not in spoilt:
        return says + "none there"
    now, src, dst, op = spoilt[rank]
    seen = {rank}
    while src in spoilt and spoilt[src][0] < now and src not in seen:  # back to the first fault
        seen.add(src)
        now, src, dst, op = spoilt[src]
    verb = "adds to what is there" if op == ADD else "sends what it does not hold"
    to = script.names[dst]
    return f"{says}that in {script.place_of(now)} {script.names[src]} {verb}, to {to}"
