"""Execute: run a lowered program on one rank's buffer, inside any context with the axis bound.

A buffer has shape ``[chunks, rows, width]`` (and whatever batch dimensions follow), so that a chunk
is contiguous. Knows permutations and tables only; what they are for is the planner's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.errors import CollectiveError
from ftmesh.execute import _compat
from ftmesh.execute.lower import IDLE, Lane, Loop, Program, Rule, Table
from ftmesh.schedule.columns import ADD, COPY


def all_reduce(buffer: jax.Array, *, axis_name: Any, program: Program, wire: Any) -> jax.Array:
    """Every rank's buffer summed, the same at all ranks."""
    return _all_reduce.bind(buffer, axis_name=axis_name, program=program, wire=wire)


def reduce_scatter(buffer: jax.Array, *, axis_name: Any, program: Program, wire: Any) -> jax.Array:
    """The first half: chunks are sums at their owners, and anything elsewhere."""
    return _reduce_scatter.bind(buffer, axis_name=axis_name, program=program, wire=wire)


def all_gather(buffer: jax.Array, *, axis_name: Any, program: Program, wire: Any) -> jax.Array:
    """The second half: every rank gets each chunk as its owner has it."""
    return _all_gather.bind(buffer, axis_name=axis_name, program=program, wire=wire)


def gather_invariant(
    buffer: jax.Array, *, axis_name: Any, program: Program, wire: Any
) -> jax.Array:
    """As `all_gather`, typed as the same at all ranks."""
    return _gather_invariant.bind(buffer, axis_name=axis_name, program=program, wire=wire)


@dataclass(frozen=True)
class Setting:
    """Where a program runs: along which axis, how chunks travel, and whether a vmap stands in."""

    axis_name: Any
    num_ranks: int
    wire: Any  # the dtype in which chunks travel; None for their own
    emulated: bool


def run_loop(
    buffer: jax.Array, loop: Loop, setting: Setting, *, unrolled: bool = False
) -> jax.Array:
    """Run the rounds of a loop on one rank."""
    rank = lax.axis_index(setting.axis_name)
    lanes = [_Lane(lane, rank, setting) for lane in loop.lanes]

    def one_round(now: Any, buffer: jax.Array) -> jax.Array:
        # Barriers let the compiler start all lanes of a round before it waits for the first.
        out = lax.optimization_barrier(tuple(lane.read(buffer, now) for lane in lanes))
        arrived = tuple(lane.carry(x) for lane, x in zip(lanes, out, strict=True))
        arrived = lax.optimization_barrier(arrived)
        for lane, x in zip(lanes, arrived, strict=True):
            buffer = lane.write(buffer, x, now)
        return buffer

    if unrolled:
        for now in range(loop.num_rounds):
            buffer = one_round(now, buffer)
        return buffer
    return lax.fori_loop(0, loop.num_rounds, one_round, buffer)


class _Lane:
    """A lane as one rank sees it."""

    def __init__(self, lane: Lane, rank: Any, setting: Setting) -> None:
        self.lane = lane
        self.setting = setting
        self.permutation = lane.permutation
        if setting.emulated:
            self.permutation = _completed(lane.permutation, setting.num_ranks)
        source = jnp.asarray(lane.source)[rank]
        self.receives = source >= 0
        self.sent = _chunk_of(lane.send, rank)
        self.received = _chunk_of(lane.send, jnp.maximum(source, 0))

    def read(self, buffer: jax.Array, now: Any) -> jax.Array:
        """What the rank sends; anything, where it has nothing to send."""
        x = lax.dynamic_slice_in_dim(buffer, jnp.maximum(self.sent(now), 0), self.lane.count)
        return x if self.setting.wire is None else x.astype(self.setting.wire)

    def carry(self, x: jax.Array) -> jax.Array:
        """What the rank receives, when every rank sends its `x`."""
        return lax.ppermute(x, self.setting.axis_name, self.permutation)

    def write(self, buffer: jax.Array, x: jax.Array, now: Any) -> jax.Array:
        """The buffer with what arrived added to, or put in place of, the chunk it is for."""
        x, chunk = x.astype(buffer.dtype), self.received(now)
        if self.lane.is_full and self.lane.op == COPY:
            return lax.dynamic_update_slice_in_dim(buffer, x, chunk, 0)
        something = self.receives & (chunk != IDLE)
        chunk = jnp.maximum(chunk, 0)
        here = lax.dynamic_slice_in_dim(buffer, chunk, self.lane.count)
        new = here + x if self.lane.op == ADD else x
        if not self.lane.is_full:
            new = jnp.where(something, new, here)
        return lax.dynamic_update_slice_in_dim(buffer, new, chunk, 0)


def _chunk_of(index: Table | Rule, rank: Any) -> Any:
    """The chunk that `rank` sends, as a function of the round; IDLE for none."""
    if isinstance(index, Rule):
        first, place = jnp.asarray(index.first)[rank], jnp.asarray(index.place)[rank]
        return lambda now: first + (place + index.step * now) % index.size * index.count
    base = jnp.asarray(index.base)[rank]
    row = jnp.asarray(index.rows)[jnp.asarray(index.row)[rank]]
    return lambda now: jnp.where(row[now] == IDLE, IDLE, base + row[now])


def _completed(
    permutation: tuple[tuple[int, int], ...], num_ranks: int
) -> tuple[tuple[int, int], ...]:
    """A partial permutation with the ranks left over paired up; what those get is ignored."""
    sources, targets = ({pair[end] for pair in permutation} for end in (0, 1))
    idle = [r for r in range(num_ranks) if r not in sources]
    waiting = [r for r in range(num_ranks) if r not in targets]
    return (*permutation, *zip(idle, waiting, strict=True))


def _run(*, scatter: bool, gather: bool) -> Any:
    def run(buffer: Any, *, axis_name: Any, program: Program, wire: Any, emulated: bool) -> Any:
        setting = Setting(axis_name, program.num_ranks, wire, emulated)
        for loop in program.scatter if scatter else ():
            buffer = run_loop(buffer, loop, setting, unrolled=program.unrolled)
        if scatter and gather and wire is not None:
            buffer = buffer.astype(wire).astype(buffer.dtype)  # owners keep what others get
        for loop in program.gather if gather else ():
            buffer = run_loop(buffer, loop, setting, unrolled=program.unrolled)
        if len(program.live) < program.num_ranks:
            buffer = _spoilt_where_idle(buffer, axis_name, program)
        return buffer

    return run


def _spoilt_where_idle(buffer: jax.Array, axis_name: Any, program: Program) -> jax.Array:
    """Idle devices return nothing that could be taken for a result: NaN, or the lowest integer."""
    idle = np.ones(program.num_ranks, np.bool_)
    idle[program.live] = False
    inexact = jnp.issubdtype(buffer.dtype, np.inexact)
    nonsense = jnp.nan if inexact else jnp.iinfo(buffer.dtype).min
    here = jnp.asarray(idle)[lax.axis_index(axis_name)]
    return jnp.where(here, jnp.asarray(nonsense, buffer.dtype), buffer)


def _check_mesh(mesh: jax.sharding.Mesh, *, axis_name: Any, program: Program, wire: Any) -> None:
    """The mesh has the plan's devices in the plan's order, where both are known."""
    expected = program.devices
    if not expected or mesh.size != len(expected):
        return
    for rank, (want, have) in enumerate(zip(expected, mesh.devices.flat, strict=True)):
        if want != have:
            raise CollectiveError(
                f"the plan is for other devices, or another order, than the mesh of axis "
                f"{axis_name!r}: rank {rank} should be {want} and is {have}; make the mesh with "
                f"plan.jax_mesh({axis_name!r})"
            )


_all_reduce = _compat.linear_collective(
    "ftmesh_all_reduce",
    _run(scatter=True, gather=True),
    lambda cotangent, **params: all_reduce(cotangent, **params),
    check_mesh=_check_mesh,
    makes_invariant=True,
)
_reduce_scatter = _compat.linear_collective(
    "ftmesh_reduce_scatter",
    _run(scatter=True, gather=False),
    lambda cotangent, **params: all_gather(cotangent, **params),
    check_mesh=_check_mesh,
    makes_invariant=False,
)
_all_gather = _compat.linear_collective(
    "ftmesh_all_gather",
    _run(scatter=False, gather=True),
    lambda cotangent, **params: reduce_scatter(cotangent, **params),
    check_mesh=_check_mesh,
    makes_invariant=False,
)
_gather_invariant = _compat.linear_collective(
    "ftmesh_gather_invariant",
    _run(scatter=False, gather=True),
    lambda cotangent, **params: reduce_scatter(cotangent, **params),
    check_mesh=_check_mesh,
    makes_invariant=True,
)
