"""Lower: a schedule as a small program of constant permutations and integer tables.

Each phase becomes a `Loop`: the same few permutations in every round, one per `Lane`, and per rank
and round the chunk to send. Where those chunks follow a rule, as along a ring, the rule replaces
the table; otherwise ranks that do the same share a row of it. So a program grows little with the
mesh. Nothing here knows JAX, or rings: rules and rows are found in the numbers, so that a schedule
read from a file lowers as well as a planned one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ftmesh.schedule.schedule import (
    ADD,
    COPY,
    Columns,
    Ints,
    Phase,
    Schedule,
    join,
    row_key,
    transfers,
)

Permutation = tuple[tuple[int, int], ...]
IDLE = -1  # in place of a chunk: the rank sends nothing in this round


@dataclass(frozen=True, eq=False)
class Table:
    """Chunks written out: rank r sends ``base[r] + rows[row[r], round]``, or nothing where IDLE."""

    base: Ints
    row: Ints
    rows: Ints

    @staticmethod
    def of(chunks: Ints) -> Table:
        """The table of ``chunks[rank, round]``: ranks that differ by a shift share a row."""
        idle = chunks == IDLE
        base = np.where(idle, np.iinfo(np.int32).max, chunks).min(axis=1)
        base = np.where(idle.all(axis=1), 0, base).astype(np.int32)
        shifted = np.where(idle, IDLE, chunks - base[:, None]).astype(np.int32)
        rows, row = np.unique(shifted, axis=0, return_inverse=True)
        return Table(base, row.reshape(-1).astype(np.int32), rows)

    def chunks(self, num_rounds: int) -> Ints:
        """Written out in full, ``[rank, round]``."""
        full = self.rows[self.row]
        return np.where(full == IDLE, IDLE, full + self.base[:, None]).astype(np.int32)


@dataclass(frozen=True, eq=False)
class Rule:
    """Chunks computed: rank r sends ``first[r] + (place[r] + step * round) % size * count``."""

    first: Ints
    place: Ints
    step: int
    size: int
    count: int

    def chunks(self, num_rounds: int) -> Ints:
        """Written out in full, ``[rank, round]``."""
        turn = self.place[:, None] + self.step * np.arange(num_rounds, dtype=np.int32)
        return np.asarray(self.first[:, None] + turn % self.size * self.count, np.int32)


@dataclass(frozen=True, eq=False)
class Lane:
    """One permutation, the same in every round of a loop, and what travels over it.

    A rank receives into the chunk that its source sends, which is added or copied as `op` says.
    """

    permutation: Permutation
    source: Ints  # rank -> the rank it receives from, or -1
    count: int
    op: int
    send: Table | Rule

    @property
    def is_full(self) -> bool:
        """Whether every rank receives something in every round."""
        return isinstance(self.send, Rule)


@dataclass(frozen=True, eq=False)
class Loop:
    """Rounds that share their permutations."""

    name: str
    num_rounds: int
    lanes: tuple[Lane, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """What an executor runs: loops for the reduce-scatter half, and loops for the rest.

    Ranks count the devices of the mesh axis. A program is compared by identity: JAX keeps one
    compiled program for each.
    """

    num_ranks: int
    num_chunks: int
    scatter: tuple[Loop, ...]
    gather: tuple[Loop, ...]
    owner: Ints  # chunk -> rank, or -1
    depth: int  # the longest chain of additions that a value goes through
    live: Ints  # the ranks that take part; the others of the axis are idle
    devices: tuple[Any, ...] = ()  # by rank, where they are known
    unrolled: bool = False  # whether rounds are written out one by one, not as loops

    @cached_property
    def owned(self) -> Ints:
        """The chunks of each rank in ascending order; `num_chunks` fills up the rows of some."""
        chunks = [np.flatnonzero(self.owner == rank) for rank in range(self.num_ranks)]
        table = np.full((self.num_ranks, max(map(len, chunks))), self.num_chunks, np.int32)
        for rank, mine in enumerate(chunks):
            table[rank, : len(mine)] = mine
        return table

    @property
    def owns_evenly(self) -> bool:
        """Whether every rank owns as many chunks as every other, and some."""
        return self.owned.size == self.num_chunks and self.owned.max() < self.num_chunks

    @property
    def loops(self) -> tuple[Loop, ...]:
        """All of it, in order."""
        return self.scatter + self.gather


def lower(schedule: Schedule, *, devices_per_chip: int = 1, with_idle: bool = False) -> Program:
    """The program of a schedule, for one or two devices on each chip.

    With two devices per chip, device ``2 * rank + core`` is core `core` of chip `rank`: the cores
    of a chip first share out the payload, half each, then each runs the schedule with its half.
    `with_idle` is for an axis that has the devices of failed chips too, every chip in its place
    with x fastest; they stay idle.
    """
    halves = _split(schedule)
    owner = schedule.owner
    num_chunks = schedule.num_chunks
    if devices_per_chip == 2:
        halves, owner = _on_two_cores(schedule, halves)
        num_chunks *= 2
    elif devices_per_chip != 1:
        raise ValueError(f"chips have one or two devices, not {devices_per_chip}")
    topology = schedule.topology
    core = np.arange(devices_per_chip, dtype=np.int32)
    chips = np.arange(topology.num_live, dtype=np.int32)
    if with_idle:
        chips = np.array([topology.place(coord) for coord in topology.coords], np.int32)
    rank = (chips[:, None] * devices_per_chip + core).ravel()
    num_ranks = (topology.num_chips if with_idle else topology.num_live) * devices_per_chip
    scatter, gather = (
        tuple(
            _loop(name, columns.replace(src=rank[columns.src], dst=rank[columns.dst]), num_ranks)
            for name, columns in half
        )
        for half in halves
    )
    placed = np.where(owner >= 0, rank[owner], -1).astype(np.int32)
    devices = topology.all_devices if with_idle else topology.devices
    depth = schedule.depth + devices_per_chip - 1
    return Program(num_ranks, num_chunks, scatter, gather, placed, depth, rank, devices)


Half = list[tuple[str, Columns]]


def _split(schedule: Schedule) -> tuple[Half, Half]:
    """The phases before and after the reduce-scatter half is complete."""
    scatter: Half = []
    gather: Half = []
    start = 0
    for phase in schedule.phases:
        half = scatter if start < schedule.rounds_in_reduce_scatter else gather
        half.append((phase.name, phase.columns))
        start += phase.num_rounds
    return scatter, gather


def _on_two_cores(schedule: Schedule, halves: tuple[Half, Half]) -> tuple[tuple[Half, Half], Ints]:
    """Both cores of every chip at the schedule, each with its half of the payload."""
    chunks = schedule.num_chunks
    chips = np.arange(schedule.topology.num_live, dtype=np.int32)

    def both(columns: Columns) -> Columns:
        return join(
            columns.replace(
                src=2 * columns.src + core,
                dst=2 * columns.dst + core,
                chunk=columns.chunk + np.int32(core * chunks),
            )
            for core in (0, 1)
        )

    def exchange(op: int) -> Columns:
        """Each core gives its partner the partner's half, or afterwards its own."""
        given = [chunks, 0] if op == ADD else [0, chunks]
        return join(
            transfers(
                round=0,
                lane=0,
                src=2 * chips + core,
                dst=2 * chips + 1 - core,
                chunk=given[core],
                count=chunks,
                op=op,
            )
            for core in (0, 1)
        )

    scatter = [(name, both(columns)) for name, columns in halves[0]]
    gather = [(name, both(columns)) for name, columns in halves[1]]
    owner = np.concatenate([2 * schedule.owner, 2 * schedule.owner + 1]).astype(np.int32)
    owner[np.tile(schedule.owner < 0, 2)] = -1
    scatter.insert(0, ("between cores, reduce-scatter", exchange(ADD)))
    gather.append(("between cores, all-gather", exchange(COPY)))
    return (scatter, gather), owner


def _loop(name: str, columns: Columns, num_ranks: int) -> Loop:
    num_rounds = int(columns.round.max()) + 1
    kind = 2 * columns.count + columns.op  # transfers of a lane have one size and one operation
    lanes = []
    for this in np.unique(kind):
        alike = columns.take(kind == this)
        colour = _constant_lanes(alike)
        lanes += [
            _lane(alike.take(colour == lane), num_ranks, num_rounds) for lane in np.unique(colour)
        ]
    return Loop(name, num_rounds, tuple(lanes))


def _constant_lanes(columns: Columns) -> Ints:
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


def _lane(columns: Columns, num_ranks: int, num_rounds: int) -> Lane:
    _, distinct = np.unique(row_key(columns.src, columns.dst), return_index=True)
    src, dst = columns.src[distinct], columns.dst[distinct]
    source = np.full(num_ranks, -1, np.int32)
    source[dst] = src
    chunks = np.full((num_ranks, num_rounds), IDLE, np.int32)
    chunks[columns.src, columns.round] = columns.chunk
    count = int(columns.count[0])
    rule = _rule(chunks, count) if (chunks != IDLE).all() and (source >= 0).all() else None
    return Lane(
        permutation=tuple(zip(src.tolist(), dst.tolist(), strict=True)),
        source=source,
        count=count,
        op=int(columns.op[0]),
        send=rule or Table.of(chunks),
    )


def _rule(values: Ints, count: int) -> Rule | None:
    """The rule behind a table without gaps, if it is one of stepping round a circle of pieces."""
    num_rounds = values.shape[1]
    if num_rounds < 3:
        return None
    steps = np.diff(values, axis=1)
    step = 1 if (steps == count).sum() > (steps == -count).sum() else -1
    size = num_rounds + 1
    turned = steps != step * count
    after = np.take_along_axis(values, np.argmax(turned, axis=1)[:, None] + 1, axis=1)[:, 0]
    last_piece = (size - 1) * count
    first = np.where(
        turned.any(axis=1),
        after if step > 0 else after - last_piece,
        values[:, 0] if step > 0 else values[:, 0] - last_piece,
    ).astype(np.int32)
    place = ((values[:, 0] - first) // count).astype(np.int32)
    rule = Rule(first, place, step, size, count)
    return rule if np.array_equal(rule.chunks(num_rounds), values) else None


def as_phase(loop: Loop) -> Phase:
    """The transfers of a loop again: what `lower` made, read back, for those who check it."""
    pieces: list[Columns] = []
    for lane in loop.lanes:
        chunks = lane.send.chunks(loop.num_rounds)
        src, dst = np.array(lane.permutation, np.int32).T
        pair, now = np.nonzero(chunks[src] != IDLE)
        pieces.append(
            transfers(
                round=now,
                lane=len(pieces),
                src=src[pair],
                dst=dst[pair],
                chunk=chunks[src[pair], now],
                count=lane.count,
                op=lane.op,
            )
        )
    return Phase(loop.name, join(pieces))
