"""DeviceModel: what devices do in a round beside the wires.

Between two permutations a device slices what it sends, adds what it got and finds out what is next.
The TPU compiler estimates the cycles of each of these instructions; a `DeviceModel` sums them up per
generation, as a line that was fitted to such estimates: `ftmesh compile SLICE --fit`, with what is
said in `ftmesh.cost.links`.

>>> device_model = DeviceModel(6000, 1000, 0.001, packing=0.01, clock=1e9)
>>> round(1e6 * device_model.round_seconds(lanes=2, num_bytes=1_000_000), 3)
9.0
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ftmesh.errors import ArgumentError
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import Schedule
from ftmesh.schedule.transfers import ADD, Columns, Ints, row_key
from ftmesh.topology.topology import Topology

EXCHANGES = 4  # rounds in which two devices of a chip give each other their halves, at most
WORTH = 0.05  # of what a round costs: what two streams have to save, for estimates are no more


class Sends(NamedTuple):
    """What a device sends in a round: by so many lanes, so many chunks, at `most` so many by one.

    Where a lane `is_mixed`, some of its chunks are added and others copied.
    """

    lanes: int
    chunks: int
    most: int
    is_mixed: bool = False


@dataclass(frozen=True)
class DeviceModel:
    """What a device's program costs, in cycles.

    A round with so many permutations, or lanes, that take so many bytes out of a device's buffer
    costs ``per_round + lanes * per_lane + bytes * per_byte``; to pack a payload, and to unpack the
    sum, costs `packing` for every byte of it. The `devices` of a chip share its payload: they give
    each other their halves first and last, in some rounds each.

    A chunk may travel as two streams, one half of it behind the other: all that does not go with
    bytes is paid twice, and of what does the compiler puts a share beside the wires, `hidden`, or
    `hidden_mixed` where lanes are mixed.
    """

    per_round: float
    per_lane: float
    per_byte: float
    packing: float
    clock: float  # cycles per second
    devices: int = 1  # on a chip
    hidden: float = 0.0
    hidden_mixed: float = 0.0
    source: str = "as given"

    def __post_init__(self) -> None:
        for name in ("per_round", "per_lane", "per_byte", "packing"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ArgumentError(f"{name} must be 0 cycles or more, not {value!r}")
        for name in ("hidden", "hidden_mixed"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ArgumentError(f"{name} must be a share from 0 to 1, not {value!r}")
        if not (math.isfinite(self.clock) and self.clock > 0):
            raise ArgumentError(f"clock must be above 0 cycles a second, not {self.clock!r}")
        if self.devices not in (1, 2):
            raise ArgumentError(f"a chip has one or two devices, not {self.devices!r}")

    def cycles(self, *, lanes: int, num_bytes: float) -> float:
        """A round in which a device sends `num_bytes` over so many lanes together."""
        return self.per_round + lanes * self.per_lane + num_bytes * self.per_byte

    def round_seconds(self, *, lanes: int, num_bytes: float) -> float:
        """The same, in seconds."""
        return self.cycles(lanes=lanes, num_bytes=num_bytes) / self.clock

    def split_bytes(self, sends: Sends, bandwidth: float) -> float:
        """The bytes of a chunk from which two streams are worth it, over links so fast."""
        alone, per_byte = self.cycles(lanes=sends.lanes, num_bytes=0), sends.chunks * self.per_byte
        saved = self._hidden_per_byte(sends, bandwidth) - WORTH * per_byte
        return (1 + WORTH) * alone / saved if saved > 0 else math.inf

    def exposed_seconds(self, sends: Sends, chunk_bytes: float, bandwidth: float) -> float:
        """What a round adds to the time of its wires, in one stream or two."""
        moved = sends.chunks * chunk_bytes
        cycles = self.cycles(lanes=sends.lanes, num_bytes=moved)
        if chunk_bytes >= self.split_bytes(sends, bandwidth):
            cycles += self.cycles(lanes=sends.lanes, num_bytes=0)
            cycles -= chunk_bytes * self._hidden_per_byte(sends, bandwidth)
        return cycles / self.clock

    def _hidden_per_byte(self, sends: Sends, bandwidth: float) -> float:
        """The cycles that two streams hide, for every byte of a chunk.

        No more than the wires take: there the devices of a chip share a link.
        """
        share = self.hidden_mixed if sends.is_mixed else self.hidden
        wires = sends.most * self.devices * self.clock / bandwidth
        return min(share * sends.chunks * self.per_byte, wires)

    def on(self, topology: Topology) -> DeviceModel:
        """The same, with as many devices to share a payload as the chips of a topology have."""
        if topology.num_positions > 1:  # every device of a tile has a payload of its own
            return replace(self, devices=1)
        return replace(self, devices=topology.devices_per_chip) if topology.devices else self

    def packing_seconds(self, payload_bytes: float) -> float:
        """To pack a payload, and to unpack its sum."""
        return payload_bytes * self.packing / self.clock

    def around_seconds(self, payload_bytes: float) -> float:
        """What comes before all rounds and after them: packing, and the exchange between cores."""
        packing = self.packing_seconds(payload_bytes)
        if self.devices == 1:
            return packing
        part = payload_bytes / self.devices / EXCHANGES
        return packing + 2 * EXCHANGES * self.round_seconds(lanes=1, num_bytes=part)

    def floor_seconds(self, payload_bytes: float) -> float:
        """The least time of any all-reduce, if rounds and wires cost nothing.

        Whatever is done, each chip's part of every sum has to leave it once; as much of what that
        costs as can be is hidden.
        """
        exposed = 1 - max(self.hidden, self.hidden_mixed)
        moved = payload_bytes / self.devices * self.per_byte * exposed / self.clock
        return moved + self.around_seconds(payload_bytes)

    def __str__(self) -> str:
        costs = [f"{self.per_lane:,.0f} cycles a lane", f"{1e3 * self.per_byte:.3g} a kB"]
        if self.per_round:
            costs.insert(0, f"{self.per_round:,.0f} cycles a round")
        return f"{', '.join(costs)} beside the wires, at {self.clock / 1e9:.3g} GHz"


def costs(
    device_model: DeviceModel, schedule: Schedule, payload_bytes: float, bandwidth: float
) -> tuple[list[float], float]:
    """In seconds, what a round of each phase of `schedule` costs a device, and all around them.

    All rounds of a phase are alike to it. What the devices of a chip exchange may be hidden too,
    which is not counted, for nobody says how fast that travels.
    """
    device_model = device_model.on(schedule.topology)
    chunk_bytes = payload_bytes / schedule.num_chunks / device_model.devices
    rounds = [
        device_model.exposed_seconds(sends, chunk_bytes, bandwidth)
        for sends in map(sends_of, schedule.phases)
    ]
    return rounds, device_model.around_seconds(payload_bytes)


def sends_of(phase: Phase) -> Sends:
    """What a device sends in a round of a phase when that is lowered.

    Every device slices and adds for every lane in every round, also where it has nothing to send.
    """
    if not isinstance(phase.what, Columns):
        counts = [circling.count for circling in phase.what]
        return Sends(len(counts), sum(counts), max(counts))
    lanes = chunks = 0
    for count in phase.counts:
        found = _num_lanes(phase.what.take(phase.what.count == count))
        lanes += found
        chunks += found * count
    is_added = phase.what.op == ADD
    is_mixed = bool(is_added.any() and not is_added.all())
    return Sends(lanes, chunks, max(phase.counts), is_mixed)


def _num_lanes(columns: Columns) -> int:
    """The lanes of transfers of one size: their own, or else as few as permutations can be."""
    own = row_key(columns.lane, columns.src, columns.dst)
    _, first = np.unique(own, return_index=True)
    ends = (columns.src, columns.dst)
    if all(_most_often(row_key(columns.lane[first], end[first])) == 1 for end in ends):
        return len(np.unique(columns.lane))
    pair = row_key(columns.src, columns.dst)
    order = np.lexsort((pair, columns.round))
    again = _repeats(row_key(columns.round, pair)[order])
    _, first = np.unique(row_key(pair[order], again), return_index=True)
    return max(_most_often(end[order][first]) for end in ends)


def _most_often(values: NDArray[np.integer]) -> int:
    return int(np.unique(values, return_counts=True)[1].max())


def _repeats(values: NDArray[np.integer]) -> Ints:
    """For each of sorted values, how many like it came before."""
    place = np.arange(len(values))
    is_new = np.concatenate(([True], values[1:] != values[:-1]))
    return (place - np.maximum.accumulate(np.where(is_new, place, 0))).astype(np.int32)
