"""Moves: a round as moves between cells, which is what proofs step through."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ftmesh.schedule.columns import ADD, Columns, Ints


class Moves(NamedTuple):
    """One round over cells: a cell is what a rank holds of `size` chunks that move together.

    Viewed with `size` columns, an array of ``[ranks * chunks]`` has a row for each cell.
    """

    size: int
    lane: Ints
    chunk: NDArray[np.intp]  # the first that each move carries
    src: NDArray[np.intp]  # cells
    dst: NDArray[np.intp]
    adds: NDArray[np.bool_]


def moves(c: Columns, num_chunks: int) -> Moves:
    """The moves of a round; chunks that move together stay together where they can be numbered."""
    size = int(c.count[0]) if len(c) else 1
    together = (
        num_chunks % size == 0 and bool((c.count == size).all()) and not (c.chunk % size).any()
    )
    adds = c.op == ADD
    if together:
        piece, per_rank = c.chunk // size, num_chunks // size
        src, dst = (ranks.astype(np.intp) * per_rank + piece for ranks in (c.src, c.dst))
        return Moves(size, c.lane, c.chunk.astype(np.intp), src, dst, adds)
    row, chunk = c.expanded()
    src, dst = (ranks[row].astype(np.intp) * num_chunks + chunk for ranks in (c.src, c.dst))
    return Moves(1, c.lane[row], chunk, src, dst, adds[row])


def lanes_of(now: Moves) -> list[slice]:
    """The moves of each lane: within one, no two write the same cell."""
    ends = np.flatnonzero(np.diff(now.lane)) + 1
    return [slice(a, b) for a, b in pairwise([0, *ends.tolist(), len(now.lane)])]
