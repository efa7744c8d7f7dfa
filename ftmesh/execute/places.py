"""Places: where a rank puts what arrives in a round, as numbers that are read at once.

Where no rank ever receives by all lanes in one round, what arrives is put into fewer places than
there are lanes, each of which takes an instruction. Nothing here knows JAX.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ftmesh.execute.lower import IDLE, MIXED, Lane, Loop
from ftmesh.schedule.transfers import Ints


@dataclass(frozen=True, eq=False)
class Numbers:
    """The numbers of a loop: ``base[r] + rows[row[r], round]`` for rank r, or IDLE.

    Those of a round are the chunks that are sent by each lane, and for each place the chunk that is
    received there and by which lanes: that of the place's own number, and those that have no place.
    Of several lanes each has a bit, below the chunk.

    Where operations differ, a bit between those and the chunk tells which it is: what is received
    in one place is all added, or all copied. Ranks have little in common there, and so every number
    has a row to itself, ``rows[row[r, number], round]``: who receives shares that of who sends.
    """

    num_lanes: int
    num_places: int
    base: Ints  # [rank, number]
    row: Ints  # [rank], or with operations [rank, number]
    rows: Ints  # [row, round * number], or with operations [row, round]
    has_ops: bool = False

    @staticmethod
    @lru_cache(maxsize=16)  # a program is traced for every bucket
    def of(loop: Loop) -> Numbers:
        """Ranks whose numbers differ by a shift share a row."""
        has_ops = any(lane.op == MIXED for lane in loop.lanes)
        lanes, rounds = loop.lanes, loop.num_rounds
        sent = [_with_op(lane, lane.send.chunks(rounds), has_ops) for lane in lanes]
        received = np.stack([_with_op(lane, lane.received(rounds), has_ops) for lane in lanes], 2)
        if len({(lane.count, has_ops or lane.op) for lane in lanes}) == 1:
            received = _in_few_places(received, lanes[0].count, has_ops=has_ops)
        every = np.concatenate([np.stack(sent, 2), received], axis=2).astype(np.int32)
        is_idle = every == IDLE
        base = np.where(is_idle, np.iinfo(np.int32).max, every).min(axis=1)
        base = np.where(is_idle.all(axis=1), 0, base)
        shifted = np.where(is_idle, IDLE, every - base[:, None])
        if has_ops:
            shifted = shifted.swapaxes(1, 2).reshape(-1, rounds)
        rows, row = np.unique(shifted.reshape(len(shifted), -1), axis=0, return_inverse=True)
        shape: tuple[int, ...] = base.shape if has_ops else (len(base),)
        at = row.reshape(shape).astype(np.int32)
        return Numbers(len(lanes), received.shape[2], base, at, rows, has_ops)

    @property
    def num_bits(self) -> int:
        """Of lanes, below the chunk."""
        return _num_bits(self.num_lanes, self.num_places)

    def chunks(self) -> tuple[Ints, Ints]:
        """What is sent and what is received, written out in full, ``[rank, round, lane]``."""
        sent, received = self._written_out()
        return (sent >> 1, received >> 1) if self.has_ops else (sent, received)

    def ops(self) -> Ints:
        """The operations of what is received, where they differ, or IDLE."""
        _, received = self._written_out()
        return np.where(received == IDLE, IDLE, received & 1)

    def _written_out(self) -> tuple[Ints, Ints]:
        """What each lane sends and what it brings, out of its place; with operations."""
        rows = self.rows[self.row]
        if self.has_ops:
            rows = rows.swapaxes(1, 2)
        rows = rows.reshape(len(self.row), -1, self.base.shape[1])
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


def _with_op(lane: Lane, numbers: Ints, has_ops: bool) -> Ints:
    """Numbers of a lane, with its operation in the last bit if they are to have one."""
    if not has_ops or lane.op == MIXED:
        return numbers
    return np.where(numbers == IDLE, IDLE, 2 * numbers + lane.op)


def _in_few_places(received: Ints, count: int, *, has_ops: bool = False) -> Ints:
    """What is received, ``[rank, round, lane]``, in as few places as will do; see `Numbers`.

    Each lane brings `count` chunks.
    """
    num_lanes = received.shape[2]
    for num_places in range(1, num_lanes):
        if (int(received.max()) + 1) << _num_bits(num_lanes, num_places) > 2**31:
            continue  # too many lanes to have a bit each
        found = _in_places(received, count, num_places, int(has_ops))
        if found is not None:
            return found
    return received


def _in_places(received: Ints, count: int, num_places: int, op_bits: int) -> Ints | None:
    """What is received in so many places, if that will do; `op_bits` of it are not of the chunk.

    A lane that has none goes where others bring the same chunk, after them, so that sums are added
    up in the order of lanes; or to a place that nothing comes to.
    """
    num_lanes = received.shape[2]
    chunk = received[..., :num_places].copy()
    mask = (chunk != IDLE).astype(np.int32)
    for lane in range(num_places, num_lanes):
        rank, now = np.nonzero(received[..., lane] != IDLE)
        new, there = received[rank, now, lane], chunk[rank, now]
        apart = np.abs((there >> op_bits) - (new >> op_bits)[:, None])
        is_near = (apart < count) & (there != IDLE)
        fits = np.where(is_near.any(axis=1)[:, None], is_near, there == IDLE)
        place = num_places - 1 - fits[:, ::-1].argmax(axis=1)
        taken = np.take_along_axis(there, place[:, None], axis=1)[:, 0]
        if not (fits.any(axis=1) & ((taken == IDLE) | (taken == new))).all():
            return None
        chunk[rank, now, place] = new
        mask[rank, now, place] |= 1 << (lane - num_places + 1)
    return np.where(chunk == IDLE, IDLE, chunk << _num_bits(num_lanes, num_places) | mask)
