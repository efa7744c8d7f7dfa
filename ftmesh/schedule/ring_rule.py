"""Reduce-scatter and all-gather along rings, kept as a rule instead of rows.

A ring of N chips has N - 1 rounds of N transfers. Written out, they grow with the square of the
mesh; the rule is one row of ranks. Rows are made on demand, one round at a time or all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ftmesh.schedule.transfers import ADD, COPY, Ints, Transfers, make_transfers


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
        """`ADD`, or `COPY` if mirrored."""
        return COPY if self.mirrored else ADD

    @cached_property
    def src(self) -> Ints:
        """The ranks that send, the same in every round."""
        return (np.roll(self.rings, -1, axis=1) if self.mirrored else self.rings).ravel()

    @cached_property
    def dst(self) -> Ints:
        """The receiver of each of `src`."""
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
        """Return the transfers of round 0."""
        ends = {"src": self.src, "dst": self.dst, "chunk": self.chunks_in_round(0)}
        return make_transfers(round=0, lane=self.lane, **ends, count=self.count, op=self.op)

    def mirror(self) -> RingRule:
        """Return the same rings backwards in time."""
        return replace(self, mirrored=not self.mirrored)
