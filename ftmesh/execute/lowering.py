"""Lower a schedule to a program: constant permutations and small integer tables.

Each phase becomes a `Loop`. All rounds of a loop use the same few permutations, one per `Lane`; a
table says which chunk each rank sends in each round. Where the chunks follow a rule, as along a
ring, the rule replaces the table; otherwise ranks that do the same share a row. So a program grows
little with the mesh. Rules and rows are detected in the transfers themselves, so a schedule read
from a file lowers as well as a planned one. This module needs no JAX.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ftmesh.errors import ScheduleError
from ftmesh.execute.device_schedule import schedule_for_devices
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import Schedule
from ftmesh.schedule.transfers import Ints, RingRule, Transfers, row_key
from ftmesh.topology.ranks import Ranks
from ftmesh.topology.topology import Topology

Permutation = tuple[tuple[int, int], ...]
XLA, PPERMUTE, PPERMUTE_UNROLLED, PALLAS = EXECUTORS = (
    "xla",
    "ppermute",
    "ppermute_unrolled",
    "pallas",
)
IDLE = -1  # in place of a chunk: the rank sends nothing in this round
MIXED = 2  # in place of an operation: the lane adds and copies; its table says which


@dataclass(frozen=True, eq=False)
class Table:
    """Explicit entries: rank r has ``base[r] + rows[row[r], round]``, or IDLE.

    An entry is the chunk that the rank sends; on a MIXED lane, ``2 * chunk + op``.
    """

    base: Ints
    row: Ints
    rows: Ints

    @staticmethod
    def from_entries(entries: Ints) -> Table:
        """Compress ``entries[rank, round]``: ranks that differ by a shift share a row."""
        idle = entries == IDLE
        base = np.where(idle, np.iinfo(np.int32).max, entries).min(axis=1)
        base = np.where(idle.all(axis=1), 0, base).astype(np.int32)
        shifted = np.where(idle, IDLE, entries - base[:, None]).astype(np.int32)
        rows, row = np.unique(shifted, axis=0, return_inverse=True)
        return Table(base, row.reshape(-1).astype(np.int32), rows)

    def entries(self, num_rounds: int) -> Ints:
        """All entries, ``[rank, round]``."""
        return np.stack([self.entries_in(now) for now in range(num_rounds)], axis=1)

    def entries_in(self, round_index: int) -> Ints:
        """The entry of every rank in one round, or IDLE."""
        shifted = self.rows[self.row, round_index]
        return np.where(shifted == IDLE, IDLE, shifted + self.base).astype(np.int32)


@dataclass(frozen=True, eq=False)
class Rule:
    """Computed chunks: rank r sends ``first[r] + (position[r] + step[r] * round) % size * count``.

    It does so in the rounds ``begin[r] <= round < end[r]``, and sends nothing in the others.
    """

    first: Ints
    position: Ints
    step: Ints
    size: int
    count: int
    begin: Ints
    end: Ints

    def entries(self, num_rounds: int) -> Ints:
        """All chunks, ``[rank, round]``."""
        return np.stack([self.entries_in(now) for now in range(num_rounds)], axis=1)

    def entries_in(self, round_index: int) -> Ints:
        """The chunk of every rank in one round, or IDLE."""
        position = (self.position + self.step * round_index) % self.size
        is_active = (self.begin <= round_index) & (round_index < self.end)
        return np.where(is_active, self.first + position * self.count, IDLE).astype(np.int32)

    def is_always_active(self, num_rounds: int) -> bool:
        """True if every rank that sends at all sends in each of `num_rounds` rounds."""
        sends = self.begin < self.end
        return bool(((self.begin == 0) & (self.end == num_rounds))[sends].all())


@dataclass(frozen=True, eq=False)
class Lane:
    """One permutation, the same in every round of a loop, and what travels over it.

    A rank receives into the chunk that its source sends. The chunk is added or copied as `op` says,
    or, if that is MIXED, as the source's entry says.
    """

    permutation: Permutation
    source: Ints  # rank -> the rank it receives from, or -1
    count: int
    op: int
    send: Table | Rule
    is_full: bool  # every rank receives something in every round

    def chunk_ids(self, entries: Ints) -> Ints:
        """The chunks of some entries; IDLE stays IDLE."""
        return entries >> 1 if self.op == MIXED else entries

    def ops(self, entries: Ints) -> Ints:
        """The operations of some entries."""
        return entries & 1 if self.op == MIXED else np.full_like(entries, self.op)

    def received_entries(self, num_rounds: int) -> Ints:
        """What each rank receives, ``[rank, round]``: the entry of its source, or IDLE."""
        sent = self.send.entries(num_rounds)[np.maximum(self.source, 0)]
        return np.where(self.source[:, None] >= 0, sent, IDLE)


@dataclass(frozen=True, eq=False)
class Loop:
    """Rounds that share their permutations."""

    name: str
    num_rounds: int
    lanes: tuple[Lane, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """What an executor runs: the loops of the reduce-scatter, and those of the all-gather.

    A rank is a device of the mesh axis. A schedule without a reduce-scatter has all its loops in
    `all_gather` and no owners. Programs compare by identity: JAX caches one compilation for each.
    """

    num_ranks: int
    num_chunks: int
    reduce_scatter: tuple[Loop, ...]
    all_gather: tuple[Loop, ...]
    owner: Ints | None  # chunk -> rank
    depth: int  # the longest chain of additions that a value goes through
    live: Ints  # the ranks that take part; the others are idle
    names: tuple[str, ...]  # of the ranks, for errors
    devices: tuple[Any, ...] = ()  # by rank, then by position; empty if not known
    unrolled: bool = False  # rounds are unrolled instead of loops
    executor: str = PPERMUTE

    @cached_property
    def owned_chunks(self) -> Ints:
        """The chunks of each rank in ascending order; `num_chunks` pads the shorter rows."""
        if self.owner is None:
            raise ScheduleError(
                "this schedule is an all-reduce without a reduce-scatter, so no rank owns a chunk: "
                "plan with an algorithm that has a reduce-scatter, such as 'ring' or 'row_pair'"
            )
        chunks = [np.flatnonzero(self.owner == rank) for rank in range(self.num_ranks)]
        table = np.full((self.num_ranks, max(map(len, chunks))), self.num_chunks, np.int32)
        for rank, owned in enumerate(chunks):
            table[rank, : len(owned)] = owned
        return table

    @property
    def owns_evenly(self) -> bool:
        """True if all ranks own the same number of chunks."""
        return (
            self.owner is not None
            and self.owned_chunks.size == self.num_chunks
            and self.owned_chunks.max() < self.num_chunks
        )

    @cached_property
    def is_in_owner_order(self) -> bool:
        """True if chunks have the numbers at which `owned_chunks` lists them."""
        return np.array_equal(self.owned_chunks.reshape(-1), np.arange(self.num_chunks))

    @property
    def device_lines(self) -> tuple[tuple[Any, ...], ...]:
        """The devices by rank, if known: one line, or one for each position of a tile."""
        num_positions = len(self.devices) // self.num_ranks
        return tuple(self.devices[first::num_positions] for first in range(num_positions))

    @property
    def loops(self) -> tuple[Loop, ...]:
        return self.reduce_scatter + self.all_gather


def lower(schedule: Schedule, *, devices_per_chip: int = 1, with_idle: bool = False) -> Program:
    """Lower a schedule to the program of a mesh axis; arguments as for `schedule_for_devices`."""
    topology = schedule.topology
    ranks = schedule_for_devices(schedule, devices_per_chip=devices_per_chip, with_idle=with_idle)
    reduce_scatter, all_gather = (
        tuple(_lower_phase(phase, ranks.num_ranks) for phase in phases)
        for phases in (ranks.reduce_scatter, ranks.all_gather)
    )
    return Program(
        num_ranks=ranks.num_ranks,
        num_chunks=ranks.num_chunks,
        reduce_scatter=reduce_scatter,
        all_gather=all_gather,
        owner=ranks.owner,
        depth=schedule.depth + devices_per_chip - 1,
        live=ranks.contributors,
        names=ranks.names,
        devices=Ranks(topology, with_idle).devices,
    )


def native_program(topology: Topology) -> Program:
    """Return the program of the executor ``"xla"``, which has no rounds of its own."""
    ranks = Ranks(topology)
    return Program(
        num_ranks=ranks.num_ranks,
        num_chunks=ranks.num_ranks,
        reduce_scatter=(),
        all_gather=(),
        owner=ranks.live,
        depth=ranks.num_ranks - 1,
        live=ranks.live,
        names=tuple(
            f"{topology.noun} {coord}"
            for coord in ranks.coords
            for _ in range(topology.devices_per_chip)
        ),
        devices=ranks.devices,
        executor=XLA,
    )


def _lower_phase(phase: Phase, num_ranks: int) -> Loop:
    if isinstance(phase.content, Transfers):
        lanes = _lanes_from_transfers(phase.content, num_ranks, phase.num_rounds)
    else:
        lanes = [_lane_from_rings(rings, num_ranks) for rings in phase.content]
    return Loop(phase.name, phase.num_rounds, tuple(lanes))


def _lane_from_rings(rings: RingRule, num_ranks: int) -> Lane:
    source = np.full(num_ranks, -1, np.int32)
    source[rings.dst] = rings.src
    first, position = np.zeros((2, num_ranks), np.int32)
    first[rings.src] = np.repeat(rings.first_chunk, rings.length)
    piece = np.tile(np.arange(rings.length, dtype=np.int32), len(rings.rings))
    # Mirrored rings run backwards in time: their first round is the last of the others.
    position[rings.src] = piece - (rings.num_rounds - 1 if rings.mirrored else 0)
    end = np.zeros(num_ranks, np.int32)
    end[rings.src] = rings.num_rounds
    return Lane(
        permutation=tuple(zip(rings.src.tolist(), rings.dst.tolist(), strict=True)),
        source=source,
        count=rings.count,
        op=rings.op,
        send=Rule(
            first=first,
            position=position % np.int32(rings.length),
            step=np.full(num_ranks, 1 if rings.mirrored else -1, np.int32),
            size=rings.length,
            count=rings.count,
            begin=np.zeros(num_ranks, np.int32),
            end=end,
        ),
        is_full=bool((source >= 0).all()),
    )


def _lanes_from_transfers(transfers: Transfers, num_ranks: int, num_rounds: int) -> list[Lane]:
    lanes = []
    for count in np.unique(transfers.count):  # transfers of a lane have one size
        same_size = transfers.take(transfers.count == count)
        colour = constant_lanes(same_size)
        lanes += [
            _lane(same_size.take(colour == lane), num_ranks, num_rounds)
            for lane in np.unique(colour)
        ]
    return lanes


def _lane(transfers: Transfers, num_ranks: int, num_rounds: int) -> Lane:
    _, distinct = np.unique(row_key(transfers.src, transfers.dst), return_index=True)
    src, dst = transfers.src[distinct], transfers.dst[distinct]
    source = np.full(num_ranks, -1, np.int32)
    source[dst] = src
    ops = np.unique(transfers.op).tolist()
    op = ops[0] if len(ops) == 1 else MIXED
    entries = np.full((num_ranks, num_rounds), IDLE, np.int32)
    entries[transfers.src, transfers.round] = (
        2 * transfers.chunk + transfers.op if op == MIXED else transfers.chunk
    )
    count = int(transfers.count[0])
    rule = None if op == MIXED else _find_rule(entries, count, src)
    return Lane(
        permutation=tuple(zip(src.tolist(), dst.tolist(), strict=True)),
        source=source,
        count=count,
        op=op,
        send=rule or Table.from_entries(entries),
        is_full=bool(rule and rule.is_always_active(num_rounds) and (source >= 0).all()),
    )


def _find_rule(chunks: Ints, count: int, senders: Ints) -> Rule | None:
    """The rule that ``chunks[rank, round]`` follow, or None.

    Each row must be active in consecutive rounds, and step by one piece up or down around a circle.
    The circle has one piece more than there are rounds, so a row that is active throughout may
    start anywhere on it.
    """
    values, num_rounds = chunks[senders], chunks.shape[1]
    active = values != IDLE
    begin, length = active.argmax(axis=1), active.sum(axis=1)
    steps = np.zeros_like(values)  # from the chunk of the previous round
    steps[:, 1:] = np.where(active[:, 1:] & active[:, :-1], np.diff(values, axis=1), 0)
    sign = np.where((steps == count).sum(axis=1) > (steps == -count).sum(axis=1), 1, -1)
    size = num_rounds + 1
    wrapped = (steps != 0) & (steps != sign[:, None] * count)
    after_wrap = np.take_along_axis(values, wrapped.argmax(axis=1)[:, None], axis=1)[:, 0]
    first_sent = np.take_along_axis(values, begin[:, None], axis=1)[:, 0]
    top = np.where(sign < 0, size - 1, 0)  # the piece that follows a wrap
    first, position, step, start, end = np.zeros((5, len(chunks)), np.int32)
    wraps = wrapped.any(axis=1)  # rows that never wrap are taken to be at the top in round 0
    first[senders] = np.where(wraps, after_wrap, first_sent - sign * begin * count) - top * count
    position[senders] = ((first_sent - first[senders]) // count - sign * begin) % size
    step[senders], start[senders], end[senders] = sign, begin, begin + length
    rule = Rule(first, position, step, size, count, start, end)
    return rule if np.array_equal(rule.entries(num_rounds)[senders], values) else None


# Lane colouring ---------------------------------------------------------------------------------

_Edge = tuple[int, int, int]  # src, dst, and which of several transfers of that pair in a round


def constant_lanes(transfers: Transfers) -> Ints:
    """Assign a lane to each transfer so that a lane is one partial permutation in all rounds.

    The schedule's own lanes are kept if they have that property. Otherwise the distinct pairs of
    ranks are coloured so that no two of a colour share a source or a destination.
    """
    if _is_permutation(transfers.lane, transfers.src, transfers.dst):
        return transfers.lane
    seen: dict[_Edge, int] = {}
    repeat = np.empty(len(transfers.src), np.int32)
    columns = (transfers.round.tolist(), transfers.src.tolist(), transfers.dst.tolist())
    for i, key in enumerate(zip(*columns, strict=True)):
        repeat[i] = seen[key] = seen.get(key, -1) + 1
    edges = list(zip(columns[1], columns[2], repeat.tolist(), strict=True))
    colour = _colour_edges(sorted(set(edges)))
    return np.array([colour[edge] for edge in edges], np.int32)


def _is_permutation(lane: Ints, src: Ints, dst: Ints) -> bool:
    _, first = np.unique(row_key(lane, src, dst), return_index=True)
    return all(len(np.unique(row_key(lane[first], end[first]))) == len(first) for end in (src, dst))


def _colour_edges(edges: list[_Edge]) -> dict[_Edge, int]:
    """Colour the edges of a bipartite multigraph with as few colours as its degree (König).

    An edge takes a colour that is free at both ends. If there is none, the two colours that are
    free at one end each are swapped along the alternating path that starts at the destination.
    """
    at_src: dict[int, dict[int, _Edge]] = {}
    at_dst: dict[int, dict[int, _Edge]] = {}
    colour: dict[_Edge, int] = {}

    def free(used: dict[int, _Edge]) -> int:
        return next(c for c in range(len(edges)) if c not in used)

    for edge in edges:
        src, dst, _ = edge
        out, into = at_src.setdefault(src, {}), at_dst.setdefault(dst, {})
        a, b = free(out), free(into)
        if a != b:
            path, node, tables, this, other = [], dst, (at_dst, at_src), a, b
            while (step := tables[0].get(node, {}).get(this)) is not None:
                path.append(step)
                node = step[0] if tables[0] is at_dst else step[1]
                tables, this, other = tables[::-1], other, this
            for step in path:
                del at_src[step[0]][colour[step]], at_dst[step[1]][colour[step]]
            for step in path:
                colour[step] = b if colour[step] == a else a
                at_src[step[0]][colour[step]] = at_dst[step[1]][colour[step]] = step
        colour[edge] = a
        out[a] = into[a] = edge
    return colour
