"""The executor that runs everywhere: rounds of `lax.ppermute` in loops, on one rank's buffer.

A buffer has shape ``[chunks, rows, width]`` (and whatever batch dimensions follow), so that a chunk
is contiguous. Knows permutations and tables only; what they are for is the planner's business.

Large chunks may travel as two streams, if their loop says so: the rows of a chunk in two halves,
one behind the other, so that a device slices and adds one while the other travels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.execute.chunk_tables import Arrival, Round, rounds_of
from ftmesh.execute.context import Setting, completed
from ftmesh.execute.lowering import Lane, Loop, Program
from ftmesh.schedule.transfers import ADD, COPY

Run = Callable[[jax.Array, Any, int], jax.Array]
TILE_ROWS = 16  # a tile of 16-bit numbers, and two of 32 bits


class Rows(NamedTuple):
    """The rows of chunks that travel together: so many, from `first` on."""

    first: int
    number: int

    def take(self, buffer: jax.Array, chunk: Any, count: int) -> jax.Array:
        """Those of some chunks."""
        sizes = count, self.number, *buffer.shape[2:]
        return lax.dynamic_slice(buffer, self._begin(buffer, chunk), sizes)

    def put(self, buffer: jax.Array, new: jax.Array, chunk: Any) -> jax.Array:
        """The buffer with those of some chunks replaced."""
        return lax.dynamic_update_slice(buffer, new, self._begin(buffer, chunk))

    def _begin(self, buffer: jax.Array, chunk: Any) -> list[Any]:
        others = [np.int32(0)] * (buffer.ndim - 2)  # known to JAX, which then asks no signs
        return [jnp.asarray(chunk, jnp.int32), np.int32(self.first), *others]


def run_loops(
    buffer: jax.Array, loops: tuple[Loop, ...], program: Program, setting: Setting
) -> jax.Array:
    """Run loops of a program on one rank's buffer."""
    for loop in loops:
        buffer = run_loop(buffer, loop, setting, unrolled=program.unrolled)
    return buffer


def run_loop(
    buffer: jax.Array, loop: Loop, setting: Setting, *, unrolled: bool = False
) -> jax.Array:
    """Run the rounds of a loop on one rank."""
    at_once, run = on_rank(loop, setting)
    if unrolled:
        for first in range(0, loop.num_rounds, at_once):
            buffer = run(buffer, first, min(at_once, loop.num_rounds - first))
        return buffer
    turns, left = divmod(loop.num_rounds, at_once)
    buffer = lax.fori_loop(
        0, turns, lambda turn, buffer: run(buffer, turn * at_once, at_once), buffer
    )
    return run(buffer, turns * at_once, left) if left else buffer


def on_rank(loop: Loop, setting: Setting) -> tuple[int, Run]:
    """How many rounds are best run at once, and what runs them: so many, from a given one on."""
    at_once, rounds = rounds_of(loop, lax.axis_index(setting.axis_name))
    lanes = [_Lane(lane, setting) for lane in loop.lanes]

    def run(buffer: jax.Array, first: Any, how_many: int) -> jax.Array:
        streams = _streams(buffer, loop)
        for now in rounds(first, how_many):
            buffer = _one_round(buffer, lanes, now, streams)
        return buffer

    return at_once, run


def _streams(buffer: jax.Array, loop: Loop) -> list[Rows]:
    """The rows of a chunk that travel together: all, or two halves, the first in whole tiles.

    It is not the larger one: compilers were seen to hide less then.
    """
    rows, chunk_bytes = buffer.shape[1], math.prod(buffer.shape[1:]) * buffer.dtype.itemsize
    half = rows // (2 * TILE_ROWS) * TILE_ROWS
    if chunk_bytes < loop.split_bytes or not half:
        return [Rows(0, rows)]
    return [Rows(0, half), Rows(half, rows - half)]


def _one_round(
    buffer: jax.Array, lanes: Sequence[_Lane], now: Round, streams: Sequence[Rows]
) -> jax.Array:
    # Barriers let the compiler start all lanes of a round before it waits for the first.
    out = [
        lax.optimization_barrier(
            tuple(
                lane.read(buffer, chunk, rows) for lane, chunk in zip(lanes, now.sent, strict=True)
            )
        )
        for rows in streams
    ]
    arrived = [
        lax.optimization_barrier(tuple(lane.carry(x) for lane, x in zip(lanes, each, strict=True)))
        for each in out
    ]
    for rows, each in zip(streams, arrived, strict=True):
        for arrival in now.arrivals:
            lane = lanes[arrival.lanes[0]].lane
            buffer = _written(buffer, each, arrival, lane, rows)
    return buffer


def _written(
    buffer: jax.Array, arrived: Sequence[jax.Array], arrival: Arrival, lane: Lane, rows: Rows
) -> jax.Array:
    """The buffer with what arrived added to, or put in place of, the rows it is for."""
    is_sure = lane.is_full and len(arrival.lanes) == 1
    if is_sure and lane.op == COPY:
        new = arrived[arrival.lanes[0]].astype(buffer.dtype)
        return rows.put(buffer, new, arrival.chunk)
    place = jnp.maximum(arrival.chunk, 0)
    new = rows.take(buffer, place, lane.count)
    for number in arrival.lanes:
        x = arrived[number].astype(buffer.dtype)
        if arrival.is_copied is None:
            after = new + x if lane.op == ADD else x
        else:  # not by a product with 0 or 1: what is not wanted may be NaN
            after = jnp.where(arrival.is_copied, x, new + x)
        new = after if is_sure else jnp.where(arrival.comes_by(number), after, new)
    return rows.put(buffer, new, place)


class _Lane:
    """A lane as one rank sees it."""

    def __init__(self, lane: Lane, setting: Setting) -> None:
        self.lane = lane
        self.setting = setting
        self.permutation = lane.permutation
        if setting.emulated:
            self.permutation = completed(lane.permutation, setting.num_ranks)

    def read(self, buffer: jax.Array, chunk: Any, rows: Rows) -> jax.Array:
        """What the rank sends; anything, where it has nothing to send."""
        if not self.lane.is_full:
            chunk = jnp.maximum(chunk, 0)
        x = rows.take(buffer, chunk, self.lane.count)
        wire = self.setting.wire
        dtype = wire.results if self.lane.op == COPY else wire.partials
        return x if dtype is None else x.astype(dtype)

    def carry(self, x: jax.Array) -> jax.Array:
        """What the rank receives, when every rank sends its `x`."""
        return lax.ppermute(x, self.setting.axis_name, self.permutation)
