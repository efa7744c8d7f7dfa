"""Schedule: phases of rounds of transfers, as plain columns of integers.

A *transfer* moves a range of chunks from one rank to another, where it is added (`ADD`) or replaces
what was there (`COPY`). The transfers of a *round* happen together: all reads before all writes.
A *lane* is a set of transfers of one round with distinct sources and distinct destinations, which
is to say one ``ppermute``. A `Phase` checks all of this when it is built, so that an invalid round
cannot exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ftmesh.errors import ScheduleError
from ftmesh.mesh.routing import Route, around
from ftmesh.mesh.topology import Link, Topology
from ftmesh.units import format_bytes

Ints = NDArray[np.int32]
ADD, COPY = 0, 1
COLUMN_NAMES = ("round", "lane", "src", "dst", "chunk", "count", "op")


@dataclass(frozen=True, eq=False)
class Columns:
    """Transfers side by side: entry i of every column belongs to transfer i."""

    round: Ints
    lane: Ints
    src: Ints
    dst: Ints
    chunk: Ints
    count: Ints
    op: Ints

    def __iter__(self) -> Iterator[Ints]:
        return (getattr(self, name) for name in COLUMN_NAMES)

    def replace(self, **columns: Ints) -> Columns:
        """The same transfers with some columns exchanged."""
        return replace(self, **columns)

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_] | slice) -> Columns:
        """The transfers at `index`."""
        return Columns(*(column[index] for column in self))

    def expanded(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """One entry per chunk moved: the transfer it belongs to, and the chunk."""
        if (self.count == 1).all():
            return np.arange(len(self.count)), self.chunk.astype(np.intp)
        row = np.repeat(np.arange(len(self.count)), self.count)
        first = np.cumsum(self.count) - self.count
        return row, self.chunk[row] + np.arange(len(row)) - first[row]

    def shifted(self, *, rounds: int) -> Columns:
        """The same transfers, `rounds` rounds later."""
        return self.replace(round=self.round + np.int32(rounds))


def join(pieces: Iterable[Columns]) -> Columns:
    """The transfers of all `pieces` together."""
    return Columns(*map(np.concatenate, zip(*pieces, strict=True)))


def transfers(
    *,
    round: ArrayLike,
    lane: ArrayLike,
    src: ArrayLike,
    dst: ArrayLike,
    chunk: ArrayLike,
    count: ArrayLike = 1,
    op: ArrayLike = ADD,
) -> Columns:
    """Columns from values that broadcast against each other."""
    full = np.broadcast_arrays(round, lane, src, dst, chunk, count, op)
    return Columns(*(np.ascontiguousarray(column, np.int32).ravel() for column in full))


@dataclass(frozen=True, eq=False)
class Phase:
    """Consecutive rounds with one meaning, numbered from 0 within the phase.

    >>> swap = transfers(round=0, lane=0, src=[0, 1], dst=[1, 0], chunk=[0, 1])
    >>> Phase("swap", swap).num_rounds
    1
    """

    name: str
    columns: Columns

    def __post_init__(self) -> None:
        _check_rounds(self.name, self.columns)
        order = np.lexsort((self.columns.src, self.columns.lane, self.columns.round))
        object.__setattr__(self, "columns", self.columns.take(order))
        for column in self.columns:
            column.flags.writeable = False

    @property
    def num_rounds(self) -> int:
        """Rounds from the first to the last that has a transfer."""
        return int(self.columns.round[-1]) + 1

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """The distinct (source rank, destination rank) pairs, sorted."""
        _, first = np.unique(row_key(self.columns.src, self.columns.dst), return_index=True)
        both = self.columns.take(first)
        return list(zip(both.src.tolist(), both.dst.tolist(), strict=True))

    def mirrored(self, name: str) -> Phase:
        """The phase run backwards in time: every addition becomes a copy the other way.

        Where a phase gathers sums along in-trees, its mirror spreads results along the same trees.
        """
        c = self.columns
        last = self.num_rounds - 1
        return Phase(
            name,
            c.replace(round=last - c.round, src=c.dst, dst=c.src, op=np.full_like(c.op, COPY)),
        )

    @property
    def bounds(self) -> NDArray[np.intp]:
        """Where each round begins among the transfers, and where the last one ends."""
        return np.searchsorted(self.columns.round, np.arange(self.num_rounds + 1))

    def rounds(self) -> Iterator[Columns]:
        """The transfers of each round in turn; a round may be empty."""
        for start, stop in pairwise(self.bounds):
            yield self.columns.take(slice(start, stop))


@dataclass(frozen=True, eq=False)
class Schedule:
    """Phases for one topology: what every planner returns and everything else reads.

    `owner[c]` is the rank that holds chunk c complete after the first `rounds_in_reduce_scatter`
    rounds, or -1 for a schedule without a reduce-scatter half.
    """

    topology: Topology
    algorithm: str
    num_chunks: int
    phases: tuple[Phase, ...]
    owner: Ints
    rounds_in_reduce_scatter: int

    def __post_init__(self) -> None:
        self._check()
        self.owner.flags.writeable = False

    @property
    def num_rounds(self) -> int:
        """Rounds in all phases together."""
        return sum(phase.num_rounds for phase in self.phases)

    @cached_property
    def columns(self) -> Columns:
        """Every transfer, with rounds numbered through from the first phase to the last."""
        parts, start = [], 0
        for phase in self.phases:
            parts.append(phase.columns.shifted(rounds=start))
            start += phase.num_rounds
        return join(parts)

    @cached_property
    def routes(self) -> dict[tuple[int, int], Route]:
        """The route of every pair of ranks that exchanges something, around the damage."""
        coords = self.topology.coords
        pairs = sorted({pair for phase in self.phases for pair in phase.pairs})
        return {(s, d): around(self.topology, coords[s], coords[d]) for s, d in pairs}

    @property
    def is_neighbour_only(self) -> bool:
        """Whether every transfer is a single hop, so that no router decides anything."""
        return all(len(route) == 2 for route in self.routes.values())

    @cached_property
    def depth(self) -> int:
        """The longest chain of additions that a value goes through: each may round it."""
        deep = np.zeros((self.topology.num_live, self.num_chunks), np.int32)
        for now in (now for phase in self.phases for now in phase.rounds()):
            row, chunk = now.expanded()
            read = deep[now.src[row], chunk]
            target = (now.dst[row], chunk)
            adds = now.op[row] == ADD
            deep[target] = np.where(adds, deep[target], read)
            np.maximum.at(deep, tuple(index[adds] for index in target), read[adds])
            np.add.at(deep, tuple(index[adds] for index in target), 1)
        return int(deep.max())

    def link_loads(self, phase: Phase) -> dict[Link, int]:
        """Chunks that cross each directed link during `phase`."""
        pair = phase.columns.src.astype(np.int64) * self.topology.num_live + phase.columns.dst
        pairs, where = np.unique(pair, return_inverse=True)
        chunks = np.bincount(where, weights=phase.columns.count)
        loads: dict[Link, int] = {}
        for key, total in zip(pairs, chunks, strict=True):
            route = self.routes[divmod(int(key), self.topology.num_live)]
            for link in pairwise(route):
                loads[link] = loads.get(link, 0) + int(total)
        return loads

    def describe(self, payload_bytes: int | None = None) -> str:
        """A line per phase; `payload_bytes` turns shares of the payload into bytes."""
        hops = "neighbour-only" if self.is_neighbour_only else "with multi-hop routes"
        lines = [
            f"{self.algorithm} on {self.topology}: {self.topology.num_live} live chips, "
            f"{self.num_rounds} rounds, {self.num_chunks} chunks, {hops}",
            f"  {'phase':<38}{'rounds':>7}{'lanes':>7}{'chunks':>8}  busiest link carries",
        ]
        for phase in self.phases:
            c = phase.columns
            sizes = sorted(set(map(int, np.unique(c.count))))
            chunks = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]}-{sizes[-1]}"
            share = max(self.link_loads(phase).values()) / self.num_chunks
            load = f"{share:.4f} of the payload"
            if payload_bytes is not None:
                load = format_bytes(share * payload_bytes)
            lanes = len(np.unique(c.lane))
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
        c = phase.columns.take(phase.columns.round == index - start)
        lines = [f"round {index} ({phase.name}), {len(c.src)} transfers"]
        for _, lane, src, dst, chunk, count, op in zip(*c, strict=True):
            a, b = self.topology.coords[src], self.topology.coords[dst]
            what = f"chunk {chunk}" if count == 1 else f"chunks {chunk}-{chunk + count - 1}"
            lines.append(f"  lane {lane}: {a} -> {b}  {('add', 'copy')[op]} {what}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.describe()

    def __repr__(self) -> str:
        return f"<Schedule {self.algorithm} on {self.topology}, {self.num_rounds} rounds>"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Schedule)
            and self.topology.without_devices() == other.topology.without_devices()
            and self.algorithm == other.algorithm
            and self.num_chunks == other.num_chunks
            and self.rounds_in_reduce_scatter == other.rounds_in_reduce_scatter
            and np.array_equal(self.owner, other.owner)
            and len(self.phases) == len(other.phases)
            and all(
                mine.name == theirs.name and all(map(np.array_equal, mine.columns, theirs.columns))
                for mine, theirs in zip(self.phases, other.phases, strict=True)
            )
        )

    __hash__ = None  # type: ignore[assignment]

    def _check(self) -> None:
        if not self.phases:
            raise ScheduleError("a schedule needs at least one phase")
        for phase in self.phases:
            c = phase.columns
            ranks, last = (
                max(int(c.src.max()), int(c.dst.max())),
                int((c.chunk.astype(np.int64) + c.count).max()),
            )
            if ranks >= self.topology.num_live:
                raise ScheduleError(
                    f"phase {phase.name!r} names rank {ranks}, but {self.topology} has ranks 0 to "
                    f"{self.topology.num_live - 1}"
                )
            if last > self.num_chunks:
                raise ScheduleError(
                    f"phase {phase.name!r} moves chunk {last - 1} of a schedule of "
                    f"{self.num_chunks} chunks"
                )
        if self.owner.shape != (self.num_chunks,):
            raise ScheduleError(
                f"owner must have an entry for each of {self.num_chunks} chunks; it has shape "
                f"{self.owner.shape}"
            )
        low, high = int(self.owner.min()), int(self.owner.max())
        if low < -1 or high >= self.topology.num_live:
            raise ScheduleError(
                f"owner must give ranks below {self.topology.num_live}, or -1; it has values from "
                f"{low} to {high}"
            )
        if high >= 0 and self.rounds_in_reduce_scatter == 0:
            raise ScheduleError("chunks have owners, but rounds_in_reduce_scatter is 0")
        if not 0 <= self.rounds_in_reduce_scatter <= self.num_rounds:
            raise ScheduleError(
                f"rounds_in_reduce_scatter is {self.rounds_in_reduce_scatter}, but there are "
                f"{self.num_rounds} rounds"
            )


def _check_rounds(name: str, c: Columns) -> None:
    if len(c.round) == 0:
        raise ScheduleError(f"phase {name!r} has no transfers")

    def reject(bad: NDArray[np.bool_], why: str) -> None:
        if bad.any():
            i = int(bad.argmax())
            raise ScheduleError(
                f"phase {name!r}, round {c.round[i]}, lane {c.lane[i]}: rank {c.src[i]} to rank "
                f"{c.dst[i]}, chunk {c.chunk[i]}: {why}"
            )

    reject((c.round < 0) | (c.lane < 0), "rounds and lanes count from 0")
    reject((c.src < 0) | (c.dst < 0), "ranks count from 0")
    reject((c.chunk < 0) | (c.count < 1), "a transfer moves one chunk or more, counted from 0")
    reject((c.op != ADD) & (c.op != COPY), "the operation must be 0 (add) or 1 (copy)")
    reject(c.src == c.dst, "a rank cannot send to itself")
    for ends, verb in ((c.src, "sends"), (c.dst, "receives")):
        reject(_repeats(c.round, c.lane, ends), f"the rank {verb} twice in one lane")
    if (c.op == COPY).any():
        row, chunk = c.expanded()
        key = row_key(c.round[row], c.dst[row], chunk)
        order = np.argsort(key, kind="stable")
        same = key[order][1:] == key[order][:-1]
        copies = c.op[row[order]] == COPY
        clash = np.zeros(len(c.round), np.bool_)
        clash[row[order][1:][same & (copies[1:] | copies[:-1])]] = True
        reject(clash, "another transfer of the round writes the same chunk there")


def row_key(*parts: NDArray[np.integer]) -> NDArray[np.int64]:
    """One integer per row, equal for equal rows and sorted as they are; `parts` are the columns."""
    key = np.zeros(len(parts[0]), np.int64)
    for part in parts:
        key = key * (int(part.max(initial=0)) + 1) + part
    return key


def _repeats(*parts: Ints) -> NDArray[np.bool_]:
    """Which rows repeat an earlier one."""
    key = row_key(*parts)
    order = np.argsort(key, kind="stable")
    repeats = np.zeros(len(key), np.bool_)
    repeats[order[1:]] = key[order][1:] == key[order][:-1]
    return repeats
