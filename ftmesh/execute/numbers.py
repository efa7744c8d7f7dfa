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
from ftmesh.schedule.columns import Ints

READ_AT_ONCE = 2  # rounds


@dataclass(frozen=True)
class Arrival:
    """Something that a rank receives into a chunk: by those of `lanes` that `mask` has a bit for.

    It is received in their order. A chunk that is IDLE stands for nothing.
    """

    lanes: tuple[int, ...]
    mask: Any
    chunk: Any

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
    """A row of a constant, which takes as little of the program as it can."""
    is_short = np.abs(table).max(initial=0) < 2**15
    return jnp.asarray(table.astype(np.int16 if is_short else np.int32))[row].astype(np.int32)


@dataclass(frozen=True, eq=False)
class Numbers:
    """The numbers of a loop: ``base[r] + rows[row[r], round]`` for rank r, or IDLE.

    Those of a round are the chunks that are sent by each lane, and for each place the chunk that is
    received there and by which lanes: that of the place's own number, and those that have no place.
    Of several lanes each has a bit, below the chunk.
    """

    num_lanes: int
    num_places: int
    base: Ints  # [rank, number]
    row: Ints
    rows: Ints  # [row, round * number]

    @staticmethod
    def of(loop: Loop) -> Numbers:
        """Ranks whose numbers differ by a shift share a row."""
        sent = np.stack([lane.send.chunks(loop.num_rounds) for lane in loop.lanes], axis=2)
        received = np.stack([lane.received(loop.num_rounds) for lane in loop.lanes], axis=2)
        if len({(lane.count, lane.op) for lane in loop.lanes}) == 1:
            received = _in_few_places(received, loop.lanes[0].count)
        every = np.concatenate([sent, received], axis=2).astype(np.int32)
        is_idle = every == IDLE
        base = np.where(is_idle, np.iinfo(np.int32).max, every).min(axis=1)
        base = np.where(is_idle.all(axis=1), 0, base)
        shifted = np.where(is_idle, IDLE, every - base[:, None])
        rows, row = np.unique(shifted.reshape(len(every), -1), axis=0, return_inverse=True)
        places = received.shape[2]
        return Numbers(len(loop.lanes), places, base, row.reshape(-1).astype(np.int32), rows)

    @property
    def num_bits(self) -> int:
        """Of lanes, below the chunk."""
        return _num_bits(self.num_lanes, self.num_places)


def _num_bits(num_lanes: int, num_places: int) -> int:
    return 0 if num_lanes == num_places else num_lanes - num_places + 1


def _in_few_places(received: Ints, count: int) -> Ints:
    """What is received, ``[rank, round, lane]``, in as few places as will do; see `Numbers`.

    Each lane brings `count` chunks.
    """
    for num_places in range(1, received.shape[2]):
        found = _in_places(received, count, num_places)
        if found is not None:
            return found
    return received


def _in_places(received: Ints, count: int, num_places: int) -> Ints | None:
    """What is received in so many places, if that will do.

    A lane that has none goes where others bring the same chunk, after them, so that sums are added
    up in the order of lanes; or to a place that nothing comes to.
    """
    num_lanes = received.shape[2]
    chunk = received[..., :num_places].copy()
    mask = (chunk != IDLE).astype(np.int32)
    for lane in range(num_places, num_lanes):
        rank, now = np.nonzero(received[..., lane] != IDLE)
        new, there = received[rank, now, lane], chunk[rank, now]
        is_near = (np.abs(there - new[:, None]) < count) & (there != IDLE)
        fits = np.where(is_near.any(axis=1)[:, None], is_near, there == IDLE)
        place = num_places - 1 - fits[:, ::-1].argmax(axis=1)
        taken = np.take_along_axis(there, place[:, None], axis=1)[:, 0]
        if not (fits.any(axis=1) & ((taken == IDLE) | (taken == new))).all():
            return None
        chunk[rank, now, place] = new
        mask[rank, now, place] |= 1 << (lane - num_places + 1)
    return np.where(chunk == IDLE, IDLE, chunk << _num_bits(num_lanes, num_places) | mask)


def _read(numbers: Numbers, rank: Any) -> Rounds:
    """All numbers from their rows."""
    base, row = _row(numbers.base, rank), _row(numbers.row, rank)
    mine = _row(numbers.rows, row).reshape(-1, numbers.base.shape[1])
    mine = jnp.where(mine == IDLE, IDLE, mine + base)
    lanes, places, bits = numbers.num_lanes, numbers.num_places, numbers.num_bits

    def arrival(place: int, number: Any) -> Arrival:
        if not bits:
            return Arrival((place,), None, number)
        mask = jnp.where(number == IDLE, 0, number % 2**bits)
        return Arrival((place, *range(places, lanes)), mask, number >> bits)

    def one(found: Any) -> Round:
        arrivals = tuple(arrival(place, found[lanes + place]) for place in range(places))
        return Round(tuple(found[:lanes]), arrivals)

    def at(now: Any, how_many: int) -> list[Round]:
        some = lax.dynamic_slice_in_dim(mine, now, how_many)
        return [one([some[i, j] for j in range(mine.shape[1])]) for i in range(how_many)]

    return at
