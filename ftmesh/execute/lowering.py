"""Lower: a schedule as a small program of constant permutations and integer tables.

Each phase becomes a `Loop`: the same few permutations in every round, one per `Lane`, and per rank
and round the chunk to send. Where those chunks follow a rule, as along a ring, the rule replaces
the table; otherwise ranks that do the same share a row of it. So a program grows little with the
mesh. A lane whose transfers are not all added, or all copied, has that in its table. Nothing here
knows JAX, or rings: rules and rows are found in the numbers, so that a schedule read from a file
lowers as well as a planned one.

Constant lanes: transfers in as few permutations as will do, the same ones in all rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ftmesh.errors import ScheduleError
from ftmesh.execute.device_schedule import on_devices
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.ring_rule import Circling
from ftmesh.schedule.schedule import Schedule
from ftmesh.schedule.transfers import Columns, Ints, row_key

Permutation = tuple[tuple[int, int], ...]
PPERMUTE, PALLAS = EXECUTORS = ("ppermute", "pallas")
IDLE = -1  # in place of a chunk: the rank sends nothing in this round
MIXED = 2  # in place of an operation: the lane has both, and its table tells them apart


@dataclass(frozen=True, eq=False)
class Table:
    """Numbers written out: rank r has ``base[r] + rows[row[r], round]``, or nothing where IDLE.

    They are the chunks that it sends; on a lane that is MIXED, ``2 * chunk + op``.
    """

    base: Ints
    row: Ints
    rows: Ints

    @staticmethod
    def of(numbers: Ints) -> Table:
        """The table of ``numbers[rank, round]``: ranks that differ by a shift share a row."""
        idle = numbers == IDLE
        base = np.where(idle, np.iinfo(np.int32).max, numbers).min(axis=1)
        base = np.where(idle.all(axis=1), 0, base).astype(np.int32)
        shifted = np.where(idle, IDLE, numbers - base[:, None]).astype(np.int32)
        rows, row = np.unique(shifted, axis=0, return_inverse=True)
        return Table(base, row.reshape(-1).astype(np.int32), rows)

    def chunks(self, num_rounds: int) -> Ints:
        """Written out in full, ``[rank, round]``."""
        return np.stack([self.at(now) for now in range(num_rounds)], axis=1)

    def at(self, now: int) -> Ints:
        """The number of every rank in round `now`, or IDLE."""
        found = self.rows[self.row, now]
        return np.where(found == IDLE, IDLE, found + self.base).astype(np.int32)


@dataclass(frozen=True, eq=False)
class Rule:
    """Chunks computed: rank r sends ``first[r] + (place[r] + step[r] * round) % size * count``.

    It does so in the rounds from ``begin[r]`` until ``end[r]``, and nothing in the others.
    """

    first: Ints
    place: Ints
    step: Ints
    size: int
    count: int
    begin: Ints
    end: Ints

    def chunks(self, num_rounds: int) -> Ints:
        """Written out in full, ``[rank, round]``."""
        return np.stack([self.at(now) for now in range(num_rounds)], axis=1)

    def at(self, now: int) -> Ints:
        """The chunk of every rank in round `now`, or IDLE."""
        turn = (self.place + self.step * now) % self.size
        is_active = (self.begin <= now) & (now < self.end)
        return np.where(is_active, self.first + turn * self.count, IDLE).astype(np.int32)

    def is_always(self, num_rounds: int) -> bool:
        """Whether every rank that sends at all does so in every one of so many rounds."""
        sends = self.begin < self.end
        return bool(((self.begin == 0) & (self.end == num_rounds))[sends].all())


@dataclass(frozen=True, eq=False)
class Lane:
    """One permutation, the same in every round of a loop, and what travels over it.

    A rank receives into the chunk that its source sends, which is added or copied as `op` says, or
    where that is MIXED, as the source's number does.
    """

    permutation: Permutation
    source: Ints  # rank -> the rank it receives from, or -1
    count: int
    op: int
    send: Table | Rule
    is_full: bool  # whether every rank receives something in every round

    def chunks(self, numbers: Ints) -> Ints:
        """The chunks that numbers of the lane stand for; IDLE stays what it is."""
        return numbers >> 1 if self.op == MIXED else numbers

    def ops(self, numbers: Ints) -> Ints:
        """The operations that they stand for."""
        return numbers & 1 if self.op == MIXED else np.full_like(numbers, self.op)

    def received(self, num_rounds: int) -> Ints:
        """What each rank receives, ``[rank, round]``: the number of its source, or IDLE."""
        sent = self.send.chunks(num_rounds)[np.maximum(self.source, 0)]
        return np.where(self.source[:, None] >= 0, sent, IDLE)


@dataclass(frozen=True, eq=False)
class Loop:
    """Rounds that share their permutations.

    Chunks of `split_bytes` or more travel as two streams, one half of each behind the other.
    """

    name: str
    num_rounds: int
    lanes: tuple[Lane, ...]
    split_bytes: float = math.inf


@dataclass(frozen=True, eq=False)
class Program:
    """What an executor runs: loops for the reduce-scatter half, and loops for the rest.

    Ranks count the devices of the mesh axis. The loops of a schedule without halves are all in the
    second part, and nobody owns anything. A program is compared by identity: JAX keeps one compiled
    program for each.
    """

    num_ranks: int
    num_chunks: int
    scatter: tuple[Loop, ...]
    gather: tuple[Loop, ...]
    owner: Ints | None  # chunk -> rank
    depth: int  # the longest chain of additions that a value goes through
    live: Ints  # the ranks that take part; the others of the axis are idle
    names: tuple[str, ...]  # of the ranks, as errors call them
    devices: tuple[Any, ...] = ()  # by rank, where they are known; several each, by position
    unrolled: bool = False  # whether rounds are written out one by one, not as loops
    executor: str = PPERMUTE  # what runs the loops

    @cached_property
    def owned(self) -> Ints:
        """The chunks of each rank in ascending order; `num_chunks` fills up the rows of some."""
        if self.owner is None:
            raise ScheduleError(
                "this schedule is an all-reduce without halves, so nobody owns a chunk: plan with "
                "an algorithm that has a reduce-scatter half, such as 'ring' or 'row_pair'"
            )
        chunks = [np.flatnonzero(self.owner == rank) for rank in range(self.num_ranks)]
        table = np.full((self.num_ranks, max(map(len, chunks))), self.num_chunks, np.int32)
        for rank, mine in enumerate(chunks):
            table[rank, : len(mine)] = mine
        return table

    @property
    def owns_evenly(self) -> bool:
        """Whether every rank owns as many chunks as every other, and some."""
        return (
            self.owner is not None
            and self.owned.size == self.num_chunks
            and self.owned.max() < self.num_chunks
        )

    @property
    def lines(self) -> tuple[tuple[Any, ...], ...]:
        """The devices of each position by rank, where they are known: one line, or several."""
        num_positions = len(self.devices) // self.num_ranks
        return tuple(self.devices[first::num_positions] for first in range(num_positions))

    @property
    def loops(self) -> tuple[Loop, ...]:
        """All of it, in order."""
        return self.scatter + self.gather

    def split(self, split_bytes: Callable[[Loop], float]) -> Program:
        """The same, each loop with the bytes from which its chunks travel as two streams."""

        def split(loops: tuple[Loop, ...]) -> tuple[Loop, ...]:
            return tuple(replace(loop, split_bytes=split_bytes(loop)) for loop in loops)

        return replace(self, scatter=split(self.scatter), gather=split(self.gather))


def lower(schedule: Schedule, *, devices_per_chip: int = 1, with_idle: bool = False) -> Program:
    """The program of a schedule for a mesh axis; see `on_devices` for whose devices it has."""
    topology = schedule.topology
    script = on_devices(schedule, devices_per_chip=devices_per_chip, with_idle=with_idle)
    scatter, gather = (
        tuple(_loop(phase, script.num_ranks) for phase in half)
        for half in (script.scatter, script.gather)
    )
    return Program(
        num_ranks=script.num_ranks,
        num_chunks=script.num_chunks,
        scatter=scatter,
        gather=gather,
        owner=script.owner,
        depth=schedule.depth + devices_per_chip - 1,
        live=script.contributors,
        names=script.names,
        devices=topology.all_devices if with_idle else topology.devices,
    )


def _loop(phase: Phase, num_ranks: int) -> Loop:
    if isinstance(phase.what, Columns):
        lanes = _lanes_of_rows(phase.what, num_ranks, phase.num_rounds)
    else:
        lanes = [_lane_of_rings(each, num_ranks) for each in phase.what]
    return Loop(phase.name, phase.num_rounds, tuple(lanes))


def _lane_of_rings(circling: Circling, num_ranks: int) -> Lane:
    """Rings in lockstep are a rule as they stand."""
    source = np.full(num_ranks, -1, np.int32)
    source[circling.dst] = circling.src
    first, place = np.zeros((2, num_ranks), np.int32)
    first[circling.src] = np.repeat(circling.first_chunk, circling.num_places)
    piece = np.tile(np.arange(circling.num_places, dtype=np.int32), len(circling.rings))
    # Backwards in time, the first round is the last, in which pieces have gone round but once.
    place[circling.src] = piece - (circling.num_rounds - 1 if circling.mirrored else 0)
    end = np.zeros(num_ranks, np.int32)
    end[circling.src] = circling.num_rounds
    return Lane(
        permutation=tuple(zip(circling.src.tolist(), circling.dst.tolist(), strict=True)),
        source=source,
        count=circling.count,
        op=circling.op,
        send=Rule(
            first=first,
            place=place % np.int32(circling.num_places),
            step=np.full(num_ranks, 1 if circling.mirrored else -1, np.int32),
            size=circling.num_places,
            count=circling.count,
            begin=np.zeros(num_ranks, np.int32),
            end=end,
        ),
        is_full=bool((source >= 0).all()),
    )


def _lanes_of_rows(columns: Columns, num_ranks: int, num_rounds: int) -> list[Lane]:
    lanes = []
    for count in np.unique(columns.count):  # transfers of a lane have one size
        alike = columns.take(columns.count == count)
        colour = constant_lanes(alike)
        lanes += [
            _lane(alike.take(colour == lane), num_ranks, num_rounds) for lane in np.unique(colour)
        ]
    return lanes


def _lane(columns: Columns, num_ranks: int, num_rounds: int) -> Lane:
    _, distinct = np.unique(row_key(columns.src, columns.dst), return_index=True)
    src, dst = columns.src[distinct], columns.dst[distinct]
    source = np.full(num_ranks, -1, np.int32)
    source[dst] = src
    ops = np.unique(columns.op).tolist()
    op = ops[0] if len(ops) == 1 else MIXED
    numbers = np.full((num_ranks, num_rounds), IDLE, np.int32)
    numbers[columns.src, columns.round] = (
        2 * columns.chunk + columns.op if op == MIXED else columns.chunk
    )
    count = int(columns.count[0])
    rule = None if op == MIXED else _rule(numbers, count, src)
    return Lane(
        permutation=tuple(zip(src.tolist(), dst.tolist(), strict=True)),
        source=source,
        count=count,
        op=op,
        send=rule or Table.of(numbers),
        is_full=bool((source >= 0).all()) and rule is not None and rule.is_always(num_rounds),
    )


def _rule(chunks: Ints, count: int, senders: Ints) -> Rule | None:
    """The rule behind rows, if it is one of stepping round a circle, or a part of one, of pieces.

    Each row is active in rounds one after another. The circle has a piece more than there are
    rounds, so that one that is active throughout may begin anywhere on it.
    """
    values, num_rounds = chunks[senders], chunks.shape[1]
    active = values != IDLE
    begin, length = active.argmax(axis=1), active.sum(axis=1)
    steps = np.zeros_like(values)  # to what each round sends, from what the one before did
    steps[:, 1:] = np.where(active[:, 1:] & active[:, :-1], np.diff(values, axis=1), 0)
    sign = np.where((steps == count).sum(axis=1) > (steps == -count).sum(axis=1), 1, -1)
    size = num_rounds + 1
    turned = (steps != 0) & (steps != sign[:, None] * count)
    after = np.take_along_axis(values, turned.argmax(axis=1)[:, None], axis=1)[:, 0]
    foremost = np.take_along_axis(values, begin[:, None], axis=1)[:, 0]
    top = np.where(sign < 0, size - 1, 0)  # the piece that comes after a turn
    first, place, step, start, end = np.zeros((5, len(chunks)), np.int32)
    turns = turned.any(axis=1)  # those that do not may as well be at the top in round 0
    first[senders] = np.where(turns, after, foremost - sign * begin * count) - top * count
    place[senders] = ((foremost - first[senders]) // count - sign * begin) % size
    step[senders], start[senders], end[senders] = sign, begin, begin + length
    rule = Rule(first, place, step, size, count, start, end)
    return rule if np.array_equal(rule.chunks(num_rounds)[senders], values) else None


def constant_lanes(columns: Columns) -> Ints:
    """A lane for each transfer, so that a lane is one partial permutation in all rounds together.

    The schedule's own lanes are kept where they have that property. Otherwise the distinct pairs
    of ranks are coloured so that no two of a colour share a source or a destination.
    """
    if _is_permutation(columns.lane, columns.src, columns.dst):
        return columns.lane
    seen: dict[tuple[int, int, int], int] = {}
    repeat = np.empty(len(columns.src), np.int32)  # which of several transfers of a pair in a round
    for i, key in enumerate(zip(columns.round.tolist(), columns.src.tolist(), columns.dst.tolist(),
                                strict=True)):  # fmt: skip
        repeat[i] = seen[key] = seen.get(key, -1) + 1
    edges = list(zip(columns.src.tolist(), columns.dst.tolist(), repeat.tolist(), strict=True))
    colour = _edge_colours(sorted(set(edges)))
    return np.array([colour[edge] for edge in edges], np.int32)


def _is_permutation(lane: Ints, src: Ints, dst: Ints) -> bool:
    _, first = np.unique(row_key(lane, src, dst), return_index=True)
    return all(len(np.unique(row_key(lane[first], end[first]))) == len(first) for end in (src, dst))


def _edge_colours(edges: list[tuple[int, int, int]]) -> dict[tuple[int, int, int], int]:
    """A proper edge colouring of a bipartite multigraph with as few colours as its degree (König).

    An edge takes a colour free at both ends; where there is none, the two colours free at one end
    each are swapped along the path of alternating edges that starts at the destination.
    """
    at_src: dict[int, dict[int, tuple[int, int, int]]] = {}
    at_dst: dict[int, dict[int, tuple[int, int, int]]] = {}
    colour: dict[tuple[int, int, int], int] = {}

    def free(used: dict[int, tuple[int, int, int]]) -> int:
        return next(c for c in range(len(edges)) if c not in used)

    for edge in edges:
        src, dst, _ = edge
        out, into = at_src.setdefault(src, {}), at_dst.setdefault(dst, {})
        a, b = free(out), free(into)
        if a != b:
            path, here, tables, this, other = [], dst, (at_dst, at_src), a, b
            while (step := tables[0].get(here, {}).get(this)) is not None:
                path.append(step)
                here = step[0] if tables[0] is at_dst else step[1]
                tables, this, other = tables[::-1], other, this
            for step in path:
                del at_src[step[0]][colour[step]], at_dst[step[1]][colour[step]]
            for step in path:
                colour[step] = b if colour[step] == a else a
                at_src[step[0]][colour[step]] = at_dst[step[1]][colour[step]] = step
        colour[edge] = a
        out[a] = into[a] = edge
    return colour
