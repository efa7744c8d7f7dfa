"""Numbers: which chunks a rank sends and receives in the rounds of a loop, inside a step.

On some TPUs any instruction takes a microsecond, so numbers that follow a rule are computed, which
takes none, and those of a table are read for several rounds at once. Where no rank ever receives by
all lanes in one round, what arrives is put into fewer places, one instruction each.
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

from ftmesh.execute.lower import IDLE, Loop, Rule
from ftmesh.execute.places import Numbers
from ftmesh.schedule.transfers import Ints

READ_AT_ONCE = 2  # rounds


@dataclass(frozen=True)
class Arrival:
    """Something that a rank receives into a chunk: by those of `lanes` that `mask` has a bit for.

    It is received in their order. A chunk that is IDLE stands for nothing. Where operations differ,
    all of it `is_copied`, or all of it added.
    """

    lanes: tuple[int, ...]
    mask: Any
    chunk: Any
    is_copied: Any = None

    def comes_by(self, lane: int) -> Any:
        """Whether something comes by a lane."""
        if len(self.lanes) == 1:
            return self.chunk != IDLE
        return (self.mask >> self.lanes.index(lane)) % 2 != 0


@dataclass(frozen=True)
class Round:
    """What a rank does in a round: the chunk it sends by each lane, or IDLE, and what it gets."""

    sent: tuple[Any, ...]
    arrivals: tuple[Arrival, ...]


Rounds = Callable[[Any, int], list[Round]]  # from a given one on, so many


def rounds_of(loop: Loop, rank: Any) -> tuple[int, Rounds]:
    """How many rounds to ask for at once, and what `rank` does in them."""
    if all(isinstance(lane.send, Rule) for lane in loop.lanes):
        return 1, _computed(loop, rank)
    return min(READ_AT_ONCE, loop.num_rounds), _read(Numbers.of(loop), rank)


def _computed(loop: Loop, rank: Any) -> Rounds:
    """All numbers by their rules, of which a rank reads its part once."""
    rules = [lane.send for lane in loop.lanes if isinstance(lane.send, Rule)]
    parts = [
        np.stack([rule.first, rule.place, rule.step, rule.begin, rule.end], axis=1)
        for rule in rules
    ]
    for lane, part in zip(loop.lanes, parts.copy(), strict=True):
        parts.append(np.where(lane.source[:, None] >= 0, part[lane.source], 0))
    # Ranks that step alike share a row of numbers, but for where on the circle they are.
    is_own = [[True, len(np.unique(rule.place)) > 2, False, False, False] for rule in rules] * 2
    mine = _at(rank, np.concatenate(parts, axis=1), np.concatenate(is_own))

    def chunk(number: int, now: Any) -> Any:
        rule, lane = rules[number % len(rules)], loop.lanes[number % len(rules)]
        first, place, step, begin, end = mine[5 * number : 5 * number + 5]
        found = first + (place + step * now) % rule.size * rule.count
        if lane.is_full or (number < len(rules) and rule.is_always(loop.num_rounds)):
            return found
        return jnp.where((begin <= now) & (now < end), found, IDLE)

    def one(now: Any) -> Round:
        chunks = [chunk(number, now) for number in range(2 * len(rules))]
        arrivals = enumerate(chunks[len(rules) :])
        return Round(
            tuple(chunks[: len(rules)]),
            tuple(Arrival((lane,), None, each) for lane, each in arrivals),
        )

    return lambda now, how_many: [one(now + later) for later in range(how_many)]


def _at(rank: Any, numbers: Ints, is_own: NDArray[np.bool_]) -> list[Any]:
    """The numbers of a rank, of ``[rank, number]``: its own, and those that it may share.

    What is the same for all is not read.
    """
    own = _row(numbers[:, is_own], rank)
    rows, row = np.unique(numbers[:, ~is_own], axis=0, return_inverse=True)
    shared: Any = rows[0]
    if len(rows) > 1:
        shared = _row(rows, _row(row.reshape(-1), rank))
    place = np.where(is_own, np.cumsum(is_own), np.cumsum(~is_own)) - 1
    return [(own if mine else shared)[i] for mine, i in zip(is_own, place.tolist(), strict=True)]


def _row(table: NDArray[np.integer], row: Any) -> jax.Array:
    """A row of a constant."""
    return _short(table)[row].astype(np.int32)


def _short(table: NDArray[np.integer]) -> jax.Array:
    """A constant, which takes as little of the program as it can."""
    is_short = np.abs(table).max(initial=0) < 2**15
    return jnp.asarray(table.astype(np.int16 if is_short else np.int32))


def _read(numbers: Numbers, rank: Any) -> Rounds:
    """All numbers from their rows."""
    mine = _of_rank(numbers, rank)
    lanes, places, bits = numbers.num_lanes, numbers.num_places, numbers.num_bits

    def arrival(place: int, number: Any) -> Arrival:
        by, mask = (place,), None
        if bits:
            by = (place, *range(places, lanes))
            mask = jnp.where(number == IDLE, 0, number % 2**bits)
            number = number >> bits
        if numbers.has_ops:
            return Arrival(by, mask, number >> 1, number & 1 != 0)
        return Arrival(by, mask, number)

    def one(found: Any) -> Round:
        arrivals = tuple(arrival(place, found[lanes + place]) for place in range(places))
        return Round(tuple(found[:lanes]), arrivals)

    def at(now: Any, how_many: int) -> list[Round]:
        rounds, size = range(how_many), mine.shape[1]
        if numbers.has_ops:
            some = lax.dynamic_slice_in_dim(mine, now, how_many)
            return [one([some[i, j] for j in range(size)]) for i in rounds]
        # These were a row of a table: read in another shape, libtpu 0.0.48.1 copies them first.
        some = lax.dynamic_slice_in_dim(mine.reshape(-1), now * size, how_many * size)
        return [one([some[i * size + j] for j in range(size)]) for i in rounds]

    return at


def _of_rank(numbers: Numbers, rank: Any) -> jax.Array:
    """The numbers of a rank, ``[round, number]``; those of what it sends are chunks."""
    base, row = _row(numbers.base, rank), _row(numbers.row, rank)
    if not numbers.has_ops:
        mine = _row(numbers.rows, row).reshape(-1, numbers.base.shape[1])
        return jnp.where(mine == IDLE, IDLE, mine + base)
    rows = _short(numbers.rows)
    mine = jnp.stack([rows[row[i]] for i in range(len(base))], axis=1).astype(np.int32)
    mine = jnp.where(mine == IDLE, IDLE, mine + base)
    is_sent = np.arange(len(base)) < numbers.num_lanes
    return jnp.where(is_sent, mine >> 1, mine)
