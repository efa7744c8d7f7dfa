"""Schedules: the phases of an all-reduce on one topology.

A `Schedule` is an all-reduce. A `SplitSchedule` consists of a reduce-scatter and an all-gather, so
it can be run as either of these too. Both are proved as a `RankSchedule`, and so is a lowered
program, whose ranks are devices, of which some may be idle.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np

from ftmesh.errors import ArgumentError, ScheduleError
from ftmesh.schedule.phase import Phase, PhaseLike, with_starts
from ftmesh.schedule.transfers import ADD, Ints, Transfers, cell_moves, join_transfers, lane_slices
from ftmesh.topology.routing import Route, deadlock_free_routes
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Link, Topology
from ftmesh.units import format_bytes

P = TypeVar("P", bound=PhaseLike, covariant=True)


@dataclass(frozen=True, eq=False)
class Schedule:
    """An all-reduce as phases for one topology: what an algorithm builds.

    Ranks are the live chips (or tiles) of `topology`. The payload is cut into `num_chunks` equal
    parts.
    """

    topology: Topology
    algorithm: str
    num_chunks: int
    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        if not self.phases:
            raise ScheduleError("a schedule needs at least one phase")
        for phase in self.phases:
            rank, last = phase.extent
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
        return sum(phase.num_rounds for phase in self.phases)

    @property
    def num_bytes(self) -> int:
        """Memory of the transfers, not counting phases that are rules."""
        contents = (phase.content for phase in self.phases)
        transfers = (content for content in contents if isinstance(content, Transfers))
        return sum(column.nbytes for columns in transfers for column in columns)

    @cached_property
    def transfers(self) -> Transfers:
        """Every transfer, with rounds numbered through all phases."""
        starts = with_starts(self.phases)
        return join_transfers(phase.transfers.shifted(rounds=start) for start, phase in starts)

    @cached_property
    def on_chips(self) -> Schedule:
        """The schedule of the chips: this one, or if ranks are tiles, that of all positions."""
        tiles = self.topology
        if not isinstance(tiles, TiledTopology):
            return self
        return Schedule(
            topology=tiles.chips,
            algorithm=self.algorithm,
            num_chunks=self.num_chunks * tiles.chips.devices_per_chip,
            phases=tuple(phase_on_chips(phase, tiles, self.num_chunks) for phase in self.phases),
        )

    @cached_property
    def routes(self) -> dict[tuple[int, int], Route]:
        """The route, around failures, of every pair of ranks with a transfer."""
        coords = self.topology.coords
        pairs = sorted({pair for phase in self.phases for pair in phase.pairs})
        routes = deadlock_free_routes(self.topology, ((coords[s], coords[d]) for s, d in pairs))
        return dict(zip(pairs, routes, strict=True))

    @property
    def is_neighbour_only(self) -> bool:
        """Whether every transfer is a single hop, so that routing does not matter."""
        return all(len(route) == 2 for route in self.on_chips.routes.values())

    @cached_property
    def depth(self) -> int:
        """The longest chain of additions that a value goes through; each may round it."""
        return addition_depth(self.phases, self.topology.num_live, self.num_chunks)

    @property
    def owns_evenly(self) -> bool:
        """Whether a reduce-scatter leaves every rank an equal part of the sum."""
        return False

    def link_loads(self, phase: Phase) -> dict[Link, int]:
        """Return the number of chunks that cross each directed link of chips during `phase`."""
        chips, tiles = self.on_chips, self.topology
        if isinstance(tiles, TiledTopology):
            phase = phase_on_chips(phase, tiles, self.num_chunks)
        loads: dict[Link, int] = {}
        for pair, total in phase.traffic.items():
            for link in pairwise(chips.routes[pair]):
                loads[link] = loads.get(link, 0) + total
        return loads

    def describe(self, payload_bytes: int | None = None) -> str:
        """Return a summary, a line per phase, with link loads in bytes if a payload is given."""
        hops = "neighbour-only" if self.is_neighbour_only else "with multi-hop routes"
        lines = [
            f"{self.algorithm} on {self.topology}: {self.topology.num_live} live "
            f"{self.topology.noun}s, {self.num_rounds} rounds, {self.num_chunks} chunks, {hops}",
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
        """Return the transfers of round `index`, counted from the start of the schedule."""
        if not 0 <= index < self.num_rounds:
            raise ScheduleError(
                f"round {index} does not exist: rounds are 0 to {self.num_rounds - 1}"
            )
        start, phase = [item for item in with_starts(self.phases) if item[0] <= index][-1]
        transfers = next(itertools.islice(phase.rounds(), index - start, None))
        lines = [f"round {index} ({phase.name}), {len(transfers)} transfers"]
        for _, lane, src, dst, chunk, count, op in zip(*transfers, strict=True):
            a, b = self.topology.coords[src], self.topology.coords[dst]
            chunks = f"chunk {chunk}" if count == 1 else f"chunks {chunk}-{chunk + count - 1}"
            lines.append(f"  lane {lane}: {a} -> {b}  {('add', 'copy')[op]} {chunks}")
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
    """An all-reduce that consists of a reduce-scatter and an all-gather."""

    owner: Ints  # for each chunk, the rank that holds its sum after the reduce-scatter
    rounds_in_reduce_scatter: int  # a phase must end there

    def __post_init__(self) -> None:
        super().__post_init__()
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
        ends = np.cumsum([phase.num_rounds for phase in self.phases])[:-1].tolist()
        if self.rounds_in_reduce_scatter not in ends:
            raise ScheduleError(
                "the reduce-scatter must end where a phase ends, after "
                f"{' or '.join(map(str, ends)) or 'none'} of {self.num_rounds} rounds, but "
                f"rounds_in_reduce_scatter is {self.rounds_in_reduce_scatter}: split the phase "
                "there, or use a Schedule, which is an all-reduce only"
            )
        self.owner.flags.writeable = False

    @cached_property
    def depth(self) -> int:
        """The longest chain of additions; all of them are in the reduce-scatter."""
        return addition_depth(self.reduce_scatter, self.topology.num_live, self.num_chunks)

    @property
    def owns_evenly(self) -> bool:
        counts = np.bincount(self.owner, minlength=self.topology.num_live)
        return bool((counts == counts[0]).all())

    @property
    def reduce_scatter(self) -> tuple[Phase, ...]:
        return self.phases[: self._num_reduce_scatter_phases]

    @property
    def all_gather(self) -> tuple[Phase, ...]:
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


@dataclass(frozen=True, eq=False)
class RankSchedule(Generic[P]):
    """Phases over ranks, and what they must achieve.

    Every chunk of every rank must end as the sum of what the `contributors` start with. If there is
    a reduce-scatter, that sum is at the chunk's `owner` when it ends.
    """

    num_chunks: int
    phases: tuple[P, ...]
    names: tuple[str, ...]  # of the ranks, in messages
    contributors: Ints
    num_reduce_scatter_phases: int = 0
    owner: Ints | None = None

    @staticmethod
    def from_schedule(schedule: Schedule) -> RankSchedule[Phase]:
        topology = schedule.topology
        names = tuple(f"{topology.noun} {coord}" for coord in topology.coords)
        everyone = np.arange(len(names), dtype=np.int32)
        ranks = RankSchedule(schedule.num_chunks, schedule.phases, names, everyone)
        if not isinstance(schedule, SplitSchedule):
            return ranks
        num_phases = len(schedule.reduce_scatter)
        return replace(ranks, num_reduce_scatter_phases=num_phases, owner=schedule.owner)

    @property
    def num_ranks(self) -> int:
        return len(self.names)

    @property
    def reduce_scatter(self) -> tuple[P, ...]:
        return self.phases[: self.num_reduce_scatter_phases]

    @property
    def all_gather(self) -> tuple[P, ...]:
        """The phases of the all-gather; all phases if there is no reduce-scatter."""
        return self.phases[self.num_reduce_scatter_phases :]

    def rounds_of_chunk(self, chunk: int) -> Iterator[tuple[int, Transfers]]:
        """Yield the rounds that move `chunk`: the index, and the transfers that move it."""
        for start, phase in with_starts(self.phases):
            transfers = phase.transfers_of_chunk(chunk)
            for index in np.unique(transfers.round).tolist():
                yield start + index, transfers.take(transfers.round == index)


AnyRankSchedule = RankSchedule[Any]  # for functions that only read rounds


def check_schedule(value: object) -> None:
    if not isinstance(value, Schedule):
        raise ArgumentError(
            f"expected a Schedule, not a {type(value).__name__}: for a plan, pass plan.schedule"
        )


def phase_on_chips(phase: Phase, tiles: TiledTopology, num_chunks: int) -> Phase:
    """Return a phase over tiles as transfers between chips, for all positions at once.

    Ranks are those of ``tiles.chips``. Each core has `num_chunks` chunks; the second core of a chip
    has the chunks and the lanes after those of the first.
    """
    chips, cores = tiles.chip_ranks, range(tiles.chips.devices_per_chip)
    num_lanes = max(phase.lanes) + 1
    if isinstance(phase.content, Transfers):
        transfers = phase.content
        parts = (
            transfers.replace(
                src=ranks[transfers.src],
                dst=ranks[transfers.dst],
                chunk=transfers.chunk + np.int32(core * num_chunks),
                lane=transfers.lane + np.int32(core * num_lanes),
            )
            for core, ranks in itertools.product(cores, chips)
        )
        return Phase(phase.name, join_transfers(parts))
    rules = (
        replace(
            rule,
            rings=chips[:, rule.rings].reshape(-1, rule.length),
            first_chunk=np.tile(rule.first_chunk + np.int32(core * num_chunks), len(chips)),
            lane=rule.lane + core * num_lanes,
        )
        for core, rule in itertools.product(cores, phase.content)
    )
    return Phase(phase.name, tuple(rules))


def addition_depth(phases: Iterable[Phase], num_ranks: int, num_chunks: int) -> int:
    """Return the longest chain of additions that any value goes through in `phases`."""
    phases = tuple(phases)
    if len(phases) == 1 and _has_independent_rings(phases[0]):
        return phases[0].num_rounds
    is_small = sum(phase.num_rounds * len(phase.lanes) for phase in phases) < 2**16
    depth = np.zeros(num_ranks * num_chunks, np.uint16 if is_small else np.int32)
    for transfers in (transfers for phase in phases for transfers in phase.rounds()):
        moves = cell_moves(transfers, num_chunks)
        cells = depth.reshape(-1, moves.size)
        read = cells[moves.src]
        for lane in lane_slices(moves):
            target, adds = moves.dst[lane], moves.adds[lane]
            summed = np.maximum(cells[target], read[lane]) + 1
            cells[target] = summed if adds.all() else np.where(adds[:, None], summed, read[lane])
    return int(depth.max())


def _has_independent_rings(phase: Phase) -> bool:
    """Whether a phase is rings that add, each to its own chunks: every round adds once."""
    if isinstance(phase.content, Transfers):
        return False
    ranges = sorted(
        (int(first), int(first) + rule.length * rule.count)
        for rule in phase.content
        for first in rule.first_chunk
    )
    is_disjoint = all(end <= start for (_, end), (start, _) in pairwise(ranges))
    return is_disjoint and all(rule.op == ADD for rule in phase.content)
