"""Look up, inside a jitted step, which chunks a rank sends and receives in a round.

On some TPUs any instruction takes a microsecond. So chunks that follow a rule are computed, which
costs nothing, and entries of a table are read for several rounds at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from ftmesh.execute.chunk_tables import ChunkTable
from ftmesh.execute.lowering import IDLE, Loop, Rule
from ftmesh.schedule.transfers import Ints

ROUNDS_PER_READ = 2


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
        arrivals = enumerate(chunks[len(rules) :])
        return RankRound(
            tuple(chunks[: len(rules)]),
            tuple(Arrival((lane,), None, arriving) for lane, arriving in arrivals),
        )

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
    """Read all chunks from the rows of a table."""
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
