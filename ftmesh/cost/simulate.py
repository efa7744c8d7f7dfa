"""Simulate: what a schedule costs on the wires of its mesh, without running it.

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
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftmesh.cost.network import DEFAULT, Network, network
from ftmesh.errors import ArgumentError
from ftmesh.mesh.notation import Coord
from ftmesh.mesh.topology import Link
from ftmesh.schedule.columns import Columns, row_key
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import Schedule, SplitSchedule
from ftmesh.units import format_bytes, format_time

MODES = ("synchronous", "dataflow")

Floats = NDArray[np.float64]
Index = NDArray[np.intp]


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
    """The simulated cost of a schedule; times in seconds."""

    schedule: Schedule
    payload_bytes: int
    network: Network
    mode: str
    seconds: float
    phases: tuple[PhaseCost, ...]
    link_bytes: dict[Link, float]
    lost_to_latency: float  # how much sooner it would end without latency and overhead
    lost_to_contention: float  # how much sooner, if no transfer waited for a link

    @property
    def utilisation(self) -> float:
        """The share of what all links could carry in that time."""
        capacity = len(self.schedule.topology.wires.links) * self.network.bandwidth * self.seconds
        return sum(self.link_bytes.values()) / capacity

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
    """What `schedule` costs for `payload_bytes`, on links as `cost.network.network` takes them.

    >>> import ftmesh
    >>> ring = ftmesh.plan(ftmesh.Topology.grid("8x8", failed="2x2@2,2"), "ring").schedule
    >>> round(1e6 * simulate(ring, link="50GB/s", latency="0.5us").seconds)
    2026
    """
    return Simulator(schedule).run(payload_bytes, network(link, latency, overhead), mode)


class Simulator:
    """One schedule, made ready to be priced for many payloads and networks."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._on_chips = schedule.on_chips
        self._link_ids = {link: i for i, link in enumerate(schedule.topology.wires.links)}

    @cached_property
    def _rounds(self) -> list[_Traffic]:
        """The phases, for rounds on idle wires."""
        return [_Traffic(self, phase, alike=True) for phase in self._on_chips.phases]

    @cached_property
    def _transfers(self) -> list[_Traffic]:
        """The phases, for transfers one by one."""
        return [_Traffic(self, phase, alike=False) for phase in self._on_chips.phases]

    def run(
        self, payload_bytes: int = 100_000_000, on: Network = DEFAULT, mode: str = "synchronous"
    ) -> Simulation:
        """The cost for `payload_bytes`, with all that there is to say about it."""
        seconds, spans = self._spans(payload_bytes, on, mode)
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

    def _spans(
        self, payload_bytes: int, on: Network, mode: str, *, queue: bool = True
    ) -> tuple[float, list[tuple[float, float]]]:
        """The end of the last transfer, and the start and end of each phase."""
        if mode not in MODES:
            raise ArgumentError(f"there is no mode {mode!r}: choose from {', '.join(MODES)}")
        if not isinstance(payload_bytes, int) or payload_bytes < 1:
            raise ArgumentError(
                f"payload_bytes must be a positive whole number, not {payload_bytes!r}"
            )
        wires = _Wires(on, len(self._link_ids), queue)
        per_chunk = payload_bytes / self.schedule.num_chunks / on.bandwidth
        if mode == "synchronous":
            spans = _synchronous(self._rounds, wires, per_chunk)
        else:
            spans = _dataflow(self._on_chips, self._transfers, wires, per_chunk)
        return max(end for _, end in spans), spans

    def link_ids(self, src: int, dst: int) -> list[int]:
        """The links of the route between two chips, by rank, numbered."""
        return [self._link_ids[link] for link in pairwise(self._on_chips.routes[src, dst])]


class _Wires:
    """The links: until when each is taken."""

    def __init__(self, on: Network, num_links: int, queue: bool) -> None:
        self.on = on
        self.queue = queue
        self.free = np.zeros(num_links)

    def send(
        self, ready: Floats, busy: Floats, waves: list[tuple[Index | slice, Index]]
    ) -> tuple[Floats, Floats]:
        """When transfers that are `ready` have left their sources, and when they have arrived.

        `busy` is how long each keeps a link; `waves` lists, in order of service, transfers and the
        links they take next, no link twice in a wave.
        """
        head = ready + self.on.overhead
        left = np.zeros_like(head)  # 0 until a transfer has taken its first link
        for who, link in waves:
            start = np.maximum(head[who], self.free[link]) if self.queue else head[who]
            end = start + busy[who]
            self.free[link] = end
            left[who] = np.where(left[who], left[who], end)
            head[who] = start + self.on.latency
        return left, head + busy


class _Traffic:
    """A phase as the wires see it.

    Rounds of rings in lockstep are alike to them: one is looked at, and counts so many `times`.
    """

    def __init__(self, simulator: Simulator, phase: Phase, *, alike: bool) -> None:
        is_rule = alike and not isinstance(phase.what, Columns)
        self.times = phase.num_rounds if is_rule else 1
        self.columns = phase.first_round if is_rule else phase.columns
        self.bounds = np.array([0, len(self.columns)]) if is_rule else phase.bounds
        paths = [simulator.link_ids(*pair) for pair in phase.pairs]
        hops = np.array([len(path) for path in paths])
        self._path = np.full((len(paths), hops.max()), -1)
        for i, path in enumerate(paths):
            self._path[i, : len(path)] = path
        key = row_key(self.columns.src, self.columns.dst)
        self._pair = np.unique(key, return_inverse=True)[1]

    @cached_property
    def waves(self) -> list[list[tuple[Index | slice, Index]]]:
        """For every round, the waves that `_Wires.send` takes."""
        links = self._path[self._pair]
        if links.shape[1] == 1 and not self._shares(links[:, 0]):
            return [[(slice(None), links[a:b, 0])] for a, b in pairwise(self.bounds)]
        waves: list[list[tuple[Index | slice, Index]]] = []
        for a, b in pairwise(self.bounds):
            waves.append([])
            for hop in links[a:b].T:
                left = np.flatnonzero(hop >= 0)
                while len(left):  # the first on each link now, the others in later waves
                    _, first = np.unique(hop[left], return_index=True)
                    waves[-1].append((left[first], hop[left[first]]))
                    left = np.delete(left, first)
        return waves

    def _shares(self, link: Index) -> bool:
        """Whether some link is used twice in a round."""
        key = np.sort(row_key(self.columns.round, link))
        return bool((key[1:] == key[:-1]).any())

    def rounds(self, per_chunk: float) -> Iterator[tuple[slice, Floats, Any]]:
        """For each round: its transfers, how long each keeps a link, and its waves."""
        busy = self.columns.count.astype(np.float64) * per_chunk
        for (a, b), waves in zip(pairwise(self.bounds), self.waves, strict=True):
            if b > a:
                yield slice(a, b), busy[a:b], waves


def _synchronous(
    traffic: list[_Traffic], wires: _Wires, per_chunk: float
) -> list[tuple[float, float]]:
    """Each round on idle wires; phases follow one another."""
    lengths = []
    for phase in traffic:
        ends = []
        for _, busy, waves in phase.rounds(per_chunk):
            wires.free[:] = 0.0
            _, arrived = wires.send(np.zeros_like(busy), busy, waves)
            ends.append(float(arrived.max()))
        lengths.append(phase.times * math.fsum(ends))
    ends = [math.fsum(lengths[:i]) for i in range(len(lengths) + 1)]
    return list(pairwise(ends))


def _dataflow(
    schedule: Schedule, traffic: list[_Traffic], wires: _Wires, per_chunk: float
) -> list[tuple[float, float]]:
    """Each transfer when its data and its links are ready."""
    size = schedule.topology.num_live * schedule.num_chunks
    written = np.zeros(size)  # when each rank's copy of each chunk was last written
    read = np.zeros(size)  # and last read
    spans = []
    for phase in traffic:
        row, chunk = phase.columns.expanded()
        sources = phase.columns.src[row].astype(np.intp) * schedule.num_chunks + chunk
        targets = phase.columns.dst[row].astype(np.intp) * schedule.num_chunks + chunk
        first = np.cumsum(phase.columns.count) - phase.columns.count
        begin, end = math.inf, 0.0
        for rows, busy, waves in phase.rounds(per_chunk):
            starts = first[rows]
            stop = starts[-1] + phase.columns.count[rows][-1]
            source, target = sources[starts[0] : stop], targets[starts[0] : stop]
            starts, owner = starts - starts[0], row[starts[0] : stop] - rows.start
            ready = np.maximum.reduceat(written[source], starts)
            left, arrived = wires.send(ready, busy, waves)
            np.maximum.at(read, source, left[owner])
            landed = np.maximum(arrived[owner], read[target])
            np.maximum.at(written, target, landed)
            begin = min(begin, float(ready.min()))
            end = max(end, float(landed.max()))
        spans.append((begin, end))
    return spans


def _dots(coord: Coord) -> str:
    return ",".join(map(str, coord))
