"""Owners: the two halves of an all-reduce by themselves, with the owners of chunks in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from ftmesh.collectives.calls import as_summand, the_axis
from ftmesh.collectives.precision import precision
from ftmesh.errors import CollectiveError
from ftmesh.execute import _compat, primitives
from ftmesh.execute.lowering import Program
from ftmesh.layout.buckets import chunk_shape, pack

if TYPE_CHECKING:
    from ftmesh.planning.plan import Plan


def reduce_to_owners(
    x: jax.Array,
    axis_name: Any,
    *,
    plan: Plan,
    mean: bool = False,
    wire_dtype: Any = None,
    accumulate_dtype: Any = None,
) -> Any:
    """The sum of a vector, left with the owners of the schedule's chunks: for sharded optimizers.

    Returns a vector as long at every rank: this rank's chunks of the sum in ascending order, and
    zeros behind them at ranks that own fewer than others, or none at all. With `mean` it is the
    mean over all live ranks, divided before it is rounded. The dtypes are as for `psum`.
    """
    axis_name = the_axis(axis_name, None, plan, "reduce_to_owners")
    plan = plan.halves
    program = plan.program
    check_owned(plan)
    x = as_summand(x, axis_name)
    if x.ndim != 1:
        raise CollectiveError(
            f"reduce_to_owners takes a vector, not an array of shape {x.shape}: give it x.ravel(), "
            "and shape what gather_from_owners returns"
        )
    mine = scatter_chunks(
        pack([x], program.num_chunks),
        axis_name,
        plan=plan,
        mean=mean,
        wire_dtype=wire_dtype,
        accumulate_dtype=accumulate_dtype,
    )
    return mine.reshape(-1)


def scatter_chunks(
    buffer: jax.Array,
    axis_name: Any,
    *,
    plan: Plan,
    mean: bool = False,
    wire_dtype: Any = None,
    accumulate_dtype: Any = None,
) -> jax.Array:
    """The chunks that this rank owns of the sum of buffers; see `reduce_to_owners`."""
    program = plan.halves.program
    kind = precision(buffer.dtype, wire_dtype, accumulate_dtype)
    mine = own_chunks(
        primitives.reduce_scatter(
            buffer.astype(kind.sums),
            axis_name=axis_name,
            program=program,
            wire=kind.wire(program.depth),
        ),
        axis_name,
        program,
    )
    if mean:
        mine = mine / len(program.live)
    return mine.astype(buffer.dtype) if jnp.issubdtype(buffer.dtype, jnp.inexact) else mine


def gather_from_owners(
    shard: jax.Array, axis_name: Any, *, plan: Plan, size: int, wire_dtype: Any = None
) -> Any:
    """The inverse of `reduce_to_owners`: a vector of `size` elements put together at every rank.

    It travels in `wire_dtype`, rounded once, or as it is.
    """
    axis_name = the_axis(axis_name, None, plan, "gather_from_owners")
    plan = plan.halves
    program = plan.program
    check_owned(plan)
    chunks = shard.reshape(-1, *_shape_of_chunks(shard, size, program))
    buffer = gather_chunks(chunks, axis_name, plan=plan, wire_dtype=wire_dtype)
    return buffer.reshape(-1)[:size]


def gather_chunks(
    chunks: jax.Array, axis_name: Any, *, plan: Plan, wire_dtype: Any = None
) -> jax.Array:
    """The buffer of which every rank has its chunks; see `gather_from_owners`."""
    program = plan.halves.program
    kind = precision(chunks.dtype, wire_dtype)
    buffer = primitives.gather_invariant(
        place_chunks(chunks.astype(kind.sums), axis_name, program),  # as its derivative is added up
        axis_name=axis_name,
        program=program,
        wire=kind.wire(program.depth),
    )
    return buffer.astype(chunks.dtype)


def _shape_of_chunks(shard: jax.Array, size: int, program: Program) -> tuple[int, int]:
    """The shape in which `reduce_to_owners` left each chunk, whatever dtype the vector had then."""
    shapes = {chunk_shape(size, program.num_chunks, itemsize) for itemsize in (1, 2, 4, 8)}
    for rows, width in shapes:
        if shard.shape == (program.owned.shape[1] * rows * width,):
            return rows, width
    raise CollectiveError(
        f"a shard of shape {shard.shape} is not one of a vector of {size} elements on this plan: "
        "give what reduce_to_owners returned, and the size of what it was given"
    )


def check_owned(plan: Plan) -> None:
    """Refuses a plan whose schedule has no halves."""
    if plan.program.owner is None:
        raise CollectiveError(
            f"algorithm {plan.algorithm!r} has no reduce-scatter half, so nobody owns a chunk and "
            "nothing can be sharded: plan with one that has, such as 'ring' or 'row_pair'"
        )


def own_chunks(buffer: jax.Array, axis_name: Any, program: Program) -> jax.Array:
    """The chunks of this rank; zeros in place of those it has fewer of than other ranks."""
    mine = jnp.asarray(program.owned)[lax.axis_index(axis_name)]
    return jnp.take(buffer, mine, axis=0, mode="fill", fill_value=0)


def place_chunks(chunks: jax.Array, axis_name: Any, program: Program) -> jax.Array:
    """A buffer with this rank's chunks in their places, for an all-gather to put the others in.

    Elsewhere it has anything, as all of it is written at every live rank, and a TPU takes as long
    to fill it as to pack it. Idle ranks get nothing: where there are any it has zeros.
    """
    mine = jnp.asarray(program.owned)[lax.axis_index(axis_name)]
    make = lax.empty if len(program.live) == program.num_ranks else jnp.zeros
    buffer = make((program.num_chunks, *chunks.shape[1:]), chunks.dtype)
    return _compat.varying_as(buffer, chunks).at[mine].set(chunks, mode="drop")
