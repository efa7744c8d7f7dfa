"""Numbers: which chunks a rank sends and receives in the rounds of a loop, inside a step.

On some TPUs any instruction takes a microsecond, so numbers that follow a rule are computed, which
takes none, and those of a table are read for several rounds at once. Where no rank ever receives by
all lanes in one round, what arrives is put into fewer places, one instruction each.

Places: where a rank puts what arrives in a round, as numbers that are read at once.

Where no rank ever receives by all lanes in one round, what arrives is put into fewer places than
there are lanes, each of which takes an instruction. Nothing here knows JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from ftmesh.execute.lowering import IDLE, MIXED, Lane, Loop, Rule
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


@dataclass(frozen=True, eq=False)
class Numbers:
    """The numbers of a loop: ``base[r] + rows[row[r], round]`` for rank r, or IDLE.

    Those of a round are the chunks that are sent by each lane, and for each place the chunk that is
    received there and by which lanes: that of the place's own number, and those that have no place.
    Of several lanes each has a bit, below the chunk.

    Where operations differ, a bit between those and the chunk tells which it is: what is received
    in one place is all added, or all copied. Ranks have little in common there, and so every number
    has a row to itself, ``rows[row[r, number], round]``: who receives shares that of who sends.
    """

    num_lanes: int
    num_places: int
    base: Ints  # [rank, number]
    row: Ints  # [rank], or with operations [rank, number]
    rows: Ints  # [row, round * number], or with operations [row, round]
    has_ops: bool = False

    @staticmethod
    @lru_cache(maxsize=16)  # a program is traced for every bucket
    def of(loop: Loop) -> Numbers:
        """Ranks whose numbers differ by a shift share a row."""
        has_ops = any(lane.op == MIXED for lane in loop.lanes)
        lanes, rounds = loop.lanes, loop.num_rounds
        sent = [_with_op(lane, lane.send.chunks(rounds), has_ops) for lane in lanes]
        received = np.stack([_with_op(lane, lane.received(rounds), has_ops) for lane in lanes], 2)
        if len({(lane.count, has_ops or lane.op) for lane in lanes}) == 1:
            received = _in_few_places(received, lanes[0].count, has_ops=has_ops)
        every = np.concatenate([np.stack(sent, 2), received], axis=2).astype(np.int32)
        is_idle = every == IDLE
        base = np.where(is_idle, np.iinfo(np.int32).max, every).min(axis=1)
        base = np.where(is_idle.all(axis=1), 0, base)
        shifted = np.where(is_idle, IDLE, every - base[:, None])
        if has_ops:
            shifted = shifted.swapaxes(1, 2).reshape(-1, rounds)
        rows, row = np.unique(shifted.reshape(len(shifted), -1), axis=0, return_inverse=True)
        shape: tuple[int, ...] = base.shape if has_ops else (len(base),)
        at = row.reshape(shape).astype(np.int32)
        return Numbers(len(lanes), received.shape[2], base, at, rows, has_ops)

    @property
    def num_bits(self) -> int:
        """Of lanes, below the chunk."""
        return _num_bits(self.num_lanes, self.num_places)

    def chunks(self) -> tuple[Ints, Ints]:
        """What is sent and what is received, written out in full, ``[rank, round, lane]``."""
        sent, received = self._written_out()
        return (sent >> 1, received >> 1) if self.has_ops else (sent, received)

    def ops(self) -> Ints:
        """The operations of what is received, where they differ, or IDLE."""
        _, received = self._written_out()
        return np.where(received == IDLE, IDLE, received & 1)

    def _written_out(self) -> tuple[Ints, Ints]:
        """What each lane sends and what it brings, out of its place; with operations."""
        rows = self.rows[self.row]
        if self.has_ops:
            rows = rows.swapaxes(1, 2)
        rows = rows.reshape(len(self.row), -1, self.base.shape[1])
        every = np.where(rows == IDLE, IDLE, rows + self.base[:, None])
        sent, places = every[..., : self.num_lanes], every[..., self.num_lanes :]
        if not self.num_bits:
            return sent, places
        received = np.full_like(sent, IDLE)
        for place in range(self.num_places):
            there = places[..., place]
            for bit, lane in enumerate((place, *range(self.num_places, self.num_lanes))):
                comes = (there != IDLE) & (there >> bit & 1 != 0)
                received[..., lane][comes] = there[comes] >> self.num_bits
        return sent, received


def _num_bits(num_lanes: int, num_places: int) -> int:
    return 0 if num_lanes == num_places else num_lanes - num_places + 1


def _with_op(lane: Lane, numbers: Ints, has_ops: bool) -> Ints:
    """Numbers of a lane, with its operation in the last bit if they are to have one."""
    if not has_ops or lane.op == MIXED:
        return numbers
    return np.where(numbers == IDLE, IDLE, 2 * numbers + lane.op)


def _in_few_places(received: Ints, count: int, *, has_ops: bool = False) -> Ints:
    """What is received, ``[rank, round, lane]``, in as few places as will do; see `Numbers`.

    Each lane brings `count` chunks.
    """
    num_lanes = received.shape[2]
    for num_places in range(1, num_lanes):
        if (int(received.max()) + 1) << _num_bits(num_lanes, num_places) > 2**31:
            continue  # too many lanes to have a bit each
        found = _in_places(received, count, num_places, int(has_ops))
        if found is not None:
            return found
    return received


def _in_places(received: Ints, count: int, num_places: int, op_bits: int) -> Ints | None:
    """What is received in so many places, if that will do; `op_bits` of it are not of the chunk.

    A lane that has none goes where others bring the same chunk, after them, so that sums are added
    up in the order of lanes; or to a place that nothing comes to.
    """
    num_lanes = received.shape[2]
    chunk = received[..., :num_places].copy()
    mask = (chunk != IDLE).astype(np.int32)
    for lane in range(num_places, num_lanes):
        rank, now = np.nonzero(received[..., lane] != IDLE)
        new, there = received[rank, now, lane], chunk[rank, now]
        apart = np.abs((there >> op_bits) - (new >> op_bits)[:, None])
        is_near = (apart < count) & (there != IDLE)
        fits = np.where(is_near.any(axis=1)[:, None], is_near, there == IDLE)
        place = num_places - 1 - fits[:, ::-1].argmax(axis=1)
        taken = np.take_along_axis(there, place[:, None], axis=1)[:, 0]
        if not (fits.any(axis=1) & ((taken == IDLE) | (taken == new))).all():
            return None
        chunk[rank, now, place] = new
        mask[rank, now, place] |= 1 << (lane - num_places + 1)
    return np.where(chunk == IDLE, IDLE, chunk << _num_bits(num_lanes, num_places) | mask)
