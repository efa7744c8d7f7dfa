"""The executor that runs everywhere: rounds of `lax.ppermute` in loops, on one rank's buffer.

A buffer has shape ``[chunks, rows, width]``, followed by any batch dimensions, so a chunk is
contiguous.

On some TPUs any instruction takes a microsecond. So the chunks that a rank sends and receives are
computed if they follow a rule, which costs nothing, and read from a table for several rounds at
once otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from ftmesh.execute.chunk_tables import ChunkTable
from ftmesh.execute.context import ExecutionContext, complete_permutation
from ftmesh.execute.lowering import IDLE, Lane, Loop, Program, Rule
from ftmesh.schedule.transfers import ADD, COPY, Ints

ROUNDS_PER_READ = 2
RunRounds = Callable[[jax.Array, Any, int], jax.Array]  # buffer, first round, number of rounds


def run_loops(
    buffer: jax.Array, loops: tuple[Loop, ...], program: Program, context: ExecutionContext
) -> jax.Array:
    for loop in loops:
        buffer = run_loop(buffer, loop, context, unrolled=program.unrolled)
    return buffer


def run_loop(
    buffer: jax.Array, loop: Loop, context: ExecutionContext, *, unrolled: bool = False
) -> jax.Array:
    at_once, run = rounds_on_rank(loop, context)
    if unrolled:
        for first in range(0, loop.num_rounds, at_once):
            buffer = run(buffer, first, min(at_once, loop.num_rounds - first))
        return buffer
    trips, left = divmod(loop.num_rounds, at_once)
    buffer = lax.fori_loop(0, trips, lambda i, buffer: run(buffer, i * at_once, at_once), buffer)
    return run(buffer, trips * at_once, left) if left else buffer


def rounds_on_rank(loop: Loop, context: ExecutionContext) -> tuple[int, RunRounds]:
    """How many rounds are best run at once, and the function that runs them on this rank."""
    at_once, lookup = round_lookup(loop, lax.axis_index(context.axis_name))
    lanes = [_RankLane(lane, context) for lane in loop.lanes]

    def run(buffer: jax.Array, first: Any, num_rounds: int) -> jax.Array:
        for now in lookup(first, num_rounds):
            buffer = _run_round(buffer, lanes, now)
        return buffer

    return at_once, run


def _run_round(buffer: jax.Array, lanes: Sequence[_RankLane], now: RankRound) -> jax.Array:
    # Barriers let the compiler start all lanes of a round before it waits for the first.
    sent = lax.optimization_barrier(
        tuple(lane.read(buffer, chunk) for lane, chunk in zip(lanes, now.sent, strict=True))
    )
    arrived = lax.optimization_barrier(
        tuple(lane.permute(x) for lane, x in zip(lanes, sent, strict=True))
    )
    for arrival in now.arrivals:
        buffer = _write(buffer, arrived, arrival, lanes[arrival.lanes[0]].lane)
    return buffer


def _write(
    buffer: jax.Array, arrived: Sequence[jax.Array], arrival: Arrival, lane: Lane
) -> jax.Array:
    """Add what arrived to the chunks it is for, or put it in their place."""
    is_certain = lane.is_full and len(arrival.lanes) == 1
    if is_certain and lane.op == COPY:
        new = arrived[arrival.lanes[0]].astype(buffer.dtype)
        return _put_chunks(buffer, new, arrival.chunk)
    chunk = jnp.maximum(arrival.chunk, 0)
    new = _take_chunks(buffer, chunk, lane.count)
    for number in arrival.lanes:
        x = arrived[number].astype(buffer.dtype)
        if arrival.is_copied is None:
            after = new + x if lane.op == ADD else x
        else:  # not by a product with 0 or 1: the unused value may be NaN
            after = jnp.where(arrival.is_copied, x, new + x)
        new = after if is_certain else jnp.where(arrival.arrives_by(number), after, new)
    return _put_chunks(buffer, new, chunk)


class _RankLane:
    """A lane as one rank sees it."""

    def __init__(self, lane: Lane, context: ExecutionContext) -> None:
        self.lane = lane
        self.context = context
        self.permutation = lane.permutation
        if context.emulated:
            self.permutation = complete_permutation(lane.permutation, context.num_ranks)

    def read(self, buffer: jax.Array, chunk: Any) -> jax.Array:
        """What the rank sends; any chunk if it has nothing to send."""
        if not self.lane.is_full:
            chunk = jnp.maximum(chunk, 0)
        x = _take_chunks(buffer, chunk, self.lane.count)
        wire = self.context.wire
        dtype = wire.results if self.lane.op == COPY else wire.partials
        return x if dtype is None else x.astype(dtype)

    def permute(self, x: jax.Array) -> jax.Array:
        return lax.ppermute(x, self.context.axis_name, self.permutation)


def _take_chunks(buffer: jax.Array, chunk: Any, count: int) -> jax.Array:
    return lax.dynamic_slice(buffer, _start(buffer, chunk), (count, *buffer.shape[1:]))


def _put_chunks(buffer: jax.Array, new: jax.Array, chunk: Any) -> jax.Array:
    return lax.dynamic_update_slice(buffer, new, _start(buffer, chunk))


def _start(buffer: jax.Array, chunk: Any) -> list[Any]:
    # Constants are NumPy's: JAX then emits no check of their sign.
    return [jnp.asarray(chunk, jnp.int32), *[np.int32(0)] * (buffer.ndim - 1)]


# Which chunks a rank sends and receives in a round ----------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """A chunk that a rank receives by those of `lanes` whose bit is set in `mask`, in their order.

    Nothing arrives if `chunk` is IDLE. If operations differ within a lane, `is_copied` says whether
    the chunk is copied or added.
    """

    lanes: tuple[int, ...]
    mask: Any
    chunk: Any
    is_copied: Any = None

    def arrives_by(self, lane: int) -> Any:
        """Whether something arrives by a lane."""
        if len(self.lanes) == 1:
            return self.chunk != IDLE
        return (self.mask >> self.lanes.index(lane)) % 2 != 0


@dataclass(frozen=True)
class RankRound:
    """What a rank does in a round: the chunk it sends by each lane, or IDLE, and its arrivals."""

    sent: tuple[Any, ...]
    arrivals: tuple[Arrival, ...]


RoundLookup = Callable[[Any, int], list[RankRound]]  # the first round, the number of rounds


def round_lookup(loop: Loop, rank: Any) -> tuple[int, RoundLookup]:
    """How many rounds to look up at once, and the function that looks them up for `rank`."""
    if all(isinstance(lane.send, Rule) for lane in loop.lanes):
        return 1, _computed(loop, rank)
    return min(ROUNDS_PER_READ, loop.num_rounds), _read(ChunkTable.from_loop(loop), rank)


def _computed(loop: Loop, rank: Any) -> RoundLookup:
    """Compute all chunks by their rules, whose parameters a rank reads once."""
    rules = [lane.send for lane in loop.lanes if isinstance(lane.send, Rule)]
    columns = [
        np.stack([rule.first, rule.position, rule.step, rule.begin, rule.end], axis=1)
        for rule in rules
    ]
    for lane, column in zip(loop.lanes, columns.copy(), strict=True):
        columns.append(np.where(lane.source[:, None] >= 0, column[lane.source], 0))
    # Ranks that step alike share a row of parameters, except their position on the circle.
    is_own = [[True, len(np.unique(rule.position)) > 2, False, False, False] for rule in rules] * 2
    mine = _parameters(rank, np.concatenate(columns, axis=1), np.concatenate(is_own))

    def chunk(index: int, now: Any) -> Any:
        rule, lane = rules[index % len(rules)], loop.lanes[index % len(rules)]
        first, position, step, begin, end = mine[5 * index : 5 * index + 5]
        active = first + (position + step * now) % rule.size * rule.count
        if lane.is_full or (index < len(rules) and rule.is_always_active(loop.num_rounds)):
            return active
        return jnp.where((begin <= now) & (now < end), active, IDLE)

    def one_round(now: Any) -> RankRound:
        chunks = [chunk(index, now) for index in range(2 * len(rules))]
        received = enumerate(chunks[len(rules) :])
        arrivals = tuple(Arrival((lane,), None, arriving) for lane, arriving in received)
        return RankRound(tuple(chunks[: len(rules)]), arrivals)

    return lambda now, num_rounds: [one_round(now + later) for later in range(num_rounds)]


def _parameters(rank: Any, table: Ints, is_own: NDArray[np.bool_]) -> list[Any]:
    """The row of a rank in ``table[rank, column]``: its own columns, and those it may share.

    Columns that are the same for all ranks are not read.
    """
    own = _row(table[:, is_own], rank)
    rows, row = np.unique(table[:, ~is_own], axis=0, return_inverse=True)
    shared: Any = rows[0]
    if len(rows) > 1:
        shared = _row(rows, _row(row.reshape(-1), rank))
    index = np.where(is_own, np.cumsum(is_own), np.cumsum(~is_own)) - 1
    return [(own if mine else shared)[i] for mine, i in zip(is_own, index.tolist(), strict=True)]


def _row(table: NDArray[np.integer], row: Any) -> jax.Array:
    return _constant(table)[row].astype(np.int32)


def _constant(table: NDArray[np.integer]) -> jax.Array:
    """A constant in the smallest integer type that holds it, to keep the program small."""
    is_short = np.abs(table).max(initial=0) < 2**15
    return jnp.asarray(table.astype(np.int16 if is_short else np.int32))


def _read(table: ChunkTable, rank: Any) -> RoundLookup:
    mine = _entries(table, rank)
    lanes, slots, bits = table.num_lanes, table.num_slots, table.num_lane_bits

    def arrival(slot: int, entry: Any) -> Arrival:
        by, mask = (slot,), None
        if bits:
            by = (slot, *range(slots, lanes))
            mask = jnp.where(entry == IDLE, 0, entry % 2**bits)
            entry = entry >> bits
        if table.has_ops:
            return Arrival(by, mask, entry >> 1, entry & 1 != 0)
        return Arrival(by, mask, entry)

    def one_round(entries: Any) -> RankRound:
        arrivals = tuple(arrival(slot, entries[lanes + slot]) for slot in range(slots))
        return RankRound(tuple(entries[:lanes]), arrivals)

    def lookup(now: Any, num_rounds: int) -> list[RankRound]:
        rounds, size = range(num_rounds), mine.shape[1]
        if table.has_ops:
            some = lax.dynamic_slice_in_dim(mine, now, num_rounds)
            return [one_round([some[i, j] for j in range(size)]) for i in rounds]
        # These were a row of a table: read in another shape, libtpu 0.0.48.1 copies them first.
        some = lax.dynamic_slice_in_dim(mine.reshape(-1), now * size, num_rounds * size)
        return [one_round([some[i * size + j] for j in range(size)]) for i in rounds]

    return lookup


def _entries(table: ChunkTable, rank: Any) -> jax.Array:
    """The entries of a rank, ``[round, entry]``; those of what it sends are chunks."""
    base, row = _row(table.base, rank), _row(table.row, rank)
    if not table.has_ops:
        mine = _row(table.rows, row).reshape(-1, table.base.shape[1])
        return jnp.where(mine == IDLE, IDLE, mine + base)
    rows = _constant(table.rows)
    mine = jnp.stack([rows[row[i]] for i in range(len(base))], axis=1).astype(np.int32)
    mine = jnp.where(mine == IDLE, IDLE, mine + base)
    is_sent = np.arange(len(base)) < table.num_lanes
    return jnp.where(is_sent, mine >> 1, mine)
