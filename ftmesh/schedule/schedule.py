"""Schedule: phases for one topology; with halves, where it has them.

A `Schedule` is an all-reduce. A `SplitSchedule` is one that comes in two halves, so that it can be
run as a reduce-scatter or as an all-gather too: those who need halves ask for that type.

On chips: a phase over tiles as what the chips of those tiles do, all positions at once.

Depth: the longest chain of additions, because a 16-bit partial sum is rounded at each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product

import numpy as np

from ftmesh.errors import ArgumentError, ScheduleError
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.ring_rule import RingRule
from ftmesh.schedule.transfers import ADD, Transfers, Ints, join, cell_moves, lane_slices
from ftmesh.topology.routing import Route, together
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Link, Topology
from ftmesh.units import format_bytes


@dataclass(frozen=True, eq=False)
class Schedule:
    """Phases for one topology: what every planner returns and everything else reads."""

    topology: Topology
    algorithm: str
    num_chunks: int
    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        if not self.phases:
            raise ScheduleError("a schedule needs at least one phase")
        for phase in self.phases:
            rank, last = phase.most
            if rank >= self.topology.num_live:
                raise ScheduleError(
                    f"phase {phase.name!r} names rank {rank}, but {self.topology} has ranks 0 to "
                    f"{self.topology.num_live - 1}"
                )
            if last > self.num_chunks:
                raise ScheduleError(
                    f"phase {phase.name!r} moves chunk {last - 1} of a schedule of "
                    f"{self.num_chunks} chunks"
                )

    @property
    def num_rounds(self) -> int:
        """Rounds in all phases together."""
        return sum(phase.num_rounds for phase in self.phases)

    @property
    def num_bytes(self) -> int:
        """What it takes of memory: of its rows, where phases are not rules."""
        rows = (phase.content for phase in self.phases if isinstance(phase.content, Transfers))
        return sum(column.nbytes for columns in rows for column in columns)

    @cached_property
    def transfers(self) -> Transfers:
        """Every transfer, with rounds numbered through from the first phase to the last."""
        parts, start = [], 0
        for phase in self.phases:
            parts.append(phase.transfers.shifted(rounds=start))
            start += phase.num_rounds
        return join(parts)

    @cached_property
    def on_chips(self) -> Schedule:
        """What the chips do, on the links that there are: this, or where a rank is a tile, each
        position's part of it, all at once.
        """
        tiles = self.topology
        if not isinstance(tiles, TiledTopology):
            return self
        return Schedule(
            topology=tiles.chips,
            algorithm=self.algorithm,
            num_chunks=self.num_chunks * tiles.chips.devices_per_chip,
            phases=tuple(on_chips(phase, tiles, self.num_chunks) for phase in self.phases),
        )

    @cached_property
    def routes(self) -> dict[tuple[int, int], Route]:
        """The route of every pair of ranks that exchanges something, around the damage."""
        coords = self.topology.coords
        pairs = sorted({pair for phase in self.phases for pair in phase.pairs})
        found = together(self.topology, ((coords[s], coords[d]) for s, d in pairs))
        return dict(zip(pairs, found, strict=True))

    @property
    def is_neighbour_only(self) -> bool:
        """Whether every transfer is a single hop, so that no router decides anything."""
        return all(len(route) == 2 for route in self.on_chips.routes.values())

    @cached_property
    def depth(self) -> int:
        """The longest chain of additions that a value goes through: each may round it."""
        return addition_depth(self.phases, self.topology.num_live, self.num_chunks)

    def link_loads(self, phase: Phase) -> dict[Link, int]:
        """Chunks that cross each directed link between chips during `phase`."""
        chips, tiles = self.on_chips, self.topology
        if isinstance(tiles, TiledTopology):
            phase = on_chips(phase, tiles, self.num_chunks)
        loads: dict[Link, int] = {}
        for pair, total in phase.traffic.items():
            for link in pairwise(chips.routes[pair]):
                loads[link] = loads.get(link, 0) + total
        return loads

    def describe(self, payload_bytes: int | None = None) -> str:
        """A line per phase; `payload_bytes` turns shares of the payload into bytes."""
        hops = "neighbour-only" if self.is_neighbour_only else "with multi-hop routes"
        lines = [
            f"{self.algorithm} on {self.topology}: {self.topology.num_live} live "
            f"{self.topology.noun}s, "
            f"{self.num_rounds} rounds, {self.num_chunks} chunks, {hops}",
            f"  {'phase':<38}{'rounds':>7}{'lanes':>7}{'chunks':>8}  busiest link carries",
        ]
        for phase in self.phases:
            sizes = phase.counts
            chunks = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]}-{sizes[-1]}"
            share = max(self.link_loads(phase).values()) / self.num_chunks
            load = f"{share:.4f} of the payload"
            if payload_bytes is not None:
                load = format_bytes(share * payload_bytes)
            lanes = len(phase.lanes)
            lines.append(f"  {phase.name:<38}{phase.num_rounds:>7}{lanes:>7}{chunks:>8}  {load}")
        return "\n".join(lines)

    def describe_round(self, index: int) -> str:
        """Every transfer of round `index`, counted from the schedule's start."""
        if not 0 <= index < self.num_rounds:
            raise ScheduleError(
                f"round {index} does not exist: rounds are 0 to {self.num_rounds - 1}"
            )
        start = 0
        for phase in self.phases:
            if index < start + phase.num_rounds:
                break
            start += phase.num_rounds
        c = next(now for at, now in enumerate(phase.rounds()) if at == index - start)
        lines = [f"round {index} ({phase.name}), {len(c.src)} transfers"]
        for _, lane, src, dst, chunk, count, op in zip(*c, strict=True):
            a, b = self.topology.coords[src], self.topology.coords[dst]
            what = f"chunk {chunk}" if count == 1 else f"chunks {chunk}-{chunk + count - 1}"
            lines.append(f"  lane {lane}: {a} -> {b}  {('add', 'copy')[op]} {what}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.describe()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.algorithm} on {self.topology}, {self.num_rounds} rounds>"
        )

    def __eq__(self, other: object) -> bool:
        return (
            type(self) is type(other)
            and isinstance(other, Schedule)
            and self.topology.without_devices() == other.topology.without_devices()
            and self.algorithm == other.algorithm
            and self.num_chunks == other.num_chunks
            and len(self.phases) == len(other.phases)
            and all(map(Phase.is_same, self.phases, other.phases))
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False, repr=False)
class SplitSchedule(Schedule):
    """A reduce-scatter, and an all-gather behind it; the two meet where a phase ends.

    `owner[c]` is the rank that holds chunk c complete after the first `rounds_in_reduce_scatter`
    rounds, and that the rest of the rounds take it from.
    """

    owner: Ints
    rounds_in_reduce_scatter: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_owners()
        ends = np.cumsum([phase.num_rounds for phase in self.phases])[:-1].tolist()
        if self.rounds_in_reduce_scatter not in ends:
            raise ScheduleError(
                f"the halves of a schedule meet where a phase ends, after "
                f"{' or '.join(map(str, ends)) or 'none'} of {self.num_rounds} rounds, and "
                f"rounds_in_reduce_scatter is {self.rounds_in_reduce_scatter}: part the phase "
                "there, or make it a Schedule, which has no halves"
            )
        self.owner.flags.writeable = False

    @cached_property
    def depth(self) -> int:
        """The longest chain of additions: all of them are in the first half."""
        return addition_depth(self.reduce_scatter, self.topology.num_live, self.num_chunks)

    @property
    def reduce_scatter(self) -> tuple[Phase, ...]:
        """The phases of the first half."""
        return self.phases[: self._num_reduce_scatter_phases]

    @property
    def all_gather(self) -> tuple[Phase, ...]:
        """The phases of the second half."""
        return self.phases[self._num_reduce_scatter_phases :]

    @cached_property
    def _num_reduce_scatter_phases(self) -> int:
        ends = np.cumsum([phase.num_rounds for phase in self.phases])
        return int(np.searchsorted(ends, self.rounds_in_reduce_scatter)) + 1

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, SplitSchedule)
            and super().__eq__(other)
            and self.rounds_in_reduce_scatter == other.rounds_in_reduce_scatter
            and np.array_equal(self.owner, other.owner)
        )

    __hash__ = None

    def _check_owners(self) -> None:
        if self.owner.shape != (self.num_chunks,):
            raise ScheduleError(
                f"owner must have an entry for each of {self.num_chunks} chunks; it has shape "
                f"{self.owner.shape}"
            )
        low, high = int(self.owner.min()), int(self.owner.max())
        if low < 0 or high >= self.topology.num_live:
            raise ScheduleError(
                f"owner must give ranks below {self.topology.num_live}; it has values from "
                f"{low} to {high}"
            )


def check_schedule(given: object) -> None:
    """Refuse what is no schedule; mostly it is a plan, which has one."""
    if not isinstance(given, Schedule):
        raise ArgumentError(
            f"this takes a schedule, and not a {type(given).__name__}: of a plan, plan.schedule"
        )


def on_chips(phase: Phase, tiles: TiledTopology, num_chunks: int) -> Phase:
    """The phase as each position runs it: from chip to chip, at the same place in both tiles.

    Chips have the ranks of ``tiles.chips``. Each brings `num_chunks` chunks of its own; the second
    core of a chip comes after the first, in its chunks and in its lanes.
    """
    chips, cores = tiles.chip_ranks, range(tiles.chips.devices_per_chip)
    above = max(phase.lanes) + 1
    if isinstance(phase.content, Transfers):
        rows = phase.content
        each_position = product(cores, chips)
        return Phase(
            phase.name,
            join(
                _rows(rows, ranks, core * num_chunks, core * above) for core, ranks in each_position
            ),
        )
    return Phase(
        phase.name,
        tuple(
            RingRule(
                rings=chips[:, each.rings].reshape(-1, each.num_places),
                first_chunk=np.tile(each.first_chunk + np.int32(core * num_chunks), len(chips)),
                lane=each.lane + core * above,
                count=each.count,
                mirrored=each.mirrored,
            )
            for core in cores
            for each in phase.content
        ),
    )


def _rows(c: Transfers, ranks: Ints, chunk: int, lane: int) -> Transfers:
    return c.replace(
        src=ranks[c.src],
        dst=ranks[c.dst],
        chunk=c.chunk + np.int32(chunk),
        lane=c.lane + np.int32(lane),
    )


def addition_depth(phases: Iterable[Phase], num_ranks: int, num_chunks: int) -> int:
    """The longest chain of additions that any value goes through in `phases`."""
    phases = tuple(phases)
    if len(phases) == 1 and _is_rings_apart(phases[0]):
        return phases[0].num_rounds
    small = sum(phase.num_rounds * len(phase.lanes) for phase in phases) < 2**16
    deep = np.zeros(num_ranks * num_chunks, np.uint16 if small else np.int32)
    for now in (cell_moves(c, num_chunks) for phase in phases for c in phase.rounds()):
        cells = deep.reshape(-1, now.size)
        read = cells[now.src]
        for lane in lane_slices(now):
            target, adds = now.dst[lane], now.adds[lane]
            if adds.all():
                cells[target] = np.maximum(cells[target], read[lane]) + 1
            else:
                summed = np.maximum(cells[target], read[lane]) + 1
                cells[target] = np.where(adds[:, None], summed, read[lane])
    return int(deep.max())


def _is_rings_apart(phase: Phase) -> bool:
    """Whether a phase is rings that sum, each on chunks of its own: every round adds once."""
    if isinstance(phase.content, Transfers):
        return False
    ends = [
        (int(first), int(first) + each.num_places * each.count)
        for each in phase.content
        for first in each.first_chunk
    ]
    apart = all(end <= start for (_, end), (start, _) in pairwise(sorted(ends)))
    return apart and all(each.op == ADD for each in phase.content)
