"""Transfers as columns of integers, one entry per transfer.

A *transfer* moves a range of chunks from one rank to another, where it is added to what is there
(`ADD`) or replaces it (`COPY`). Transfers along rings can stay a rule: a ring of N chips has N - 1
rounds of N transfers, and written out, they grow with the square of the mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int32]
ADD, COPY = 0, 1
COLUMN_NAMES = ("round", "lane", "src", "dst", "chunk", "count", "op")
MAX_KEYS_PER_ROW = 8  # above this, rows are sorted instead of looked up in a table


@dataclass(frozen=True, eq=False)
class Transfers:
    """Columns of equal length: entry i of each belongs to transfer i."""

    round: Ints
    lane: Ints  # of the round; a lane is one ``ppermute``
    src: Ints  # the rank that sends
    dst: Ints
    chunk: Ints  # the first that it moves
    count: Ints  # how many chunks it moves
    op: Ints  # `ADD` or `COPY`

    def __iter__(self) -> Iterator[Ints]:
        return (getattr(self, name) for name in COLUMN_NAMES)

    def __len__(self) -> int:
        return len(self.src)

    def freeze(self) -> None:
        for column in self:
            column.flags.writeable = False

    def replace(self, **columns: Ints) -> Transfers:
        return replace(self, **columns)

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_] | slice) -> Transfers:
        return Transfers(*(column[index] for column in self))

    def expanded(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return, for each chunk moved, the index of its transfer, and the chunk."""
        if (self.count == 1).all():
            return np.arange(len(self.count)), self.chunk.astype(np.intp)
        row = np.repeat(np.arange(len(self.count)), self.count)
        first = np.cumsum(self.count) - self.count
        return row, self.chunk[row] + np.arange(len(row)) - first[row]

    def shifted(self, *, rounds: int) -> Transfers:
        return self.replace(round=self.round + np.int32(rounds))

    def mirrored(self, last: int) -> Transfers:
        """Return them backwards in time from round `last`, each as a copy the other way."""
        copies = np.full_like(self.op, COPY)
        return self.replace(
            round=np.int32(last) - self.round, src=self.dst, dst=self.src, op=copies
        )


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
    """Return transfers from values that broadcast against each other; see `Transfers`."""
    columns = np.broadcast_arrays(round, lane, src, dst, chunk, count, op)
    return Transfers(*(np.ascontiguousarray(column, np.int32).ravel() for column in columns))


def join_transfers(parts: Iterable[Transfers]) -> Transfers:
    return Transfers(*map(np.concatenate, zip(*parts, strict=True)))


@dataclass(frozen=True, eq=False)
class RingRule:
    """Rings of equal length in lockstep: in round s, slot p sends piece p - s, which is added.

    Mirrored rings run backwards in time: results are copied the other way, last addition first.
    """

    rings: Ints  # [j, p] is the rank in slot p of ring j
    first_chunk: Ints  # of each ring, which has as many pieces as slots
    lane: int
    count: int = 1  # chunks in a piece
    mirrored: bool = False

    def __post_init__(self) -> None:
        for values in (self.rings, self.first_chunk):
            values.flags.writeable = False

    @property
    def length(self) -> int:
        """Slots in a ring, which is also the number of pieces."""
        return int(self.rings.shape[1])

    @property
    def num_rounds(self) -> int:
        """Rounds until every piece has visited every slot."""
        return self.length - 1

    @property
    def op(self) -> int:
        return COPY if self.mirrored else ADD

    @cached_property
    def src(self) -> Ints:
        """The ranks that send, the same in every round."""
        return (np.roll(self.rings, -1, axis=1) if self.mirrored else self.rings).ravel()

    @cached_property
    def dst(self) -> Ints:
        return (self.rings if self.mirrored else np.roll(self.rings, -1, axis=1)).ravel()

    @property
    def owned_chunks(self) -> Ints:
        """The first chunk that each slot ends with complete, shaped like `rings`."""
        return self._chunks(1)

    def chunks_in_round(self, index: int) -> Ints:
        """Return the first chunk that each of `src` sends in round `index`."""
        step = self.num_rounds - 1 - index if self.mirrored else index
        return self._chunks(-step).ravel()

    def _chunks(self, offset: int) -> Ints:
        """The first chunk of the piece `offset` after that of each slot."""
        piece = np.arange(offset, offset + self.length) % self.length * self.count
        return (self.first_chunk[:, None] + piece).astype(np.int32)

    def first_round(self) -> Transfers:
        ends = {"src": self.src, "dst": self.dst, "chunk": self.chunks_in_round(0)}
        return make_transfers(round=0, lane=self.lane, **ends, count=self.count, op=self.op)

    def mirror(self) -> RingRule:
        """Return the same rings backwards in time."""
        return replace(self, mirrored=not self.mirrored)


class CellMoves(NamedTuple):
    """One round as moves between cells; a cell is what a rank holds of `size` adjacent chunks.

    An array of ``[ranks * chunks]``, reshaped to `size` columns, has one row per cell.
    """

    size: int
    lane: Ints
    chunk: NDArray[np.intp]  # the first chunk of each move
    src: NDArray[np.intp]  # cells
    dst: NDArray[np.intp]
    adds: NDArray[np.bool_]


def cell_moves(transfers: Transfers, num_chunks: int) -> CellMoves:
    """Return the moves of one round, with cells as large as its transfers allow."""
    size = int(transfers.count[0]) if len(transfers) else 1
    is_aligned = (
        num_chunks % size == 0
        and bool((transfers.count == size).all())
        and not (transfers.chunk % size).any()
    )
    adds = transfers.op == ADD
    ends = transfers.src, transfers.dst
    if is_aligned:
        piece, per_rank = transfers.chunk // size, num_chunks // size
        src, dst = (ranks.astype(np.intp) * per_rank + piece for ranks in ends)
        return CellMoves(size, transfers.lane, transfers.chunk.astype(np.intp), src, dst, adds)
    row, chunk = transfers.expanded()
    src, dst = (ranks[row].astype(np.intp) * num_chunks + chunk for ranks in ends)
    return CellMoves(1, transfers.lane[row], chunk, src, dst, adds[row])


def lane_slices(moves: CellMoves) -> list[slice]:
    """Return the moves of each lane; within a lane, no two write the same cell."""
    ends = np.flatnonzero(np.diff(moves.lane)) + 1
    return [slice(a, b) for a, b in pairwise([0, *ends.tolist(), len(moves.lane)])]


def row_key(*columns: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return one integer per row, equal for equal rows and ordered like them."""
    key = columns[0].astype(np.int64)
    for column in columns[1:]:
        key *= int(column.max(initial=0)) + 1
        key += column
    return key


def repeated_rows(*columns: Ints) -> NDArray[np.bool_]:
    """Return which rows repeat an earlier one."""
    key = row_key(*columns)
    is_repeat = np.zeros(len(key), np.bool_)
    table = _row_of_key(key)
    if table is not None and np.count_nonzero(table >= 0) == len(key):
        return is_repeat
    order = np.argsort(key, kind="stable")
    is_repeat[order[1:]] = key[order[1:]] == key[order[:-1]]
    return is_repeat


def sort_order(*columns: Ints) -> NDArray[np.intp]:
    """Return the indices that sort the rows, which must be distinct."""
    key = row_key(*columns)
    table = _row_of_key(key)
    return np.argsort(key) if table is None else table[table >= 0].astype(np.intp)


def _row_of_key(key: NDArray[np.int64]) -> NDArray[np.int32] | None:
    """A table from key to a row that has it, or -1; faster than sorting. None if too sparse."""
    size = int(key.max(initial=0)) + 1
    if size > MAX_KEYS_PER_ROW * len(key) or key.min(initial=0) < 0:
        return None
    table = np.full(size, -1, np.int32)
    table[key] = np.arange(len(key), dtype=np.int32)
    return table
