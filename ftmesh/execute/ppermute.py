"""Execute: run a lowered program on one rank's buffer, inside any context with the axis bound.

A buffer has shape ``[chunks, rows, width]`` (and whatever batch dimensions follow), so that a chunk
is contiguous. Knows permutations and tables only; what they are for is the planner's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ftmesh.execute import _compat
from ftmesh.execute.idle import completed, of_live, with_idle_ones
from ftmesh.execute.lower import PALLAS, Lane, Loop, Program
from ftmesh.execute.numbers import Arrival, Round, rounds_of
from ftmesh.execute.placement import check_devices
from ftmesh.schedule.columns import ADD, COPY


@dataclass(frozen=True)
class Wire:
    """The dtypes in which partial sums and results travel; None for the buffer's own."""

    partials: Any = None
    results: Any = None


OWN = Wire()
Run = Callable[[jax.Array, Any, int], jax.Array]


def all_reduce(
    buffer: jax.Array,
    *,
    axis_name: Any,
    program: Program,
    wire: Wire = OWN,
    divisor: int | None = None,
) -> jax.Array:
    """Every rank's buffer summed, the same at all ranks.

    A sum is divided by `divisor`, if there is one, before it is rounded to the dtype of results.
    """
    return _all_reduce.bind(
        buffer, axis_name=axis_name, program=program, wire=wire, divisor=divisor
    )


def sum_varying(
    buffer: jax.Array,
    *,
    axis_name: Any,
    program: Program,
    wire: Wire = OWN,
    divisor: int | None = None,
) -> jax.Array:
    """As `all_reduce`, typed as what may differ: for sums of which each rank takes a part."""
    return _sum_varying.bind(
        buffer, axis_name=axis_name, program=program, wire=wire, divisor=divisor
    )


def spread(
    buffer: jax.Array,
    *,
    axis_name: Any,
    program: Program,
    wire: Wire = OWN,
    divisor: int | None = None,
) -> jax.Array:
    """The transpose of `all_reduce`: what all ranks have, typed as what may differ, if live."""
    return _spread.bind(buffer, axis_name=axis_name, program=program, wire=wire, divisor=divisor)


def reduce_scatter(
    buffer: jax.Array, *, axis_name: Any, program: Program, wire: Wire = OWN
) -> jax.Array:
    """The first half: chunks are sums at their owners, and anything elsewhere."""
    return _reduce_scatter.bind(buffer, axis_name=axis_name, program=program, wire=wire)


def all_gather(
    buffer: jax.Array, *, axis_name: Any, program: Program, wire: Wire = OWN
) -> jax.Array:
    """The second half: every rank gets each chunk as its owner has it."""
    return _all_gather.bind(buffer, axis_name=axis_name, program=program, wire=wire)


def gather_invariant(
    buffer: jax.Array, *, axis_name: Any, program: Program, wire: Wire = OWN
) -> jax.Array:
    """As `all_gather`, typed as the same at all ranks."""
    return _gather_invariant.bind(buffer, axis_name=axis_name, program=program, wire=wire)


def spread_to_owners(
    buffer: jax.Array, *, axis_name: Any, program: Program, wire: Wire = OWN
) -> jax.Array:
    """The transpose of `gather_invariant`: what all ranks have, typed as what may differ."""
    return _spread_to_owners.bind(buffer, axis_name=axis_name, program=program, wire=wire)


@dataclass(frozen=True)
class Setting:
    """Where a program runs: along which axis, how chunks travel, and whether a vmap stands in."""

    axis_name: Any
    num_ranks: int
    wire: Wire
    emulated: bool


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
        for now in rounds(first, how_many):
            buffer = _one_round(buffer, lanes, now)
        return buffer

    return at_once, run


def _one_round(buffer: jax.Array, lanes: Sequence[_Lane], now: Round) -> jax.Array:
    # Barriers let the compiler start all lanes of a round before it waits for the first.
    out = tuple(lane.read(buffer, chunk) for lane, chunk in zip(lanes, now.sent, strict=True))
    out = lax.optimization_barrier(out)
    arrived = tuple(lane.carry(x) for lane, x in zip(lanes, out, strict=True))
    arrived = lax.optimization_barrier(arrived)
    for arrival in now.arrivals:
        buffer = _written(buffer, arrived, arrival, lanes[arrival.lanes[0]].lane)
    return buffer


def _written(
    buffer: jax.Array, arrived: Sequence[jax.Array], arrival: Arrival, lane: Lane
) -> jax.Array:
    """The buffer with what arrived added to, or put in place of, the chunk it is for."""
    is_sure = lane.is_full and len(arrival.lanes) == 1
    if is_sure and lane.op == COPY:
        return lax.dynamic_update_slice_in_dim(
            buffer, arrived[arrival.lanes[0]].astype(buffer.dtype), arrival.chunk, 0
        )
    place = jnp.maximum(arrival.chunk, 0)
    new = lax.dynamic_slice_in_dim(buffer, place, lane.count)
    for number in arrival.lanes:
        x = arrived[number].astype(buffer.dtype)
        after = new + x if lane.op == ADD else x
        new = after if is_sure else jnp.where(arrival.comes_by(number), after, new)
    return lax.dynamic_update_slice_in_dim(buffer, new, place, 0)


class _Lane:
    """A lane as one rank sees it."""

    def __init__(self, lane: Lane, setting: Setting) -> None:
        self.lane = lane
        self.setting = setting
        self.permutation = lane.permutation
        if setting.emulated:
            self.permutation = completed(lane.permutation, setting.num_ranks)

    def read(self, buffer: jax.Array, chunk: Any) -> jax.Array:
        """What the rank sends; anything, where it has nothing to send."""
        if not self.lane.is_full:
            chunk = jnp.maximum(chunk, 0)
        x = lax.dynamic_slice_in_dim(buffer, chunk, self.lane.count)
        wire = self.setting.wire
        return _as(x, wire.partials if self.lane.op == ADD else wire.results)

    def carry(self, x: jax.Array) -> jax.Array:
        """What the rank receives, when every rank sends its `x`."""
        return lax.ppermute(x, self.setting.axis_name, self.permutation)


def _loops(
    buffer: jax.Array, loops: tuple[Loop, ...], program: Program, setting: Setting
) -> jax.Array:
    if program.executor == PALLAS:
        return _pallas().run_loops(
            buffer,
            loops,
            program,
            axis_name=setting.axis_name,
            wire=setting.wire.partials,
            emulated=setting.emulated,
        )
    for loop in loops:
        buffer = run_loop(buffer, loop, setting, unrolled=program.unrolled)
    return buffer


def _pallas() -> Any:
    """Imported where it is asked for: it brings much of JAX with it."""
    from ftmesh.execute import pallas

    return pallas


def _is_interpreted(*, program: Program, **_: Any) -> bool:
    return program.executor == PALLAS and bool(_pallas().is_interpreted(program))


def _run_all(
    buffer: Any, *, axis_name: Any, program: Program, wire: Wire, divisor: Any, emulated: bool
) -> Any:
    setting = Setting(axis_name, program.num_ranks, OWN, emulated)
    if program.scatter and (wire != OWN or divisor is not None):
        options = {"axis_name": axis_name, "program": program, "wire": wire, "emulated": emulated}
        sums = _run_first(buffer, **options)
        return _run_second(_divided(sums, divisor), **options)
    # Without halves nothing tells partial sums from results: all travels as it is added, and is
    # divided and rounded at the end.
    total = _divided(_loops(buffer, program.loops, program, setting), divisor)
    if wire.results is None:
        return total
    return lax.optimization_barrier(total.astype(wire.results)).astype(buffer.dtype)


def _run_first(buffer: Any, *, axis_name: Any, program: Program, wire: Wire, emulated: bool) -> Any:
    partials = Wire(wire.partials, wire.partials)
    setting = Setting(axis_name, program.num_ranks, partials, emulated)
    return _loops(buffer, program.scatter, program, setting)


def _run_second(
    buffer: Any, *, axis_name: Any, program: Program, wire: Wire, emulated: bool
) -> Any:
    setting = Setting(axis_name, program.num_ranks, OWN, emulated)
    # Owners keep what others get. A buffer that is rounded and at once made wide again would not
    # do: compilers that allow excess precision take the two for nothing.
    rounded = _loops(_as(buffer, wire.results), program.gather, program, setting)
    return rounded.astype(buffer.dtype)


def _as(x: jax.Array, dtype: Any) -> jax.Array:
    return x if dtype is None else x.astype(dtype)


def _divided(x: jax.Array, divisor: int | None) -> jax.Array:
    return x if divisor is None else x / divisor


def _check_mesh(mesh: jax.sharding.Mesh, *, axis_name: Any, program: Program, **_: Any) -> None:
    check_devices(mesh.devices, mesh.axis_names, axis_name, *program.lines)


# Transposes ------------------------------------------------------------------------------------
#
# An idle rank brings nothing to a sum, so that nothing comes back to it; and it has every result,
# so that what comes back for its own counts like that of the others. What is typed as the same at
# all ranks is spread where it is to vary: JAX's own cast would be transposed into JAX's own sum.


def _run_spread(
    x: Any, *, axis_name: Any, program: Program, wire: Wire, divisor: Any, emulated: bool
) -> Any:
    return of_live(_divided(x, divisor), axis_name, program)


def _transposed_sum(cotangent: Any, *, axis_name: Any, program: Program, **params: Any) -> Any:
    whole = with_idle_ones(cotangent, axis_name, program)
    total = sum_varying(whole, axis_name=axis_name, program=program, **params)
    return of_live(total, axis_name, program)


def _transposed_scatter(cotangent: Any, *, axis_name: Any, program: Program, **params: Any) -> Any:
    every = all_gather(cotangent, axis_name=axis_name, program=program, **params)
    return of_live(every, axis_name, program)


def _transposed_gather(cotangent: Any, *, axis_name: Any, program: Program, **params: Any) -> Any:
    whole = with_idle_ones(cotangent, axis_name, program)
    return reduce_scatter(whole, axis_name=axis_name, program=program, **params)


_all_reduce = _compat.linear_collective(
    "all_reduce",
    _run_all,
    _transposed_sum,
    spread,
    check_mesh=_check_mesh,
    is_interpreted=_is_interpreted,
)
_spread = _compat.linear_collective(
    "spread", _run_spread, all_reduce, makes_varying=True, check_mesh=_check_mesh
)
_sum_varying = _compat.linear_collective(
    "sum_varying", _run_all, _transposed_sum, check_mesh=_check_mesh, is_interpreted=_is_interpreted
)
_reduce_scatter = _compat.linear_collective(
    "reduce_scatter",
    _run_first,
    _transposed_scatter,
    check_mesh=_check_mesh,
    is_interpreted=_is_interpreted,
)
_all_gather = _compat.linear_collective(
    "all_gather",
    _run_second,
    _transposed_gather,
    check_mesh=_check_mesh,
    is_interpreted=_is_interpreted,
)
_gather_invariant = _compat.linear_collective(
    "gather_invariant",
    _run_second,
    _transposed_gather,
    spread_to_owners,
    check_mesh=_check_mesh,
    is_interpreted=_is_interpreted,
)
_spread_to_owners = _compat.linear_collective(
    "spread_to_owners",
    lambda x, **_: x,
    gather_invariant,
    makes_varying=True,
    check_mesh=_check_mesh,
)
