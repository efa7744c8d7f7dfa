"""The executor that runs everywhere: rounds of `lax.ppermute` in loops, on one rank's buffer.

A buffer has shape ``[chunks, rows, width]``, followed by any batch dimensions, so a chunk is
contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.execute.chunk_lookup import Arrival, RankRound, round_lookup
from ftmesh.execute.context import ExecutionContext, complete_permutation
from ftmesh.execute.lowering import Lane, Loop, Program
from ftmesh.schedule.transfers import ADD, COPY

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
