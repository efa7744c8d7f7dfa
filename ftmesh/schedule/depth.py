"""Depth: the longest chain of additions, because a 16-bit partial sum is rounded at each."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from ftmesh.schedule.columns import ADD, Columns
from ftmesh.schedule.moves import lanes_of, moves
from ftmesh.schedule.phase import Phase


def depth_of(phases: Iterable[Phase], num_ranks: int, num_chunks: int) -> int:
    """The longest chain of additions that any value goes through in `phases`."""
    phases = tuple(phases)
    if len(phases) == 1 and _is_rings_apart(phases[0]):
        return phases[0].num_rounds
    small = sum(phase.num_rounds * len(phase.lanes) for phase in phases) < 2**16
    deep = np.zeros(num_ranks * num_chunks, np.uint16 if small else np.int32)
    for now in (moves(c, num_chunks) for phase in phases for c in phase.rounds()):
        cells = deep.reshape(-1, now.size)
        read = cells[now.src]
        for lane in lanes_of(now):
            target, adds = now.dst[lane], now.adds[lane]
            if adds.all():
                cells[target] = np.maximum(cells[target], read[lane]) + 1
            else:
                summed = np.maximum(cells[target], read[lane]) + 1
                cells[target] = np.where(adds[:, None], summed, read[lane])
    return int(deep.max())


def _is_rings_apart(phase: Phase) -> bool:
    """Whether a phase is rings that sum, each on chunks of its own: every round adds once."""
    if isinstance(phase.what, Columns):
        return False
    ends = [
        (int(first), int(first) + each.num_places * each.count)
        for each in phase.what
        for first in each.first_chunk
    ]
    apart = all(end <= start for (_, end), (start, _) in pairwise(sorted(ends)))
    return apart and all(each.op == ADD for each in phase.what)
