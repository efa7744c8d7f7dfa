"""Simulate a schedule on the links and devices of its mesh, without running it.

A link carries one transfer at a time. It serves rounds in order; within a round, transfers with
fewer hops behind them first, then lower lanes first. A transfer that has to wait is held at the
chip where it waits, and its head moves on while its tail still follows. Sizes are exact shares of
the payload: padding is not counted, nor is the traffic between the devices of one chip.

If ranks are tiles of chips, each position of a tile has a payload and all of them travel at once
over the links between chips. Neighbouring tiles that are w chips long have one link for every w
positions, so w transfers share it; sent from chip to like chip, each goes over w links and all
links on the way carry w, so no other assignment of positions would load the busiest link less.

There are two clocks:

- *synchronous*: every round starts when the one before has ended everywhere. This has closed forms
  on meshes without damage or wrap links. With a payload of M bytes on N = W x H chips, bandwidth B,
  and a = overhead + latency:

  - `ring`: 2 (N - 1) (a + M / 2NB), damaged or not;
  - `ring` on T tiles, w the longer side of one: 2 (T - 1) (a + b + (w - 1) max(latency, b)), where
    b = M / 2TB;
  - `two_dim`, if the long side G is a multiple of the short: 2 (G - 1) (2a + M / 2GB + M / 2NB);
  - `row_pair` with rings along x: 2 (2W - 1) (a + M / 4WB) + 2 (H / 2 - 1) (a + M / NB +
    max(latency, M / NB)), since in the second phase two chips of a column share each link and each
    sends two pieces over two hops.

- *dataflow*: a transfer starts as soon as the data it reads is there and its links are free, which
  is closer to what hardware does. A write waits until earlier rounds have read the old value.

Each link serves in the same order under both clocks, and every time is a sum or a maximum of
earlier ones, so dataflow is never slower than synchronous.

If the network has a device model (`ftmesh.cost.device_model`), a round takes its time on the wires
and then its time on the devices, which is the same for all rounds of a phase and for all chips;
packing and the exchange between the devices of a chip come on top. In dataflow each chip goes
through its rounds one by one at its own pace: it sends when it has finished the round before, and
finishes a round when all that it receives has arrived and the device time is over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from ftmesh.cost.link_traffic import LinkQueues, PhaseTraffic, run_dataflow, run_synchronous
from ftmesh.cost.links import DEFAULT, Network, parse_network
from ftmesh.cost.wire_precision import partial_sum_scale
from ftmesh.errors import ArgumentError
from ftmesh.schedule.schedule import Schedule, SplitSchedule, check_schedule
from ftmesh.topology.topology import Link
from ftmesh.units import check_bytes, format_bytes, format_time

MODES = SYNCHRONOUS, DATAFLOW = "synchronous", "dataflow"


@dataclass(frozen=True)
class PhaseCost:
    """When a phase runs, and how much of the capacity of the mesh it uses meanwhile."""

    name: str
    rounds: int
    start: float
    end: float
    utilisation: float  # share of what all links could carry from start to end
    busiest_link_bytes: float

    @property
    def seconds(self) -> float:
        """From the first transfer to the end of the last."""
        return self.end - self.start


@dataclass(frozen=True, eq=False)
class Simulation:
    """The simulated cost of a schedule; times in seconds.

    Attributes:
        seconds, wires_seconds: Time of the whole collective, with and without the device model.
        setup_seconds: Device time before and after all rounds, such as packing.
        link_bytes: The bytes that each link carries.
        lost_to_latency: How much sooner it would end without latency and overhead.
        lost_to_contention: How much sooner it would end if no transfer waited for a link.
    """

    schedule: Schedule
    payload_bytes: int
    network: Network
    mode: str
    seconds: float
    wires_seconds: float
    setup_seconds: float
    phases: tuple[PhaseCost, ...]
    link_bytes: dict[Link, float]
    lost_to_latency: float
    lost_to_contention: float

    @property
    def utilisation(self) -> float:
        """The share of what all links could carry in that time."""
        links = self.schedule.topology.physical.links
        capacity = len(links) * self.network.bandwidth * self.seconds
        return sum(self.link_bytes.values()) / capacity

    @property
    def device_model_line(self) -> str:
        """A line of text that says what the devices cost."""
        setup = format_time(self.setup_seconds)
        return f"  devices: {self.network.device_model}; {setup} before and after all rounds"

    def busiest_links(self, count: int = 4) -> list[tuple[Link, float]]:
        """The links that carry most, with their bytes."""
        return sorted(self.link_bytes.items(), key=lambda item: (-item[1], item[0]))[:count]

    def __str__(self) -> str:
        lines = [
            f"{self.schedule.algorithm} on {self.schedule.topology}: "
            f"{format_bytes(self.payload_bytes)} in {format_time(self.seconds)} ({self.mode})",
            f"  {self.network}",
            f"  {'phase':<38}{'rounds':>7}{'time':>10}{'links used':>12}  busiest link carries",
        ]
        lines += [
            f"  {phase.name:<38}{phase.rounds:>7}{format_time(phase.seconds):>10}"
            f"{phase.utilisation:>12.0%}  {format_bytes(phase.busiest_link_bytes)}"
            for phase in self.phases
        ]
        lines.append(
            f"  lost to latency: {format_time(self.lost_to_latency)}; to waiting for links: "
            f"{format_time(self.lost_to_contention)}"
        )
        if self.network.device_model:
            wires = f"  on the wires alone: {format_time(self.wires_seconds)}"
            lines += [self.device_model_line, wires]
        ends = ([",".join(map(str, end)) for end in link] for link, _ in self.busiest_links())
        return "\n".join([*lines, f"  busiest links: {', '.join(map(' to '.join, ends))}"])


def simulate(
    schedule: Schedule,
    *,
    payload_bytes: int = 100_000_000,
    link: Network | float | str = DEFAULT,
    latency: float | str | None = None,
    overhead: float | str | None = None,
    mode: str = SYNCHRONOUS,
) -> Simulation:
    """Simulate `schedule` for a payload.

    Args:
        payload_bytes: Bytes that each chip contributes.
        link: A `Network`, a TPU generation such as ``"v5e"``, or a rate such as ``"50GB/s"``.
        latency, overhead: Seconds per hop, and per transfer at the sender, or text such as
            ``"0.5us"``; by default those of `link`.
        mode: ``"synchronous"`` or ``"dataflow"``.

    >>> import ftmesh
    >>> ring = ftmesh.plan(ftmesh.Topology.grid("8x8", failed="2x2@2,2"), "ring").schedule
    >>> round(1e6 * simulate(ring, link="50GB/s", latency="0.5us").seconds)
    2026
    """
    check_schedule(schedule)
    return Simulator(schedule).run(payload_bytes, parse_network(link, latency, overhead), mode)


class Simulator:
    """Simulates one schedule for many payloads and networks."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._on_chips = schedule.on_chips
        self._link_ids = {link: i for i, link in enumerate(schedule.topology.physical.links)}

    def run(
        self, payload_bytes: int = 100_000_000, network: Network = DEFAULT, mode: str = SYNCHRONOUS
    ) -> Simulation:
        """Simulate a payload, with utilisation, link loads and where time is lost."""
        seconds, spans = self._spans(payload_bytes, network, mode)
        setup = self._device_seconds(payload_bytes, network)[1]
        chunk_bytes = payload_bytes / self.schedule.num_chunks
        capacity = len(self._link_ids) * network.bandwidth
        link_bytes: dict[Link, float] = {}
        phases = []
        for phase, (start, end) in zip(self.schedule.phases, spans, strict=True):
            loads = self.schedule.link_loads(phase).items()
            carried = {link: chunks * chunk_bytes for link, chunks in loads}
            utilisation = sum(carried.values()) / (capacity * (end - start))
            busiest = max(carried.values())
            phases.append(PhaseCost(phase.name, phase.num_rounds, start, end, utilisation, busiest))
            for link, num_bytes in carried.items():
                link_bytes[link] = link_bytes.get(link, 0.0) + num_bytes
        has_model = network.device_model is not None
        wires = self.seconds(payload_bytes, network.wires_only, mode) if has_model else seconds
        no_latency = replace(network, latency=0.0, overhead=0.0)
        return Simulation(
            schedule=self.schedule,
            payload_bytes=payload_bytes,
            network=network,
            mode=mode,
            seconds=seconds,
            wires_seconds=wires,
            setup_seconds=setup,
            phases=tuple(phases),
            link_bytes=link_bytes,
            lost_to_latency=seconds - self._spans(payload_bytes, no_latency, mode)[0],
            lost_to_contention=seconds - self._spans(payload_bytes, network, mode, queue=False)[0],
        )

    def seconds(
        self, payload_bytes: int = 100_000_000, network: Network = DEFAULT, mode: str = SYNCHRONOUS
    ) -> float:
        """The simulated time alone."""
        return self._spans(payload_bytes, network, mode)[0]

    def wire_dtype_seconds(self, payload_bytes: int, network: Network, wire_dtype: str) -> float:
        """The time of a payload in `wire_dtype`, with partial sums in the dtype that they need."""
        scale = partial_sum_scale(self.schedule, wire_dtype)
        if scale == 1:
            return self.seconds(payload_bytes, network)
        reduce_scatter, _ = self.split_seconds(scale * payload_bytes, network)
        _, all_gather = self.split_seconds(payload_bytes, network)
        return reduce_scatter + all_gather

    def split_seconds(self, payload_bytes: int, network: Network = DEFAULT) -> tuple[float, float]:
        """The times of reduce-scatter and all-gather, in synchronous rounds; else all and 0."""
        seconds, spans = self._spans(payload_bytes, network, SYNCHRONOUS)
        if not isinstance(self.schedule, SplitSchedule):
            return seconds, 0.0
        _, reduced = spans[len(self.schedule.reduce_scatter) - 1]
        return reduced, seconds - reduced

    def phase_ends(self, payload_bytes: int, network: Network) -> tuple[float, list[float]]:
        """The time in all, and when each phase ends, without setup; in synchronous rounds."""
        seconds, spans = self._spans(payload_bytes, network, SYNCHRONOUS)
        return seconds, [end for _, end in spans]

    def link_ids(self, src: int, dst: int) -> list[int]:
        """The ids of the links on the route between two chips, which are given by rank."""
        return [self._link_ids[link] for link in pairwise(self._on_chips.routes[src, dst])]

    @cached_property
    def _round_traffic(self) -> list[PhaseTraffic]:
        return [PhaseTraffic(self.link_ids, p, merge_rounds=True) for p in self._on_chips.phases]

    @cached_property
    def _transfer_traffic(self) -> list[PhaseTraffic]:
        return [PhaseTraffic(self.link_ids, p, merge_rounds=False) for p in self._on_chips.phases]

    def _spans(
        self, payload_bytes: int, network: Network, mode: str, *, queue: bool = True
    ) -> tuple[float, list[tuple[float, float]]]:
        """The time in all, and the start and end of each phase."""
        if mode not in MODES:
            raise ArgumentError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        payload_bytes = check_bytes(payload_bytes)
        queues = LinkQueues(network, len(self._link_ids), queue)
        chunk_seconds = payload_bytes / self.schedule.num_chunks / network.bandwidth
        round_seconds, setup = self._device_seconds(payload_bytes, network)
        if mode == SYNCHRONOUS:
            spans = run_synchronous(self._round_traffic, queues, chunk_seconds, round_seconds)
        else:
            spans = run_dataflow(
                self._on_chips, self._transfer_traffic, queues, chunk_seconds, round_seconds
            )
        return max(end for _, end in spans) + setup, spans

    def _device_seconds(
        self, payload_bytes: int, network: Network
    ) -> tuple[list[float] | None, float]:
        if network.device_model is None:
            return None, 0.0
        return network.device_model.schedule_seconds(self.schedule, payload_bytes)
