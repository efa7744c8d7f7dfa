"""Places: where a rank puts what arrives in a round, as numbers that are read at once.

Where no rank ever receives by all lanes in one round, what arrives is put into fewer places than
there are lanes, each of which takes an instruction. Nothing here knows JAX.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ftmesh.execute.lower import IDLE, Loop
from ftmesh.schedule.columns import Ints


@dataclass(frozen=True, eq=False)
class Numbers:
    """The numbers of a loop: ``base[r] + rows[row[r], round]`` for rank r, or IDLE.

    Those of a round are the chunks that are sent by each lane, and for each place the chunk that is
    received there and by which lanes: that of the place's own number, and those that have no place.
    Of several lanes each has a bit, below the chunk.
    """

    num_lanes: int
    num_places: int
    base: Ints  # [rank, number]
    row: Ints
    rows: Ints  # [row, round * number]

    @staticmethod
    def of(loop: Loop) -> Numbers:
        """Ranks whose numbers differ by a shift share a row."""
        sent = np.stack([lane.send.chunks(loop.num_rounds) for lane in loop.lanes], axis=2)
        received = np.stack([lane.received(loop.num_rounds) for lane in loop.lanes], axis=2)
        if len({(lane.count, lane.op) for lane in loop.lanes}) == 1:
            received = _in_few_places(received, loop.lanes[0].count)
        every = np.concatenate([sent, received], axis=2).astype(np.int32)
        is_idle = every == IDLE
        base = np.where(is_idle, np.iinfo(np.int32).max, every).min(axis=1)
        base = np.where(is_idle.all(axis=1), 0, base)
        shifted = np.where(is_idle, IDLE, every - base[:, None])
        rows, row = np.unique(shifted.reshape(len(every), -1), axis=0, return_inverse=True)
        places = received.shape[2]
        return Numbers(len(loop.lanes), places, base, row.reshape(-1).astype(np.int32), rows)

    @property
    def num_bits(self) -> int:
        """Of lanes, below the chunk."""
        return _num_bits(self.num_lanes, self.num_places)

    def chunks(self) -> tuple[Ints, Ints]:
        """What is sent and what is received, written out in full, ``[rank, round, lane]``."""
        rows = self.rows[self.row].reshape(len(self.row), -1, self.base.shape[1])
        every = np.where(rows == IDLE, IDLE, rows + self.base[:, None])
        sent, places = every[..., : self.num_lanes], every[..., self.num_lanes :]
        if not self.num_bits:
            return sent, places
        received = np.full_like(sent, IDLE)
        for place in range(self.num_places):
            there = places[..., place]
            for bit, lane in enumerate((place, *range(self.num_places, self.num_lanes))):
                comes = (there != IDLE) & (there >> bit & 1 != 0)
                received[..., lane][comes] = there[comes] >> self.num_bits
        return sent, received


def _num_bits(num_lanes: int, num_places: int) -> int:
    return 0 if num_lanes == num_places else num_lanes - num_places + 1


def _in_few_places(received: Ints, count: int) -> Ints:
    """What is received, ``[rank, round, lane]``, in as few places as will do; see `Numbers`.

    Each lane brings `count` chunks.
    """
    num_lanes = received.shape[2]
    for num_places in range(1, num_lanes):
        if (int(received.max()) + 1) << _num_bits(num_lanes, num_places) > 2**31:
            continue  # too many lanes to have a bit each
        found = _in_places(received, count, num_places)
        if found is not None:
            return found
    return received


def _in_places(received: Ints, count: int, num_places: int) -> Ints | None:
    """What is received in so many places, if that will do.

    A lane that has none goes where others bring the same chunk, after them, so that sums are added
    up in the order of lanes; or to a place that nothing comes to.
    """
    num_lanes = received.shape[2]
    chunk = received[..., :num_places].copy()
    mask = (chunk != IDLE).astype(np.int32)
    for lane in range(num_places, num_lanes):
        rank, now = np.nonzero(received[..., lane] != IDLE)
        new, there = received[rank, now, lane], chunk[rank, now]
        is_near = (np.abs(there - new[:, None]) < count) & (there != IDLE)
        fits = np.where(is_near.any(axis=1)[:, None], is_near, there == IDLE)
        place = num_places - 1 - fits[:, ::-1].argmax(axis=1)
        taken = np.take_along_axis(there, place[:, None], axis=1)[:, 0]
        if not (fits.any(axis=1) & ((taken == IDLE) | (taken == new))).all():
            return None
        chunk[rank, now, place] = new
        mask[rank, now, place] |= 1 << (lane - num_places + 1)
    return np.where(chunk == IDLE, IDLE, chunk << _num_bits(num_lanes, num_places) | mask)
