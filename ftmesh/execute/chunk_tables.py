"""Tables of what each rank sends and receives in the rounds of a loop, as ranks read them.

Where no rank ever receives by all lanes in one round, arrivals are written into fewer slots than
there are lanes, since every write takes an instruction. This module needs no JAX.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ftmesh.execute.lowering import IDLE, MIXED, Lane, Loop
from ftmesh.schedule.transfers import Ints


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """The entries of a loop: ``base[r] + rows[row[r], round]`` for rank r, or IDLE.

    A round has one entry per lane, the chunk that is sent, and one per slot: the chunk that is
    received there, and by which lanes. Slot i takes lane i and any of the lanes without a slot; if
    there are such lanes, each has a bit below the chunk.

    If a lane is MIXED, a bit between those and the chunk gives the operation: all that a slot
    receives in a round is added, or all is copied. Ranks have little in common there, so every
    entry has a row of its own, ``rows[row[r, entry], round]``, which receivers share with senders.
    """

    num_lanes: int
    num_slots: int
    base: Ints  # [rank, entry]
    row: Ints  # [rank], or with operations [rank, entry]
    rows: Ints  # [row, round * entry], or with operations [row, round]
    has_ops: bool = False

    @staticmethod
    @lru_cache(maxsize=16)  # a program is traced for every bucket
    def from_loop(loop: Loop) -> ChunkTable:
        """Build the table of a loop. Ranks whose entries differ by a shift share a row."""
        has_ops = any(lane.op == MIXED for lane in loop.lanes)
        lanes, rounds = loop.lanes, loop.num_rounds
        sent = [_with_op(lane, lane.send.entries(rounds), has_ops) for lane in lanes]
        received = np.stack(
            [_with_op(lane, lane.received_entries(rounds), has_ops) for lane in lanes], 2
        )
        if len({(lane.count, has_ops or lane.op) for lane in lanes}) == 1:
            received = _merge_into_slots(received, lanes[0].count, has_ops=has_ops)
        entries = np.concatenate([np.stack(sent, 2), received], axis=2).astype(np.int32)
        is_idle = entries == IDLE
        base = np.where(is_idle, np.iinfo(np.int32).max, entries).min(axis=1)
        base = np.where(is_idle.all(axis=1), 0, base)
        shifted = np.where(is_idle, IDLE, entries - base[:, None])
        if has_ops:
            shifted = shifted.swapaxes(1, 2).reshape(-1, rounds)
        rows, row = np.unique(shifted.reshape(len(shifted), -1), axis=0, return_inverse=True)
        shape: tuple[int, ...] = base.shape if has_ops else (len(base),)
        index = row.reshape(shape).astype(np.int32)
        return ChunkTable(len(lanes), received.shape[2], base, index, rows, has_ops)

    @property
    def num_lane_bits(self) -> int:
        """The lane bits below the chunk in an entry of a slot."""
        return _num_lane_bits(self.num_lanes, self.num_slots)

    def chunk_ids(self) -> tuple[Ints, Ints]:
        """The chunks that are sent and received by each lane, ``[rank, round, lane]``."""
        sent, received = self._entries_by_lane()
        return (sent >> 1, received >> 1) if self.has_ops else (sent, received)

    def ops(self) -> Ints:
        """The operations of what is received, ``[rank, round, lane]``, or IDLE."""
        _, received = self._entries_by_lane()
        return np.where(received == IDLE, IDLE, received & 1)

    def _entries_by_lane(self) -> tuple[Ints, Ints]:
        """What each lane sends and receives, taken out of the slots; with operations."""
        rows = self.rows[self.row]
        if self.has_ops:
            rows = rows.swapaxes(1, 2)
        rows = rows.reshape(len(self.row), -1, self.base.shape[1])
        entries = np.where(rows == IDLE, IDLE, rows + self.base[:, None])
        sent, slots = entries[..., : self.num_lanes], entries[..., self.num_lanes :]
        if not self.num_lane_bits:
            return sent, slots
        received = np.full_like(sent, IDLE)
        for slot in range(self.num_slots):
            entry = slots[..., slot]
            for bit, lane in enumerate((slot, *range(self.num_slots, self.num_lanes))):
                arrives = (entry != IDLE) & (entry >> bit & 1 != 0)
                received[..., lane][arrives] = entry[arrives] >> self.num_lane_bits
        return sent, received


def _num_lane_bits(num_lanes: int, num_slots: int) -> int:
    return 0 if num_lanes == num_slots else num_lanes - num_slots + 1


def _with_op(lane: Lane, entries: Ints, has_ops: bool) -> Ints:
    """Entries of a lane, with its operation in the last bit if `has_ops`."""
    if not has_ops or lane.op == MIXED:
        return entries
    return np.where(entries == IDLE, IDLE, 2 * entries + lane.op)


def _merge_into_slots(received: Ints, count: int, *, has_ops: bool = False) -> Ints:
    """Put ``received[rank, round, lane]`` into as few slots as possible; see `ChunkTable`.

    `count` is the number of chunks per transfer.
    """
    num_lanes = received.shape[2]
    for num_slots in range(1, num_lanes):
        if (int(received.max()) + 1) << _num_lane_bits(num_lanes, num_slots) > 2**31:
            continue  # no room for a bit per lane
        slots = _try_slots(received, count, num_slots, int(has_ops))
        if slots is not None:
            return slots
    return received


def _try_slots(received: Ints, count: int, num_slots: int, op_bits: int) -> Ints | None:
    """Put what is received into `num_slots` slots; None if it does not fit.

    A lane without a slot goes where earlier lanes bring the same chunk, so that sums are added in
    the order of lanes; or else to a slot that is empty in that round.
    """
    num_lanes = received.shape[2]
    chunk = received[..., :num_slots].copy()
    mask = (chunk != IDLE).astype(np.int32)
    for lane in range(num_slots, num_lanes):
        rank, now = np.nonzero(received[..., lane] != IDLE)
        new, taken = received[rank, now, lane], chunk[rank, now]
        distance = np.abs((taken >> op_bits) - (new >> op_bits)[:, None])
        overlaps = (distance < count) & (taken != IDLE)
        fits = np.where(overlaps.any(axis=1)[:, None], overlaps, taken == IDLE)
        slot = num_slots - 1 - fits[:, ::-1].argmax(axis=1)
        current = np.take_along_axis(taken, slot[:, None], axis=1)[:, 0]
        if not (fits.any(axis=1) & ((current == IDLE) | (current == new))).all():
            return None
        chunk[rank, now, slot] = new
        mask[rank, now, slot] |= 1 << (lane - num_slots + 1)
    return np.where(chunk == IDLE, IDLE, chunk << _num_lane_bits(num_lanes, num_slots) | mask)
