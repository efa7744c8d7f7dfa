"""Replay one chunk of a schedule with whole numbers, and tell what became of each contribution.

Slow and exact: `ftmesh.verify` calls it for the chunks in which something looks wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ftmesh.schedule.schedule import ADD, Schedule

MANY = 2**31  # counts stop here: a contribution that is there so often never becomes right again


@dataclass(frozen=True)
class Replay:
    """What every rank holds of one chunk after some rounds, and how it came about.

    ``counts[r, s]`` says how many times rank r holds the contribution of rank s.
    """

    schedule: Schedule
    chunk: int
    num_rounds: int
    counts: NDArray[np.int64]
    travelled: dict[int, tuple[int, int, int]]  # contribution -> its last move: round, src, dst
    doubled: dict[int, tuple[int, int, int]]  # contribution -> the move that first doubled it

    def complaint(self, rank: int) -> str | None:
        """What is wrong with the sum at `rank`; None where each contribution is there once."""
        found = self.counts[rank]
        if (found == 1).all():
            return None
        coords = self.schedule.topology.coords
        says = (
            f"after round {self.num_rounds - 1}, chunk {self.chunk} at chip {coords[rank]}: "
            f"expected each of {len(coords)} contributions exactly once, found "
        )
        parts = []
        often = [int(s) for s in np.flatnonzero(found > 1)]
        if often:
            worst = min(often, key=lambda s: self.doubled[s])
            parts.append(
                f"{len(often)} too often, such as chip {coords[worst]}'s {found[worst]} times "
                f"(first doubled {self._move(self.doubled[worst])})"
            )
        missing = [int(s) for s in np.flatnonzero(found == 0)]
        if missing:
            nearest = max(missing, key=lambda s: self.travelled.get(s, (-1, 0, 0)))
            if nearest in self.travelled:
                how = f"which last travelled {self._move(self.travelled[nearest])}"
            else:
                how = "which never left it"
            parts.append(f"{len(missing)} missing, such as chip {coords[nearest]}'s, {how}")
        return says + "; ".join(parts)

    def _move(self, move: tuple[int, int, int]) -> str:
        now, src, dst = move
        coords = self.schedule.topology.coords
        return f"in round {now}, chip {coords[src]} to chip {coords[dst]}"


def replay(schedule: Schedule, chunk: int, num_rounds: int) -> Replay:
    """Run the first `num_rounds` rounds for `chunk` alone."""
    coords = schedule.topology.coords
    c = schedule.columns
    mine = (c.chunk <= chunk) & (chunk - c.chunk < c.count) & (c.round < num_rounds)
    c = c.take(mine)
    counts = np.eye(len(coords), dtype=np.int64)
    travelled: dict[int, tuple[int, int, int]] = {}
    doubled: dict[int, tuple[int, int, int]] = {}
    for now in np.unique(c.round):
        this = c.take(c.round == now)
        read = counts[this.src]
        for src, dst, op, value in zip(this.src, this.dst, this.op, read, strict=True):
            before = counts[dst].copy()
            counts[dst] = np.minimum(before + value, MANY) if op == ADD else value
            move = (int(now), int(src), int(dst))
            for s in np.flatnonzero((before == 0) & (counts[dst] > 0)):
                travelled[int(s)] = move
            for s in np.flatnonzero((counts[dst] > 1) & (counts[dst] > before)):
                doubled.setdefault(int(s), move)
    return Replay(schedule, chunk, num_rounds, counts, travelled, doubled)
