"""Replay one chunk of a schedule with whole numbers, and tell what became of each contribution.

Slow and exact: `ftmesh.verify` calls it for the chunks in which something looks wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ftmesh.schedule import ADD, Schedule


@dataclass(frozen=True)
class Replay:
    """What every rank holds of one chunk after some rounds, and how it came about.

    ``counts[r, s]`` says how many times rank r holds the contribution of rank s.
    """

    schedule: Schedule
    chunk: int
    num_rounds: int
    counts: NDArray[np.int64]
    reached: dict[int, str]
    doubled: dict[int, str]

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
        often = np.flatnonzero(found > 1)
        if len(often):
            s = int(often[0])
            how = self.doubled[s]
            parts.append(f"{len(often)} too often: chip {coords[s]}'s {found[s]} times ({how})")
        missing = np.flatnonzero(found == 0)
        if len(missing):
            s = int(missing[0])
            parts.append(f"{len(missing)} missing: chip {coords[s]}'s {self.reached[s]}")
        return says + "; ".join(parts)


def replay(schedule: Schedule, chunk: int, num_rounds: int) -> Replay:
    """Run the first `num_rounds` rounds for `chunk` alone."""
    coords = schedule.topology.coords
    c = schedule.columns
    c = c.take((c.chunk <= chunk) & (chunk < c.chunk + c.count) & (c.round < num_rounds))
    counts = np.eye(len(coords), dtype=np.int64)
    reached = dict.fromkeys(range(len(coords)), "never left it")
    doubled: dict[int, str] = {}
    for now in np.unique(c.round):
        this = c.take(c.round == now)
        read = counts[this.src]
        for src, dst, op, value in zip(this.src, this.dst, this.op, read, strict=True):
            before = counts[dst].copy()
            counts[dst] = before + value if op == ADD else value
            step = f"in round {now}, chip {coords[src]} to chip {coords[dst]}"
            for s in np.flatnonzero((before == 0) & (counts[dst] > 0)):
                reached[int(s)] = f"last travelled {step}"
            for s in np.flatnonzero((counts[dst] > 1) & (counts[dst] > before)):
                doubled.setdefault(int(s), f"first doubled {step}")
    return Replay(schedule, chunk, num_rounds, counts, reached, doubled)
