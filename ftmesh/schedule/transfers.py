"""Transfers: transfers side by side, as plain columns of integers.

A *transfer* moves a range of chunks from one rank to another, where it is added (`ADD`) or replaces
what was there (`COPY`).

CellMoves: a round as moves between cells, which is what proofs step through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int32]
ADD, COPY = 0, 1
SPARSE = 8  # keys to a row from which on rows are sorted
COLUMN_NAMES = ("round", "lane", "src", "dst", "chunk", "count", "op")


@dataclass(frozen=True, eq=False)
class Transfers:
    """Transfers: entry i of every column belongs to transfer i."""

    round: Ints
    lane: Ints
    src: Ints
    dst: Ints
    chunk: Ints
    count: Ints
    op: Ints

    def __iter__(self) -> Iterator[Ints]:
        return (getattr(self, name) for name in COLUMN_NAMES)

    def __len__(self) -> int:
        return len(self.src)

    def freeze(self) -> None:
        """Refuse changes from now on."""
        for column in self:
            column.flags.writeable = False

    def replace(self, **columns: Ints) -> Transfers:
        """The same transfers with some columns exchanged."""
        return replace(self, **columns)

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_] | slice) -> Transfers:
        """The transfers at `index`."""
        return Transfers(*(column[index] for column in self))

    def expanded(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """One entry per chunk moved: the transfer it belongs to, and the chunk."""
        if (self.count == 1).all():
            return np.arange(len(self.count)), self.chunk.astype(np.intp)
        row = np.repeat(np.arange(len(self.count)), self.count)
        first = np.cumsum(self.count) - self.count
        return row, self.chunk[row] + np.arange(len(row)) - first[row]

    def shifted(self, *, rounds: int) -> Transfers:
        """The same transfers, `rounds` rounds later."""
        return self.replace(round=self.round + np.int32(rounds))

    def mirrored(self, last: int) -> Transfers:
        """Backwards in time from round `last`: every addition becomes a copy the other way."""
        return self.replace(
            round=np.int32(last) - self.round,
            src=self.dst,
            dst=self.src,
            op=np.full_like(self.op, COPY),
        )


def join(pieces: Iterable[Transfers]) -> Transfers:
    """The transfers of all `pieces` together."""
    return Transfers(*map(np.concatenate, zip(*pieces, strict=True)))


def make_transfers(
    *,
    round: ArrayLike,
    lane: ArrayLike,
    src: ArrayLike,
    dst: ArrayLike,
    chunk: ArrayLike,
    count: ArrayLike = 1,
    op: ArrayLike = ADD,
) -> Transfers:
    """Transfers from values that broadcast against each other."""
    full = np.broadcast_arrays(round, lane, src, dst, chunk, count, op)
    return Transfers(*(np.ascontiguousarray(column, np.int32).ravel() for column in full))


def row_key(*parts: NDArray[np.integer]) -> NDArray[np.int64]:
    """One integer per row, equal for equal rows and sorted as they are; `parts` are the columns."""
    key = parts[0].astype(np.int64)
    for part in parts[1:]:
        key *= int(part.max(initial=0)) + 1
        key += part
    return key


def repeats(*parts: Ints) -> NDArray[np.bool_]:
    """Which rows repeat an earlier one."""
    key = row_key(*parts)
    again = np.zeros(len(key), np.bool_)
    table = _table(key)
    if table is not None and np.count_nonzero(table >= 0) == len(key):
        return again
    order = np.argsort(key, kind="stable")
    again[order[1:]] = key[order[1:]] == key[order[:-1]]
    return again


def sorting(*parts: Ints) -> NDArray[np.intp]:
    """The order in which rows, all different, are sorted."""
    key = row_key(*parts)
    table = _table(key)
    return np.argsort(key) if table is None else table[table >= 0].astype(np.intp)


def _table(key: NDArray[np.int64]) -> NDArray[np.int32] | None:
    """A row that has each key, or -1; None if keys are far apart, and such a table would be large.

    That takes a fraction of the time of sorting.
    """
    size = int(key.max(initial=0)) + 1
    if size > SPARSE * len(key) or key.min(initial=0) < 0:
        return None
    table = np.full(size, -1, np.int32)
    table[key] = np.arange(len(key), dtype=np.int32)
    return table


class CellMoves(NamedTuple):
    """One round over cells: a cell is what a rank holds of `size` chunks that move together.

    Viewed with `size` columns, an array of ``[ranks * chunks]`` has a row for each cell.
    """

    size: int
    lane: Ints
    chunk: NDArray[np.intp]  # the first that each move carries
    src: NDArray[np.intp]  # cells
    dst: NDArray[np.intp]
    adds: NDArray[np.bool_]


def cell_moves(c: Transfers, num_chunks: int) -> CellMoves:
    """The moves of a round; chunks that move together stay together where they can be numbered."""
    size = int(c.count[0]) if len(c) else 1
    together = (
        num_chunks % size == 0 and bool((c.count == size).all()) and not (c.chunk % size).any()
    )
    adds = c.op == ADD
    if together:
        piece, per_rank = c.chunk // size, num_chunks // size
        src, dst = (ranks.astype(np.intp) * per_rank + piece for ranks in (c.src, c.dst))
        return CellMoves(size, c.lane, c.chunk.astype(np.intp), src, dst, adds)
    row, chunk = c.expanded()
    src, dst = (ranks[row].astype(np.intp) * num_chunks + chunk for ranks in (c.src, c.dst))
    return CellMoves(1, c.lane[row], chunk, src, dst, adds[row])


def lane_slices(now: CellMoves) -> list[slice]:
    """The moves of each lane: within one, no two write the same cell."""
    ends = np.flatnonzero(np.diff(now.lane)) + 1
    return [slice(a, b) for a, b in pairwise([0, *ends.tolist(), len(now.lane)])]
