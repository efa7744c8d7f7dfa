"""Simulate: what a schedule costs on the wires of its mesh and on its devices, without running it.

A link carries one transfer at a time. It serves rounds in order; within a round, transfers with
fewer hops behind them first, then lower lanes first. A transfer that has to wait is kept at the
chip where it waits, and its head moves on while its tail still follows. Sizes are exact shares of
the payload: what packing pads is not counted, nor what the devices of one chip say to each other.
Where a rank is a tile of chips, each position has a payload, all of them travel at once, and the
wires are those between chips. Two tiles that are w chips long stand side by side with one link for
every w positions, so w transfers share it; from chip to like chip each goes over w links and all
links on the way carry w, so no other assignment of positions would load the busiest less.

Two clocks:

- *synchronous*: every round starts when the one before has ended everywhere. This has closed forms,
  on meshes without damage or wrap links; with a payload of M bytes on N = W x H chips, B the
  bandwidth, and a = overhead + latency,

  - `ring`: 2 (N - 1) (a + M / 2NB), damaged or not;
  - `ring` on T tiles, w the longer side of one: 2 (T - 1) (a + b + (w - 1) max(latency, b)), where
    b = M / 2TB;
  - `two_dim`, where the long side G is a multiple of the short: 2 (G - 1) (2a + M / 2GB + M / 2NB);
  - `row_pair` with rings along x: 2 (2W - 1) (a + M / 4WB) + 2 (H / 2 - 1) (a + M / NB +
    max(latency, M / NB)), since in the second phase two chips of a column share each link and each
    sends two pieces over two hops.

- *dataflow*: a transfer starts as soon as what it reads is there and its links are free, which is
  nearer to what hardware does. What it writes waits for earlier rounds to have read the old value.

Each link serves in the same order under both, and every time is a sum or a maximum of earlier
ones, so dataflow is never slower than synchronous.

A network with an executor (`ftmesh.cost.device_model`) has what devices do beside the wires added. A
round takes its wires' time and then its executor's, less what chunks that travel as two streams
hide of it; that is the same for all rounds of a phase and for all chips. Packing, and what the
cores of a chip exchange, comes on top of all rounds. In dataflow a chip goes through its rounds one
by one, and at its own pace: it sends when its part of the round before is done, and is done with a
round when all that it receives has arrived and the executor's time is over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from ftmesh.cost.device_model import costs
from ftmesh.cost.link_traffic import Traffic, Wires, dataflow, synchronous
from ftmesh.cost.links import DEFAULT, Network, network
from ftmesh.errors import ArgumentError
from ftmesh.schedule.schedule import Schedule, SplitSchedule, check_schedule
from ftmesh.topology.notation import Coord
from ftmesh.topology.topology import Link
from ftmesh.units import check_bytes, format_bytes, format_time

MODES = SYNCHRONOUS, DATAFLOW = "synchronous", "dataflow"


@dataclass(frozen=True)
class PhaseCost:
    """When a phase is under way, and how much of the mesh's capacity it uses meanwhile."""

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

    `wires_seconds` is the same on the wires alone, and all there is where there is no executor;
    `around_seconds` is what that takes for packing and the like, before all rounds and after them.
    """

    schedule: Schedule
    payload_bytes: int
    network: Network
    mode: str
    seconds: float
    wires_seconds: float
    around_seconds: float
    phases: tuple[PhaseCost, ...]
    link_bytes: dict[Link, float]
    lost_to_latency: float  # how much sooner it would end without latency and overhead
    lost_to_contention: float  # how much sooner, if no transfer waited for a link

    @property
    def utilisation(self) -> float:
        """The share of what all links could carry in that time."""
        capacity = len(self.schedule.topology.wires.links) * self.network.bandwidth * self.seconds
        return sum(self.link_bytes.values()) / capacity

    @property
    def executor_line(self) -> str:
        """What the executor costs, in words."""
        around = format_time(self.around_seconds)
        return f"  executor: {self.network.device_model}; {around} around all rounds"

    def busiest_links(self, count: int = 4) -> list[tuple[Link, float]]:
        """The links that carry most, and their bytes."""
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
            lines += [
                self.executor_line,
                f"  on the wires alone: {format_time(self.wires_seconds)}",
            ]
        busiest = ", ".join(f"{_dots(a)} to {_dots(b)}" for (a, b), _ in self.busiest_links())
        return "\n".join([*lines, f"  busiest links: {busiest}"])


def simulate(
    schedule: Schedule,
    *,
    payload_bytes: int = 100_000_000,
    link: Network | float | str = DEFAULT,
    latency: float | str | None = None,
    overhead: float | str | None = None,
    mode: str = "synchronous",
) -> Simulation:
    """What `schedule` costs for `payload_bytes`, on links as `cost.links.network` takes them.

    >>> import ftmesh
    >>> ring = ftmesh.plan(ftmesh.Topology.grid("8x8", failed="2x2@2,2"), "ring").schedule
    >>> round(1e6 * simulate(ring, link="50GB/s", latency="0.5us").seconds)
    2026
    """
    check_schedule(schedule)
    return Simulator(schedule).run(payload_bytes, network(link, latency, overhead), mode)


class Simulator:
    """One schedule, made ready to be priced for many payloads and networks."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._on_chips = schedule.on_chips
        self._link_ids = {link: i for i, link in enumerate(schedule.topology.wires.links)}

    @cached_property
    def _rounds(self) -> list[Traffic]:
        """The phases, for rounds on idle wires."""
        return [Traffic(self.link_ids, phase, alike=True) for phase in self._on_chips.phases]

    @cached_property
    def _transfers(self) -> list[Traffic]:
        """The phases, for transfers one by one."""
        return [Traffic(self.link_ids, phase, alike=False) for phase in self._on_chips.phases]

    def run(
        self, payload_bytes: int = 100_000_000, on: Network = DEFAULT, mode: str = "synchronous"
    ) -> Simulation:
        """The cost for `payload_bytes`, with all that there is to say about it."""
        seconds, spans = self._spans(payload_bytes, on, mode)
        around = self._beside(payload_bytes, on)[1]
        chunk_bytes = payload_bytes / self.schedule.num_chunks
        loads = [
            {link: chunks * chunk_bytes for link, chunks in self.schedule.link_loads(phase).items()}
            for phase in self.schedule.phases
        ]
        capacity = len(self._link_ids) * on.bandwidth
        total: dict[Link, float] = {}
        for load in loads:
            for link, amount in load.items():
                total[link] = total.get(link, 0.0) + amount
        at_once = replace(on, latency=0.0, overhead=0.0)
        return Simulation(
            schedule=self.schedule,
            payload_bytes=payload_bytes,
            network=on,
            mode=mode,
            seconds=seconds,
            wires_seconds=self.seconds(payload_bytes, on.wires, mode)
            if on.device_model
            else seconds,
            around_seconds=around,
            phases=tuple(
                PhaseCost(
                    name=phase.name,
                    rounds=phase.num_rounds,
                    start=start,
                    end=end,
                    utilisation=sum(load.values()) / (capacity * (end - start)),
                    busiest_link_bytes=max(load.values()),
                )
                for phase, load, (start, end) in zip(
                    self.schedule.phases, loads, spans, strict=True
                )
            ),
            link_bytes=total,
            lost_to_latency=seconds - self._spans(payload_bytes, at_once, mode)[0],
            lost_to_contention=seconds - self._spans(payload_bytes, on, mode, queue=False)[0],
        )

    def seconds(
        self, payload_bytes: int = 100_000_000, on: Network = DEFAULT, mode: str = "synchronous"
    ) -> float:
        """The time alone, for `payload_bytes`."""
        return self._spans(payload_bytes, on, mode)[0]

    def half_seconds(
        self, payload_bytes: int = 100_000_000, on: Network = DEFAULT
    ) -> tuple[float, float]:
        """The time until every chunk is at its owner, and from then on; in synchronous rounds.

        Where there are no halves, all of it is the first.
        """
        seconds, spans = self._spans(payload_bytes, on, "synchronous")
        if not isinstance(self.schedule, SplitSchedule):
            return seconds, 0.0
        _, meeting = spans[len(self.schedule.scatter) - 1]
        return meeting, seconds - meeting

    def phase_ends(
        self, payload_bytes: int = 100_000_000, on: Network = DEFAULT
    ) -> tuple[float, list[float]]:
        """The time in all, and when each phase ends; in synchronous rounds.

        What the executor does around all rounds counts in the first alone.
        """
        seconds, spans = self._spans(payload_bytes, on, "synchronous")
        return seconds, [end for _, end in spans]

    def _spans(
        self, payload_bytes: int, on: Network, mode: str, *, queue: bool = True
    ) -> tuple[float, list[tuple[float, float]]]:
        """The end of the last transfer, and the start and end of each phase."""
        if mode not in MODES:
            raise ArgumentError(f"there is no mode {mode!r}: choose from {', '.join(MODES)}")
        payload_bytes = check_bytes(payload_bytes)
        wires = Wires(on, len(self._link_ids), queue)
        per_chunk = payload_bytes / self.schedule.num_chunks / on.bandwidth
        beside, around = self._beside(payload_bytes, on)
        if mode == "synchronous":
            spans = synchronous(self._rounds, wires, per_chunk, beside)
        else:
            spans = dataflow(self._on_chips, self._transfers, wires, per_chunk, beside)
        return max(end for _, end in spans) + around, spans

    def _beside(self, payload_bytes: int, on: Network) -> tuple[list[float] | None, float]:
        """What the executor adds to a round of each phase, and to all of them."""
        if on.device_model is None:
            return None, 0.0
        return costs(on.device_model, self.schedule, payload_bytes, on.bandwidth)

    def link_ids(self, src: int, dst: int) -> list[int]:
        """The links of the route between two chips, by rank, numbered."""
        return [self._link_ids[link] for link in pairwise(self._on_chips.routes[src, dst])]


def _dots(coord: Coord) -> str:
    return ",".join(map(str, coord))
