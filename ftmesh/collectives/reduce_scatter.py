"""Reduce-scatter and all-gather, along the routes of a plan.

`psum_scatter` and `all_gather` are those of `jax.lax`. They run their phase of the schedule alone
if every rank owns the same number of chunks, and otherwise the whole all-reduce. `scatter_rows` and
`gather_rows` are the same for a matrix with a row for each rank: sharded optimizers use these.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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

WHOLE_ALL_REDUCE = "all_reduce_of_uneven_owners"  # marks it in the compiled program
TILE = 1024  # elements: XLA for TPUs gathers whole tiles, and sums what is not made of them


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
        scatter_dimension: The dimension that is split among the ranks. A negative one counts from
            the end of each leaf, and takes no `specs`.
        tiled: Whether the dimension stays, shorter by the number of ranks, as in lax.
        plan: A plan without idle devices. An algorithm without a reduce-scatter phase is replaced
            by one that has it (`Plan.with_reduce_scatter`).
        axis_name, axis_index_groups, wire_dtype, accumulate_dtype, specs: As for `psum`.
    """
    axis_name = check_call("psum_scatter", axis_name, axis_index_groups, plan, needs_all_ranks=True)
    if scatter_dimension < 0:
        if specs is not None:
            raise CollectiveError(
                f"scatter_dimension is {scatter_dimension}: with specs=, count it from the first "
                "dimension"
            )

        def from_the_first(leaf: Any) -> Any:
            dimension = scatter_dimension + np.ndim(leaf)
            if dimension < 0:
                raise CollectiveError(_no_such_dimension(scatter_dimension, np.shape(leaf)))
            return psum_scatter(
                leaf,
                axis_name,
                scatter_dimension=dimension,
                tiled=tiled,
                plan=plan,
                wire_dtype=wire_dtype,
                accumulate_dtype=accumulate_dtype,
            )

        return jax.tree.map(from_the_first, x)
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

    Plans made by `ftmesh.plan` have owners with equal parts, or another plan that has serves
    (`Plan.with_reduce_scatter`). If the whole all-reduce runs, zeros are added to each value, and
    some processors flush denormal numbers to zero in that.

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
            stacked = _gather_by_xla(leaf, axis_name, program)
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


def row_length(size: int, dtype: DTypeLike, *, plan: PlanLike) -> int:
    """Return a length for rows of at least `size` elements, so that they need no padding."""
    program = plan.with_reduce_scatter.program
    if plan.executor == "xla" or not program.owns_evenly:
        return size
    num_chunks = program.owned_chunks.shape[1]
    return math.prod(Packing.for_shapes([(size,)], num_chunks, jnp.dtype(dtype).itemsize).shape)


def scatter_rows(
    rows: jax.Array,
    axis_name: AxisName,
    *,
    plan: PlanLike,
    mean: bool = False,
    wire_dtype: DTypeLike | None = None,
    accumulate_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Sum a matrix with a row for each rank, and return the row of this rank.

    Args:
        mean: Divide by the number of ranks, before rounding.
        axis_name, plan, wire_dtype, accumulate_dtype: As for `psum_scatter`.
    """
    axis_name = check_call("psum_scatter", axis_name, None, plan, needs_all_ranks=True)
    program = plan.with_reduce_scatter.program
    precision = choose_precision(rows.dtype, wire_dtype, accumulate_dtype)
    divisor = program.num_ranks if mean else None
    wide = rows.astype(precision.sum_dtype)
    row = _scatter_blocks(wide, axis_name, program, precision, divisor)
    return row.astype(rows.dtype) if jnp.issubdtype(rows.dtype, jnp.inexact) else row


def gather_rows(row: jax.Array, axis_name: AxisName, *, plan: PlanLike) -> jax.Array:
    """Return the vectors of all ranks, one row for each, typed as the same on all ranks."""
    axis_name = check_call("all_gather", axis_name, None, plan, needs_all_ranks=True)
    program = plan.with_reduce_scatter.program
    if program.executor == XLA:
        padded = jnp.pad(row, (0, -row.size % TILE))
        return _gather_by_xla(padded, axis_name, program, invariant=True)[:, : row.size]
    precision = choose_precision(row.dtype)
    wide = row.astype(precision.sum_dtype)
    rows = _gather_blocks(wide, axis_name, program, precision, invariant=True)
    return rows.astype(row.dtype)


def gather_in_place(rows: jax.Array, axis_name: AxisName, *, plan: PlanLike) -> jax.Array:
    """Return the rows of all ranks below each other, by XLA; typed as the same on all ranks."""
    axis_name = check_call("all_gather", axis_name, None, plan, needs_all_ranks=True)
    return _gather_by_xla(rows, axis_name, plan.program, invariant=True, tiled=True)


def _scatter_blocks(
    blocks: jax.Array,
    axis_name: AxisName,
    program: Program,
    precision: Precision,
    divisor: int | None = None,
) -> jax.Array:
    """The block of this rank, of the sum of ``blocks[rank, ...]``."""
    if program.executor == XLA:
        blocks = primitives.on_mesh_of_plan(blocks, axis_name=axis_name, program=program)
        wide = blocks.astype(precision.sum_dtype)
        total = lax.psum_scatter(wide, axis_name, scatter_dimension=0, tiled=True)
        block = total.astype(precision.result_dtype)[0]
        return block if divisor is None else block / divisor
    if not program.owns_evenly:
        sums = _all_reduce_blocks(blocks, axis_name, program, precision, divisor)
        return lax.dynamic_index_in_dim(sums, lax.axis_index(axis_name), keepdims=False)
    owned, wire = program.owned_chunks, precision.wire(program.depth)
    parts = jax.vmap(lambda block: pack([block], owned.shape[1]))(blocks)
    buffer = parts.reshape(program.num_chunks, *parts.shape[2:])
    buffer = primitives.from_owner_order(buffer, axis_name=axis_name, program=program)
    buffer = primitives.reduce_scatter(buffer, axis_name=axis_name, program=program, wire=wire)
    own = jnp.take(buffer, jnp.asarray(owned)[lax.axis_index(axis_name)], axis=0)
    (block,) = unpack(own, [blocks.shape[1:]])
    return block if divisor is None else block / divisor


def _gather_blocks(
    block: jax.Array,
    axis_name: AxisName,
    program: Program,
    precision: Precision,
    *,
    invariant: bool = False,
) -> jax.Array:
    """The vector of every rank, ``[rank, element]``; `invariant`: typed as the same on all."""
    num_ranks = program.num_ranks
    if not program.owns_evenly:
        # Adding minus zero leaves every number unchanged, plus zero does not (-0.0 + 0.0 = 0.0).
        zero: Any = -0.0 if jnp.issubdtype(block.dtype, np.inexact) else 0
        if jnp.issubdtype(block.dtype, np.complexfloating):
            zero = complex(-0.0, -0.0)
        blocks = _compat.varying_like(jnp.full((num_ranks, block.size), zero, block.dtype), block)
        blocks = lax.dynamic_update_index_in_dim(blocks, block, lax.axis_index(axis_name), 0)
        return _all_reduce_blocks(blocks, axis_name, program, precision, invariant=invariant)
    owned, wire = program.owned_chunks, precision.wire(program.depth)
    chunks = pack([block], owned.shape[1], precision.result_dtype.itemsize)
    # The all-gather writes the rest: on a TPU zeros would take as long as packing.
    buffer = lax.empty((program.num_chunks, *chunks.shape[1:]), chunks.dtype)
    own = jnp.asarray(owned)[lax.axis_index(axis_name)]
    # Otherwise the derivative would look for updates that overlap, with buffers of its own.
    options: dict[str, Any] = {"unique_indices": True, "mode": "promise_in_bounds"}
    buffer = _compat.varying_like(buffer, chunks).at[own].set(chunks, **options)
    gather = primitives.all_gather_invariant if invariant else primitives.all_gather
    buffer = gather(buffer, axis_name=axis_name, program=program, wire=wire)
    buffer = primitives.to_owner_order(buffer, axis_name=axis_name, program=program)
    return buffer.reshape(num_ranks, -1)[:, : block.size]


def _gather_by_xla(
    x: jax.Array,
    axis_name: AxisName,
    program: Program,
    *,
    invariant: bool = False,
    tiled: bool = False,
) -> jax.Array:
    """Gather the arrays of all ranks by XLA, ``[rank, ...]``; derivatives are summed as by `psum`.

    With `invariant` the result is typed as the same on all ranks, and with `tiled` too, arrays are
    concatenated along their first dimension.
    """
    x = primitives.on_mesh_of_plan(x, axis_name=axis_name, program=program)
    if invariant:
        return _compat.all_gather_invariant(x, axis_name, tiled=tiled)
    if jnp.issubdtype(x.dtype, jnp.floating) and choose_precision(x.dtype).sum_dtype != x.dtype:
        return _gather_narrow(x, axis_name)
    return lax.all_gather(x, axis_name)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather_narrow(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """Gather numbers of few bits as they are; their cotangents are summed in more."""
    return lax.all_gather(x, axis_name)


def _gather_narrow_backward(axis_name: AxisName, _: None, cotangent: jax.Array) -> tuple[Any]:
    precision = choose_precision(cotangent.dtype)
    wide = cotangent.astype(precision.sum_dtype)
    return (lax.psum_scatter(wide, axis_name).astype(cotangent.dtype),)


_gather_narrow.defvjp(
    lambda x, axis_name: (_gather_narrow(x, axis_name), None), _gather_narrow_backward
)


def _all_reduce_blocks(
    blocks: jax.Array,
    axis_name: AxisName,
    program: Program,
    precision: Precision,
    divisor: int | None = None,
    *,
    invariant: bool = False,
) -> Any:
    buffer = pack([blocks], program.num_chunks, precision.result_dtype.itemsize)
    wire = precision.wire(program.depth)
    options: dict[str, Any] = {"axis_name": axis_name, "program": program, "wire": wire}
    reduce = primitives.all_reduce if invariant else primitives.all_reduce_varying
    with _compat.plan_scope(WHOLE_ALL_REDUCE):
        total = reduce(buffer, divisor=divisor, **options)
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


def _no_such_dimension(dimension: int, shape: tuple[int, ...]) -> str:
    dimensions = f"{len(shape)} dimension{'s' * (len(shape) != 1)}"
    return f"scatter_dimension is {dimension}, and shape {shape} has {dimensions}"


def _check_divisible(shape: tuple[int, ...], dimension: int, num_ranks: int, tiled: bool) -> None:
    if dimension >= len(shape):
        raise CollectiveError(_no_such_dimension(dimension, shape))
    length = shape[dimension]
    if length % num_ranks or (not tiled and length != num_ranks):
        rule = f"a multiple of {num_ranks}" if tiled else f"{num_ranks}"
        raise CollectiveError(
            f"psum_scatter(tiled={tiled}) of shape {shape}: dimension {dimension} has size "
            f"{length}, and must have {rule}, the number of ranks"
        )
