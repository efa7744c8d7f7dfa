"""RingRule: chunks going round rings, kept as a rule and not as rows.

A ring of N chips has N - 1 rounds of N transfers. Written out they grow with the square of the
mesh; the rule is one row of ranks. Rows are made when somebody asks, a round at a time or all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ftmesh.schedule.transfers import ADD, COPY, Transfers, Ints, make_transfers


@dataclass(frozen=True, eq=False)
class RingRule:
    """Rings of equal length in lockstep: in round s, place p passes on piece p - s, for adding.

    ``rings[j, p]`` is the rank at place p of ring j, which works on the pieces of `count` chunks
    from ``first_chunk[j]`` on, as many as it has places. With `mirrored` it all runs backwards in
    time: results are copied the other way round, the last addition first.
    """

    rings: Ints
    first_chunk: Ints
    lane: int
    count: int = 1
    mirrored: bool = False

    def __post_init__(self) -> None:
        for values in (self.rings, self.first_chunk):
            values.flags.writeable = False

    @property
    def num_places(self) -> int:
        """Places in a ring, and pieces that go round it."""
        return int(self.rings.shape[1])

    @property
    def num_rounds(self) -> int:
        """Rounds until every piece has been at every place."""
        return self.num_places - 1

    @property
    def op(self) -> int:
        """What is done with what arrives."""
        return COPY if self.mirrored else ADD

    @cached_property
    def src(self) -> Ints:
        """The ranks that send, the same in every round."""
        return (self._next if self.mirrored else self.rings).ravel()

    @cached_property
    def dst(self) -> Ints:
        """Whom each sends to."""
        return (self.rings if self.mirrored else self._next).ravel()

    @cached_property
    def _next(self) -> Ints:
        return np.roll(self.rings, -1, axis=1)

    def chunks(self, now: int) -> Ints:
        """The first chunk that each of `src` sends in round `now`."""
        step = self.num_rounds - 1 - now if self.mirrored else now
        place = np.arange(self.num_places, dtype=np.int32)
        piece = (place - step) % self.num_places * self.count
        return (self.first_chunk[:, None] + piece).astype(np.int32).ravel()

    def at(self, now: int) -> Transfers:
        """The transfers of round `now`."""
        return make_transfers(
            round=now,
            lane=self.lane,
            src=self.src,
            dst=self.dst,
            chunk=self.chunks(now),
            count=self.count,
            op=self.op,
        )

    @property
    def ends(self) -> Ints:
        """The first chunk of the piece that each place ends with complete, shaped like `rings`."""
        place = np.arange(1, self.num_places + 1, dtype=np.int32)
        piece = place % self.num_places * self.count
        return (self.first_chunk[:, None] + piece).astype(np.int32)

    def mirror(self) -> RingRule:
        """The same backwards in time."""
        return replace(self, mirrored=not self.mirrored)
