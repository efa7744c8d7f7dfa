"""What devices do in a round besides moving data: launch, slice, add, pack, compute indices.

A `DeviceModel` has the time that others measured to launch a permutation, and a line fitted to the
cycles that the TPU compiler estimates for all other instructions (`scripts/fit_device_model`); the
constants of TPU generations are in `ftmesh.cost.links`.
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
from ftmesh.schedule.transfers import Ints, Transfers, row_key
from ftmesh.topology.topology import Topology
from ftmesh.units import format_time

EXCHANGE_ROUNDS = 4  # at most, in which the two devices of a chip exchange their halves


class RoundLoad(NamedTuple):
    """What a device sends in one round: `chunks` in all, over `lanes` permutations."""

    lanes: int
    chunks: int


@dataclass(frozen=True)
class DeviceModel:
    """What the program of one device costs: `launch` in seconds, all else in cycles.

    A round with `lanes` permutations that together send `num_bytes` out of a device's buffer takes
    ``per_round + lanes * per_lane + num_bytes * per_byte`` cycles, and `launch` seconds: the
    permutations of a round are in flight at once, and so is their launch. The `devices` of a chip
    share its payload: they exchange their halves before the first round and after the last.

    >>> device_model = DeviceModel(6000, 1000, 0.001, packing=0.01, clock=1e9, launch=4e-6)
    >>> round(1e6 * device_model.round_seconds(lanes=2, num_bytes=1_000_000), 3)
    13.0
    """

    per_round: float
    per_lane: float
    per_byte: float
    packing: float  # per byte of the payload, to pack it and to unpack the sum
    clock: float  # cycles per second
    devices: int = 1  # on a chip, 1 or 2
    source: str = "as given"  # where the numbers come from
    launch: float = 0.0  # seconds from one round to the next with nothing to send
    copying: float = 0.0  # per byte of the payload in every round, if not updated in place

    def __post_init__(self) -> None:
        for name in ("per_round", "per_lane", "per_byte", "packing", "launch", "copying"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                unit = "seconds" if name == "launch" else "cycles"
                raise ArgumentError(f"{name} must be 0 {unit} or more, not {value!r}")
        if not (math.isfinite(self.clock) and self.clock > 0):
            raise ArgumentError(f"clock must be above 0 cycles per second, not {self.clock!r}")
        if self.devices not in (1, 2):
            raise ArgumentError(f"a chip has one or two devices, not {self.devices!r}")

    def for_topology(self, topology: Topology) -> DeviceModel:
        """Return this model with the number of devices that share a payload on `topology`."""
        if topology.num_positions > 1:  # every device of a tile has a payload of its own
            return replace(self, devices=1)
        return replace(self, devices=topology.devices_per_chip) if topology.devices else self

    def round_seconds(self, *, lanes: int, num_bytes: float) -> float:
        """Time of a round in which a device sends `num_bytes` in all over `lanes` permutations."""
        cycles = self.per_round + lanes * self.per_lane + num_bytes * self.per_byte
        return self.launch + cycles / self.clock

    def copying_seconds(self, payload_bytes: float) -> float:
        """Time in every round to copy a payload; 0 where rounds update it in place, as on TPUs."""
        return payload_bytes / self.devices * self.copying / self.clock

    def packing_seconds(self, payload_bytes: float) -> float:
        """Time to pack a payload and to unpack its sum."""
        return payload_bytes * self.packing / self.clock

    def setup_seconds(self, payload_bytes: float) -> float:
        """Time before and after all rounds: packing, and the exchange between devices of a chip."""
        packing = self.packing_seconds(payload_bytes)
        if self.devices == 1:
            return packing
        num_bytes = payload_bytes / self.devices / EXCHANGE_ROUNDS
        return packing + 2 * EXCHANGE_ROUNDS * self.round_seconds(lanes=1, num_bytes=num_bytes)

    def lower_bound_seconds(self, payload_bytes: float) -> float:
        """Least time of any all-reduce without rounds and wires: a chip sends each sum once."""
        sending = payload_bytes / self.devices * self.per_byte / self.clock
        return sending + self.setup_seconds(payload_bytes)

    def schedule_seconds(
        self, schedule: Schedule, payload_bytes: float
    ) -> tuple[list[float], float]:
        """Return the device time of a round of each phase, and `setup_seconds`."""
        model = self.for_topology(schedule.topology)
        chunk_bytes = payload_bytes / schedule.num_chunks / model.devices
        copying = model.copying_seconds(payload_bytes)
        rounds = [
            model.round_seconds(lanes=load.lanes, num_bytes=load.chunks * chunk_bytes) + copying
            for load in map(round_load, schedule.phases)
        ]
        return rounds, model.setup_seconds(payload_bytes)

    def __str__(self) -> str:
        costs = [f"{self.per_lane:,.0f} cycles a lane", f"{1e3 * self.per_byte:.3g} a kB"]
        if self.per_round:
            costs.insert(0, f"{self.per_round:,.0f} cycles a round")
        text = f"{', '.join(costs)} besides the wires, at {self.clock / 1e9:.3g} GHz"
        return text + f", and {format_time(self.launch)} to launch a round" * bool(self.launch)


def round_load(phase: Phase) -> RoundLoad:
    """What a device sends in a round of `phase` once that is lowered.

    Every device slices and adds for every lane in every round, even if it has nothing to send.
    """
    if not isinstance(phase.content, Transfers):
        counts = [rule.count for rule in phase.content]
        return RoundLoad(len(counts), sum(counts))
    lanes = chunks = 0
    for count in phase.counts:
        num_lanes = _num_lanes(phase.content.take(phase.content.count == count))
        lanes += num_lanes
        chunks += num_lanes * count
    return RoundLoad(lanes, chunks)


def _num_lanes(transfers: Transfers) -> int:
    """The lanes of transfers of equal size: as labelled, or else the fewest permutations."""
    labelled = row_key(transfers.lane, transfers.src, transfers.dst)
    _, first = np.unique(labelled, return_index=True)
    ends = (transfers.src, transfers.dst)
    if all(_max_count(row_key(transfers.lane[first], end[first])) == 1 for end in ends):
        return len(np.unique(transfers.lane))
    pair = row_key(transfers.src, transfers.dst)
    order = np.lexsort((pair, transfers.round))
    repeat = _repeats(row_key(transfers.round, pair)[order])
    _, first = np.unique(row_key(pair[order], repeat), return_index=True)
    return max(_max_count(end[order][first]) for end in ends)


def _max_count(values: NDArray[np.integer]) -> int:
    return int(np.unique(values, return_counts=True)[1].max())


def _repeats(values: NDArray[np.integer]) -> Ints:
    """For each of the sorted `values`, how many equal ones precede it."""
    index = np.arange(len(values))
    is_new = np.concatenate(([True], values[1:] != values[:-1]))
    return (index - np.maximum.accumulate(np.where(is_new, index, 0))).astype(np.int32)
