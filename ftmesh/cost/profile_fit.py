"""Fit a network to sums that were timed: what launches, lanes, bytes and links cost there.

A timed sum comes with its load, which is counted from the schedule that ran: rounds, lanes, bytes
sent, and its time on the links alone, by the hop times that were measured between neighbours. Where
links cannot be told apart, as on emulated devices, there are no hop times: loads then assume
`REFERENCE`, hops take no time, and the rate of links is fitted too.

All costs are linear in the constants of `Network` and `DeviceModel`, so those are fitted by least
squares of relative errors, none below 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

from ftmesh.algorithms import registry
from ftmesh.cost.device_model import DeviceModel
from ftmesh.cost.executors import kernel_traffic_seconds, native_ring_seconds
from ftmesh.cost.links import NETWORKS, KernelModel, Network, network_for
from ftmesh.cost.simulate import Simulator
from ftmesh.errors import ArgumentError
from ftmesh.schedule.schedule import Schedule
from ftmesh.topology.devices import tpu_generation
from ftmesh.topology.notation import format_failed
from ftmesh.topology.ring_order import ring_order
from ftmesh.units import check_bytes, check_number

EXECUTORS = XLA, PPERMUTE, PALLAS = "xla", "ppermute", "pallas"
MIN_PERMUTATIONS, MIN_NATIVE = 4, 2  # timed sums that a fit needs
MIN_SPAN = 100  # of payloads: less does not tell the time of a byte from that of a launch
MAX_SECONDS = 3600.0  # of a sum
MAX_COUNT = 1e12  # of rounds and lanes
_CLOCK = 1e9  # cycles per second, where the chip's own clock is not known
_HALF = 0.5  # of a ring's hops are waited for, as data come from both sides
_LEAST = 1e-6  # of a rate that is fitted as a multiple of another, and the inverse of the most


@dataclass(frozen=True)
class HopTimes:
    """A link, as permutations between neighbours measure it."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        check_number(self.latency_s, "latency_s", 0, 1)
        check_number(self.bytes_per_s, "bytes_per_s", 1e3, 1e15)


REFERENCE = HopTimes(0.0, 1e9)  # stands for links that cannot be told apart
_FASTEST = 1e12  # bytes per second of such a link


@dataclass(frozen=True)
class SumLoad:
    """What a sum makes devices and links do.

    Attributes:
        rounds, lanes: Rounds of permutations, and permutations of all rounds; 0 for other
            executors.
        sent_bytes: Bytes that a device sends in all rounds.
        copied_bytes: The payload, once for every round; what rounds that do not update it in place
            copy.
        links_s: Seconds on the links alone, by the hop times. For XLA's ring without `hops_s`; for
            a kernel at least the time of its memory.
        hops_s: Seconds that the data of XLA's ring are under way if it waits for every hop.
    """

    rounds: float = 0.0
    lanes: float = 0.0
    sent_bytes: float = 0.0
    copied_bytes: float = 0.0
    links_s: float = 0.0
    hops_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("rounds", "lanes"):
            check_number(getattr(self, name), name, 0, MAX_COUNT)
        for name in ("sent_bytes", "copied_bytes"):
            check_number(getattr(self, name), name, 0, 1e24)
        for name in ("links_s", "hops_s"):
            check_number(getattr(self, name), name, 0, 1e6)

    @staticmethod
    def from_schedule(
        schedule: Schedule, executor: str, payload_bytes: int, hop_times: HopTimes | None
    ) -> SumLoad:
        """Count the load of a sum of `payload_bytes` by `executor`."""
        topology, hop = schedule.topology, hop_times or REFERENCE
        unit = DeviceModel(0, 0, 0, 0, clock=1.0, devices=topology.devices_per_chip)
        memory = network_for(topology).memory_bandwidth
        links = Network(hop.bytes_per_s, hop.latency_s, ring_share=1.0, memory_bandwidth=memory)
        if executor == XLA:
            order, still = ring_order(topology), replace(links, latency=0.0)
            return SumLoad(
                links_s=native_ring_seconds(order, payload_bytes, still),
                hops_s=native_ring_seconds(order, 0, links),
            )
        if executor == PALLAS:
            with_model = replace(links, device_model=unit)
            return SumLoad(links_s=kernel_traffic_seconds(schedule, payload_bytes, with_model))
        return SumLoad(
            rounds=_device_seconds(schedule, payload_bytes, replace(unit, launch=1.0)),
            lanes=_device_seconds(schedule, payload_bytes, replace(unit, per_lane=1.0)),
            sent_bytes=_device_seconds(schedule, payload_bytes, replace(unit, per_byte=1.0)),
            copied_bytes=_device_seconds(schedule, payload_bytes, replace(unit, copying=1.0)),
            links_s=Simulator(schedule).seconds(payload_bytes, links),
        )


def _device_seconds(schedule: Schedule, payload_bytes: int, model: DeviceModel) -> float:
    """The time of all rounds on the devices; with a constant of 1, how often that is paid."""
    seconds, setup = model.schedule_seconds(schedule, payload_bytes)
    phases = zip(schedule.phases, seconds, strict=True)
    return sum(phase.num_rounds * one for phase, one in phases) + setup


@dataclass(frozen=True)
class TimedSum:
    """A sum that was timed: how, on what damage, how long it took, and its load.

    Attributes:
        executor: ``"xla"``, ``"ppermute"`` or ``"pallas"``.
        algorithm: Its name; that of XLA's sum is ``"ring"``.
        failed: The failed chips of the mesh, as blocks: ``"2x2@2,2"``.
        payload_bytes: Bytes of float32 that each rank added.
        median_s, low_s, high_s: The median and the quartiles of one sum, in seconds.
    """

    executor: str
    algorithm: str
    failed: str
    payload_bytes: int
    median_s: float
    low_s: float
    high_s: float
    load: SumLoad

    def __post_init__(self) -> None:
        if self.executor not in EXECUTORS:
            known = ", ".join(EXECUTORS)
            raise ArgumentError(f"executor must be one of {known}, not {self.executor!r:.60}")
        if self.algorithm not in [*registry.ALGORITHMS]:
            known = ", ".join(registry.ALGORITHMS)
            raise ArgumentError(f"algorithm must be one of {known}, not {self.algorithm!r:.60}")
        if not isinstance(self.failed, str):
            raise ArgumentError(f"failed must be blocks of chips, not {self.failed!r:.40}")
        check_bytes(self.payload_bytes)
        for name in ("median_s", "low_s", "high_s"):
            check_number(getattr(self, name), name, 1e-9, MAX_SECONDS)
        if not self.low_s <= self.median_s <= self.high_s:
            quartiles = f"{self.low_s!r}, {self.median_s!r}, {self.high_s!r}"
            raise ArgumentError(f"low_s, median_s and high_s must ascend, not {quartiles}")

    @staticmethod
    def from_schedule(
        schedule: Schedule,
        executor: str,
        payload_bytes: int,
        quartiles: tuple[float, float, float],
        hop_times: HopTimes | None = None,
    ) -> TimedSum:
        """Describe a sum that was timed.

        Args:
            schedule, executor: Those of the plan that ran: for a payload, those of
                ``plan.for_payload(payload_bytes)``.
            quartiles: The low quartile, the median and the high quartile, in seconds.
            hop_times: What the profile will have.
        """
        if schedule.topology.num_positions > 1:
            raise ArgumentError(f"{schedule.topology} has tiles: time the sums of its chips")
        low, median, high = quartiles
        load = SumLoad.from_schedule(schedule, executor, payload_bytes, hop_times)
        failed = format_failed(schedule.topology.failed)
        name = schedule.algorithm
        return TimedSum(executor, name, failed, payload_bytes, median, low, high, load)


def check_enough(timed: Sequence[TimedSum]) -> None:
    """Raise ArgumentError unless `timed` is enough for a fit."""
    payloads = {
        executor: {one.payload_bytes for one in timed if one.executor == executor}
        for executor in (PPERMUTE, XLA)
    }
    counts = {executor: sum(one.executor == executor for one in timed) for executor in payloads}
    if (
        counts[PPERMUTE] < MIN_PERMUTATIONS
        or counts[XLA] < MIN_NATIVE
        or any(max(sizes) < MIN_SPAN * min(sizes) for sizes in payloads.values())
    ):
        raise ArgumentError(
            f"it has {counts[PPERMUTE]} timed sums by permutations and {counts[XLA]} by XLA, and a "
            f"fit needs {MIN_PERMUTATIONS} and {MIN_NATIVE} or more, of payloads of which one is "
            f"{MIN_SPAN} times as large as another"
        )


def fit_network(
    timed: Sequence[TimedSum],
    hop_times: HopTimes | None,
    *,
    device_kind: str,
    devices_per_chip: int,
    kernel_passed: Sequence[str],
    source: str,
) -> Network:
    """Return the network whose costs are closest to the times of `timed`."""
    check_enough(timed)
    known = NETWORKS.get(tpu_generation(device_kind) or "")
    clock = known.device_model.clock if known and known.device_model else _CLOCK
    hop = hop_times or REFERENCE
    has_links = hop_times is not None
    launch, per_lane, per_byte, packing, copying, slowdown = _fit_permutations(timed, has_links)
    bandwidth = hop.bytes_per_s
    if hop_times is None:
        bandwidth = min(bandwidth / slowdown, _FASTEST) if slowdown else _FASTEST
    native_launch, ring_share, native = _fit_native(timed)
    kernel = None
    if kernel_passed and (kernel_fit := _fit_kernel(timed)) and kernel_fit[1]:
        rate = _ratio(hop.bytes_per_s, bandwidth * kernel_fit[1])
        kernel = KernelModel(kernel_fit[0], rate, tuple(kernel_passed))
    model = DeviceModel(
        0.0, per_lane * clock, per_byte * clock, packing * clock, clock=clock,
        devices=devices_per_chip, source=source, launch=launch, copying=copying * clock,
    )  # fmt: skip
    return Network(
        bandwidth, hop.latency_s, 0.0, source, model,
        memory_bandwidth=known.memory_bandwidth if known else None,
        has_kernel=kernel is not None,
        collective_launch=native_launch,
        all_reduce_efficiency=_ratio(hop.bytes_per_s, bandwidth * native) if native else 1.0,
        ring_share=ring_share,
        kernel=kernel,
    )  # fmt: skip


def _ratio(rate: float, other: float) -> float:
    return float(np.clip(rate / other if other else np.inf, _LEAST, 1 / _LEAST))


def _fit_permutations(timed: Sequence[TimedSum], has_hop_times: bool) -> list[float]:
    """Seconds per round, lane, byte sent, packed and copied, and the factor of `links_s`."""
    sums = [one for one in timed if one.executor == PPERMUTE]
    loads = [one.load for one in sums]
    table = [
        [
            load.rounds,
            load.lanes,
            load.sent_bytes,
            one.payload_bytes,
            load.copied_bytes,
            load.links_s,
        ]
        for one, load in zip(sums, loads, strict=True)
    ]
    links = [load.links_s for load in loads]
    if has_hop_times:
        return [*_least_squares([row[:5] for row in table], sums, links), 1.0]
    return _least_squares(table, sums)


def _fit_native(timed: Sequence[TimedSum]) -> tuple[float, float, float]:
    """Seconds to launch XLA's ring, its share of hops, and its time as a multiple of `links_s`.

    Where half of the hops would take longer than a launch and all hops together, fewer count.
    """
    sums = [one for one in timed if one.executor == XLA]
    hops = [_HALF * one.load.hops_s for one in sums]
    launch, links = _least_squares([[1.0, one.load.links_s] for one in sums], sums, hops)
    if launch or not any(hops):
        return launch, _HALF, links
    share, links = _least_squares([[one.load.hops_s, one.load.links_s] for one in sums], sums)
    return 0.0, min(share, 1.0), links


def _fit_kernel(timed: Sequence[TimedSum]) -> tuple[float, float] | None:
    """Seconds to launch a kernel, and its time as a multiple of `links_s`; None if not timed."""
    sums = [one for one in timed if one.executor == PALLAS]
    if not sums:
        return None
    launch, links = _least_squares([[1.0, one.load.links_s] for one in sums], sums)
    return launch, links


def _least_squares(
    table: Sequence[Sequence[float]], sums: Sequence[TimedSum], known: Sequence[float] = ()
) -> list[float]:
    """The best of all fits with some of the columns, and 0 for the others, by relative errors.

    What the sums cannot tell apart goes to the first columns that explain it. `known` seconds are
    part of each sum already.
    """
    seconds = np.array([one.median_s for one in sums])
    columns: NDArray[np.float64] = np.array(table, np.float64) / seconds[:, None]
    wanted = 1.0 - np.array(known or [0.0] * len(seconds)) / seconds
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1.0
    columns = columns / scale
    width = columns.shape[1]
    best, least = np.zeros(width), float(np.square(wanted).sum())
    subsets = (combinations(range(width), size) for size in range(1, width + 1))
    for subset in chain.from_iterable(subsets):
        solution, *_ = np.linalg.lstsq(columns[:, subset], wanted, rcond=None)
        error = float(np.square(columns[:, subset] @ solution - wanted).sum())
        if (solution >= 0).all() and error < least - 1e-9:
            best, least = np.zeros(width), error
            best[list(subset)] = solution
    return [float(constant) for constant in best / scale]


def fitted_seconds(one: TimedSum, network: Network, hop_times: HopTimes | None) -> float:
    """What `network`, fitted with these hop times, says of a sum."""
    load, model = one.load, network.device_model
    links = load.links_s * (hop_times or REFERENCE).bytes_per_s / network.bandwidth
    if one.executor == XLA:
        hops = network.ring_share * load.hops_s
        return network.collective_launch + hops + links / network.all_reduce_efficiency
    if one.executor == PALLAS and network.kernel:
        return network.kernel.launch + links / network.kernel.efficiency
    assert model is not None
    cycles = load.lanes * model.per_lane + load.sent_bytes * model.per_byte
    cycles += load.copied_bytes * model.copying
    packing = model.packing_seconds(one.payload_bytes)
    return load.rounds * model.launch + cycles / model.clock + packing + links
