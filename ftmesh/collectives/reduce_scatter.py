"""Reduce-scatter and all-gather, along the routes of a plan.

`psum_scatter` and `all_gather` are those of `jax.lax`. They run their phase of the schedule alone
if every rank owns the same number of chunks, and otherwise the whole all-reduce.
`reduce_to_owners` and `gather_from_owners` leave chunks with the ranks that own them in the
schedule, whatever their number: sharded optimizers use these.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.collectives import native
from ftmesh.collectives.operands import (
    Precision,
    as_numbers,
    as_operand,
    check_call,
    choose_precision,
)
from ftmesh.collectives.partitioning import gather_spec, map_local_shards, scatter_spec
from ftmesh.errors import CollectiveError
from ftmesh.execute import _compat, primitives
from ftmesh.execute.lowering import XLA, Program
from ftmesh.execute.types import AxisName, DTypeLike, PlanLike, PyTree, Specs
from ftmesh.layout.buckets import Packing, pack, unpack


def psum_scatter(
    x: PyTree,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: None = None,
    tiled: bool = False,
    plan: PlanLike,
    wire_dtype: DTypeLike | None = None,
    accumulate_dtype: DTypeLike | None = None,
    specs: Specs = None,
) -> PyTree:
    """Sum `x` over all ranks and give each rank its block, as `jax.lax.psum_scatter` does.

    Args:
        x: An array or a pytree of arrays. A leaf that is sharded along another mesh axis in
            `scatter_dimension` is gathered over that axis first.
        scatter_dimension: The dimension that is split among the ranks.
        tiled: Whether the dimension stays, shorter by the number of ranks, as in lax.
        plan: A plan without idle devices. An algorithm without a reduce-scatter phase is replaced
            by one that has it (`Plan.with_reduce_scatter`).
        axis_name, axis_index_groups, wire_dtype, accumulate_dtype, specs: As for `psum`.
    """
    axis_name = check_call("psum_scatter", axis_name, axis_index_groups, plan, needs_all_ranks=True)
    program = plan.with_reduce_scatter.program
    num_ranks = program.num_ranks

    def scatter(leaf: Any) -> jax.Array:
        if jnp.result_type(leaf) == np.bool_:
            raise CollectiveError("psum_scatter takes no booleans, as in lax: cast them")
        leaf = as_operand(leaf, axis_name)
        _check_divisible(leaf.shape, scatter_dimension, num_ranks, tiled)
        shape = list(leaf.shape)
        length = shape[scatter_dimension] // num_ranks
        shape[scatter_dimension : scatter_dimension + 1] = [num_ranks, length]
        blocks = jnp.moveaxis(leaf.reshape(shape), scatter_dimension, 0)
        precision = choose_precision(leaf.dtype, wire_dtype, accumulate_dtype)
        block = blocks[0]
        if leaf.size:
            wide = blocks.astype(precision.sum_dtype)
            block = _scatter_blocks(wide, axis_name, program, precision)
        block = _compat.weak_like(block.astype(leaf.dtype), leaf)
        return block if tiled else jnp.squeeze(block, scatter_dimension)

    change = scatter_spec(scatter_dimension, tiled=tiled)
    return map_local_shards(partial(jax.tree.map, scatter), x, specs, change=change)


def all_gather(
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: None = None,
    axis: int = 0,
    tiled: bool = False,
    plan: PlanLike,
    specs: Specs = None,
) -> PyTree:
    """Give every rank the `x` of all ranks, as `jax.lax.all_gather` does.

    If the whole all-reduce runs, zeros are added to each value, and some processors flush denormal
    numbers to zero in that.

    Args:
        x: An array or a pytree of arrays.
        axis: The dimension of the result along which ranks are stacked.
        tiled: Whether ranks are concatenated along an existing dimension, as in lax.
        axis_name, axis_index_groups, plan, specs: As for `psum_scatter`.
    """
    axis_name = check_call("all_gather", axis_name, axis_index_groups, plan, needs_all_ranks=True)
    program = plan.with_reduce_scatter.program
    num_ranks = program.num_ranks

    def gather(leaf: Any) -> jax.Array:
        leaf = _as_varying(jnp.asarray(leaf), axis_name, program)
        ndim = leaf.ndim if tiled else leaf.ndim + 1
        if not -ndim <= axis < ndim:
            raise CollectiveError(
                f"the axis of all_gather is {axis}, and must be from {-ndim} to {ndim - 1}"
            )
        stacked = jnp.broadcast_to(leaf, (num_ranks, *leaf.shape))
        if leaf.size and program.executor == XLA:
            stacked = native.all_gather(leaf, axis_name, program)
        elif leaf.size:
            flat = as_numbers(jnp.ravel(leaf))
            precision = choose_precision(flat.dtype)
            flat = flat.astype(precision.sum_dtype)  # the dtype in which the derivative is summed
            stacked = _gather_blocks(flat, axis_name, program, precision).reshape(stacked.shape)
        stacked = _compat.weak_like(stacked.astype(leaf.dtype), leaf)
        stacked = jnp.moveaxis(stacked, 0, axis % ndim)
        if not tiled:
            return stacked
        shape = list(leaf.shape)
        shape[axis] *= num_ranks
        return stacked.reshape(shape)

    change = gather_spec(axis, tiled=tiled)
    return map_local_shards(partial(jax.tree.map, gather), x, specs, change=change)


def reduce_to_owners(
    x: jax.Array,
    axis_name: AxisName,
    *,
    plan: PlanLike,
    mean: bool = False,
    wire_dtype: DTypeLike | None = None,
    accumulate_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Sum a vector over all live ranks, and leave each chunk with its owner.

    Args:
        x: A vector.
        plan: A plan whose algorithm, or a replacement of it, has a reduce-scatter phase.
        mean: Divide by the number of live ranks, before rounding.
        axis_name, wire_dtype, accumulate_dtype: As for `psum`.

    Returns:
        The chunks that this rank owns, in ascending order, as a vector. Its length is the same on
        all ranks: zeros pad it on ranks that own fewer chunks, or none.
    """
    axis_name = check_call("reduce_to_owners", axis_name, None, plan)
    check_has_owners(plan.with_reduce_scatter)
    x = as_operand(x, axis_name)
    if x.ndim != 1:
        raise CollectiveError(
            f"reduce_to_owners takes a vector, not an array of shape {x.shape}: give it x.ravel(), "
            "and reshape what gather_from_owners returns"
        )
    chunks = scatter_chunks(
        pack([x], plan.with_reduce_scatter.program.num_chunks),
        axis_name,
        plan=plan,
        mean=mean,
        wire_dtype=wire_dtype,
        accumulate_dtype=accumulate_dtype,
    )
    return chunks.reshape(-1)


def gather_from_owners(
    shard: jax.Array,
    axis_name: AxisName,
    *,
    plan: PlanLike,
    size: int,
    wire_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Gather on every rank the vector that `reduce_to_owners` left with the owners.

    Args:
        shard: What `reduce_to_owners` returned, or a vector of that shape.
        axis_name, plan: As given to `reduce_to_owners`.
        size: The number of elements of the whole vector.
        wire_dtype: The dtype in which elements are sent, rounded once; their own by default.
    """
    axis_name = check_call("gather_from_owners", axis_name, None, plan)
    plan = plan.with_reduce_scatter
    check_has_owners(plan)
    chunks = shard.reshape(-1, *_find_chunk_shape(shard, size, plan.program))
    buffer = gather_chunks(chunks, axis_name, plan=plan, wire_dtype=wire_dtype)
    return buffer.reshape(-1)[:size]


def scatter_chunks(
    buffer: jax.Array,
    axis_name: AxisName,
    *,
    plan: PlanLike,
    mean: bool = False,
    wire_dtype: DTypeLike | None = None,
    accumulate_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Sum a packed buffer, and return the chunks that this rank owns. See `reduce_to_owners`."""
    program = plan.with_reduce_scatter.program
    precision = choose_precision(buffer.dtype, wire_dtype, accumulate_dtype)
    wide, wire = buffer.astype(precision.sum_dtype), precision.wire(program.depth)
    sums = primitives.reduce_scatter(wide, axis_name=axis_name, program=program, wire=wire)
    chunks = take_owned_chunks(sums, axis_name, program)
    if mean:
        chunks = chunks / len(program.live)
    return chunks.astype(buffer.dtype) if jnp.issubdtype(buffer.dtype, jnp.inexact) else chunks


def gather_chunks(
    chunks: jax.Array, axis_name: AxisName, *, plan: PlanLike, wire_dtype: DTypeLike | None = None
) -> jax.Array:
    """Gather the buffer of which every rank has its own chunks. See `gather_from_owners`."""
    program = plan.with_reduce_scatter.program
    precision = choose_precision(chunks.dtype, wire_dtype)
    wide = chunks.astype(precision.sum_dtype)  # the dtype in which the derivative is summed
    part, wire = put_owned_chunks(wide, axis_name, program), precision.wire(program.depth)
    whole = primitives.all_gather_invariant(part, axis_name=axis_name, program=program, wire=wire)
    return whole.astype(chunks.dtype)


def check_has_owners(plan: PlanLike) -> None:
    """Raise CollectiveError if the schedule has no reduce-scatter phase."""
    if plan.program.owner is None:
        raise CollectiveError(
            f"algorithm {plan.algorithm!r} has no reduce-scatter phase, so no rank owns a chunk "
            "and nothing can be sharded: plan with one that has, such as 'ring' or 'row_pair'"
        )


def take_owned_chunks(buffer: jax.Array, axis_name: AxisName, program: Program) -> jax.Array:
    """The chunks of this rank, with zeros for those it has fewer than other ranks."""
    owned = jnp.asarray(program.owned_chunks)[lax.axis_index(axis_name)]
    return jnp.take(buffer, owned, axis=0, mode="fill", fill_value=0)


def put_owned_chunks(chunks: jax.Array, axis_name: AxisName, program: Program) -> jax.Array:
    """A buffer with this rank's chunks in place, for an all-gather to fill in the others.

    The rest is uninitialised: the all-gather writes all of it on live ranks, and on a TPU zeros
    would take as long as packing. Idle ranks receive nothing, so with them the rest is zeros.
    """
    owned = jnp.asarray(program.owned_chunks)[lax.axis_index(axis_name)]
    make = lax.empty if len(program.live) == program.num_ranks else jnp.zeros
    buffer = make((program.num_chunks, *chunks.shape[1:]), chunks.dtype)
    return _compat.varying_like(buffer, chunks).at[owned].set(chunks, mode="drop")


def _scatter_blocks(
    blocks: jax.Array, axis_name: AxisName, program: Program, precision: Precision
) -> jax.Array:
    """The block of this rank, of the sum of ``blocks[rank, ...]``."""
    if program.executor == XLA:
        return native.reduce_scatter(blocks, axis_name, program, precision, 0)[0]
    if not program.owns_evenly:
        sums = _all_reduce_blocks(blocks, axis_name, program, precision)
        return lax.dynamic_index_in_dim(sums, lax.axis_index(axis_name), keepdims=False)
    owned, wire = program.owned_chunks, precision.wire(program.depth)
    parts = jax.vmap(lambda block: pack([block], owned.shape[1]))(blocks)
    parts = parts.reshape(program.num_chunks, *parts.shape[2:])
    buffer = parts[np.argsort(owned.reshape(-1))]
    buffer = primitives.reduce_scatter(buffer, axis_name=axis_name, program=program, wire=wire)
    (block,) = unpack(take_owned_chunks(buffer, axis_name, program), [blocks.shape[1:]])
    return block


def _gather_blocks(
    block: jax.Array, axis_name: AxisName, program: Program, precision: Precision
) -> jax.Array:
    """The vector of every rank, ``[rank, element]``."""
    num_ranks = program.num_ranks
    if not program.owns_evenly:
        # Adding minus zero leaves every number unchanged, plus zero does not (-0.0 + 0.0 = 0.0).
        zero: Any = -0.0 if jnp.issubdtype(block.dtype, np.inexact) else 0
        if jnp.issubdtype(block.dtype, np.complexfloating):
            zero = complex(-0.0, -0.0)
        blocks = _compat.varying_like(jnp.full((num_ranks, block.size), zero, block.dtype), block)
        blocks = lax.dynamic_update_index_in_dim(blocks, block, lax.axis_index(axis_name), 0)
        return _all_reduce_blocks(blocks, axis_name, program, precision)
    owned, wire = program.owned_chunks, precision.wire(program.depth)
    chunks = pack([block], owned.shape[1], precision.result_dtype.itemsize)
    buffer = put_owned_chunks(chunks, axis_name, program)
    buffer = primitives.all_gather(buffer, axis_name=axis_name, program=program, wire=wire)
    return buffer[owned.reshape(-1)].reshape(num_ranks, -1)[:, : block.size]


def _all_reduce_blocks(
    blocks: jax.Array, axis_name: AxisName, program: Program, precision: Precision
) -> Any:
    buffer = pack([blocks], program.num_chunks, precision.result_dtype.itemsize)
    wire = precision.wire(program.depth)
    total = primitives.all_reduce_varying(buffer, axis_name=axis_name, program=program, wire=wire)
    return unpack(total, [blocks.shape])[0]


def _as_varying(leaf: jax.Array, axis_name: AxisName, program: Program) -> jax.Array:
    """Mark a replicated leaf as varying, so that the plan and not JAX sums its gradient."""
    is_replicated = _compat.checks_vma() and axis_name not in _compat.varying_axes(leaf)
    is_differentiable = leaf.size and jnp.issubdtype(leaf.dtype, np.inexact)
    if not is_replicated or not is_differentiable or program.executor == XLA:
        return _compat.as_varying(leaf, axis_name)
    buffer = pack([leaf.astype(choose_precision(leaf.dtype).sum_dtype)], program.num_chunks)
    spread = primitives.all_reduce_transpose(buffer, axis_name=axis_name, program=program)
    (varying,) = unpack(spread, [leaf.shape])
    return _compat.weak_like(varying.astype(leaf.dtype), leaf)


def _check_divisible(shape: tuple[int, ...], dimension: int, num_ranks: int, tiled: bool) -> None:
    if not 0 <= dimension < len(shape):
        raise CollectiveError(
            f"scatter_dimension is {dimension}, and must be from 0 to {len(shape) - 1} for shape "
            f"{shape}: as in lax, it is not counted from the end"
        )
    length = shape[dimension]
    if length % num_ranks or (not tiled and length != num_ranks):
        rule = f"a multiple of {num_ranks}" if tiled else f"{num_ranks}"
        raise CollectiveError(
            f"psum_scatter(tiled={tiled}) of shape {shape}: dimension {dimension} has size "
            f"{length}, and must have {rule}, the number of ranks"
        )


def _find_chunk_shape(shard: jax.Array, size: int, program: Program) -> tuple[int, int]:
    """The shape that `reduce_to_owners` gave each chunk, for any dtype the vector had then."""
    for itemsize in (1, 2, 4, 8):
        packing = Packing.for_shapes([(size,)], program.num_chunks, itemsize)
        if shard.shape == (program.owned_chunks.shape[1] * packing.rows * packing.width,):
            return packing.rows, packing.width
    raise CollectiveError(
        f"a shard of shape {shard.shape} does not belong to a vector of {size} elements on this "
        "plan: give what reduce_to_owners returned, and the size of the vector it was given"
    )
