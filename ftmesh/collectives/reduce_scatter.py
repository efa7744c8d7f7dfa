"""Blocks: `psum_scatter` and `all_gather` as in `jax.lax`, on a plan.

Each takes its half of the schedule where every rank owns as many chunks as any other, and the whole
schedule otherwise.

Owners: the two halves of an all-reduce by themselves, with the owners of chunks in between.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.collectives.partitioning import gathered, on_pieces, scattered
from ftmesh.collectives.precision import Precision, precision
from ftmesh.collectives.validation import as_summand, axis_of, countable, the_axis
from ftmesh.errors import CollectiveError
from ftmesh.execute import _compat, primitives
from ftmesh.execute.lowering import Program
from ftmesh.layout.buckets import chunk_shape, pack, unpack

if TYPE_CHECKING:
    from ftmesh.planning.plan import Plan


def psum_scatter(
    x: Any,
    axis_name: Any,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: None = None,
    tiled: bool = False,
    plan: Plan,
    wire_dtype: Any = None,
    accumulate_dtype: Any = None,
    specs: Any = None,
) -> Any:
    """Each rank's block of the sum, as `jax.lax.psum_scatter`; see `psum` for dtypes and `specs`.

    A leaf that is cut along another axis in the dimension that is scattered is gathered over it.

    >>> import ftmesh
    >>> from ftmesh.testing import on_one_device
    >>> plan = ftmesh.plan(ftmesh.Topology.grid("4x2", failed="2x2@2,0"))
    >>> run = on_one_device(lambda x: psum_scatter(x, "data", plan=plan))
    >>> run(jnp.arange(16).reshape(4, 4)).tolist()
    [24, 28, 32, 36]
    """
    axis_name = the_axis(axis_name, axis_index_groups, plan, "psum_scatter", whole=True)
    program = plan.with_reduce_scatter.program
    size = program.num_ranks

    def one(leaf: Any) -> Any:
        if jnp.result_type(leaf) == np.bool_:
            raise CollectiveError("psum_scatter takes no booleans, as lax's does not: cast them")
        leaf = as_summand(leaf, axis_name)
        _check_blocks(leaf.shape, scatter_dimension, size, tiled)
        shape = list(leaf.shape)
        length = shape[scatter_dimension] // size
        shape[scatter_dimension : scatter_dimension + 1] = [size, length]
        blocks = jnp.moveaxis(leaf.reshape(shape), scatter_dimension, 0)
        kind = precision(leaf.dtype, wire_dtype, accumulate_dtype)
        mine = blocks[0]
        if leaf.size:
            mine = _scatter_blocks(blocks.astype(kind.sums), axis_name, program, kind)
        mine = _compat.weak_as(mine.astype(leaf.dtype), leaf)
        return mine if tiled else jnp.squeeze(mine, scatter_dimension)

    change = scattered(scatter_dimension, tiled=tiled)
    return on_pieces(partial(jax.tree.map, one), x, specs, change=change)


def all_gather(
    x: Any,
    axis_name: Any,
    *,
    axis_index_groups: None = None,
    axis: int = 0,
    tiled: bool = False,
    plan: Plan,
    specs: Any = None,
) -> Any:
    """Every rank's `x`, as `jax.lax.all_gather`; see `psum_scatter` for `specs`.

    Where the whole schedule is taken, zeros are added to each value; some processors round
    denormal numbers to zero in that.

    >>> import ftmesh
    >>> from ftmesh.testing import on_one_device
    >>> plan = ftmesh.plan(ftmesh.Topology.grid("4x2", failed="2x2@2,0"))
    >>> on_one_device(lambda x: all_gather(x, "data", plan=plan))(jnp.arange(4))[2].tolist()
    [0, 1, 2, 3]
    """
    axis_name = the_axis(axis_name, axis_index_groups, plan, "all_gather", whole=True)
    program = plan.with_reduce_scatter.program
    size = program.num_ranks

    def one(leaf: Any) -> Any:
        leaf = _as_varying(jnp.asarray(leaf), axis_name, program)
        where = axis_of(axis, leaf.ndim if tiled else leaf.ndim + 1, "the axis of all_gather")
        every = jnp.broadcast_to(leaf, (size, *leaf.shape))
        if leaf.size:
            flat = countable(jnp.ravel(leaf))
            kind = precision(flat.dtype)
            flat = flat.astype(kind.sums)  # as the derivative is added up
            every = _gather_blocks(flat, axis_name, program, kind).reshape(every.shape)
        every = jnp.moveaxis(_compat.weak_as(every.astype(leaf.dtype), leaf), 0, where)
        if not tiled:
            return every
        shape = list(leaf.shape)
        shape[where] *= size
        return every.reshape(shape)

    change = gathered(axis, tiled=tiled)
    return on_pieces(partial(jax.tree.map, one), x, specs, change=change)


def _as_varying(leaf: jax.Array, axis_name: Any, program: Program) -> jax.Array:
    """A leaf as one that may differ along the axis, whose gradient the plan sums, and not JAX."""
    is_same = _compat.checks_varying() and axis_name not in _compat.varying_axes(leaf)
    if not is_same or not leaf.size or not jnp.issubdtype(leaf.dtype, np.inexact):
        return _compat.as_varying(leaf, axis_name)
    kind = precision(leaf.dtype)
    buffer = pack([leaf.astype(kind.sums)], program.num_chunks)
    (spread,) = unpack(
        primitives.spread(buffer, axis_name=axis_name, program=program), [leaf.shape]
    )
    return _compat.weak_as(spread.astype(leaf.dtype), leaf)


def _check_blocks(shape: tuple[int, ...], dimension: int, size: int, tiled: bool) -> None:
    """Refuses what cannot be cut into a block for each rank."""
    if not 0 <= dimension < len(shape):
        raise CollectiveError(
            f"scatter_dimension is {dimension}, and must be from 0 to {len(shape) - 1} for shape "
            f"{shape}: as in lax, it is not counted from the end"
        )
    length = shape[dimension]
    if length % size or (not tiled and length != size):
        rule = f"a multiple of {size}" if tiled else f"{size}"
        raise CollectiveError(
            f"psum_scatter(tiled={tiled}) of shape {shape}: dimension {dimension} has size "
            f"{length}, and must have {rule}, the number of ranks"
        )


def _scatter_blocks(
    blocks: jax.Array, axis_name: Any, program: Program, kind: Precision
) -> jax.Array:
    """The block of this rank of the sum of ``blocks[rank, ...]``."""
    wire = kind.wire(program.depth)
    if not program.owns_evenly:
        buffer = pack([blocks], program.num_chunks, kind.results.itemsize)
        total = primitives.sum_varying(buffer, axis_name=axis_name, program=program, wire=wire)
        (every,) = unpack(total, [blocks.shape])
        return lax.dynamic_index_in_dim(every, lax.axis_index(axis_name), keepdims=False)
    owned = program.owned
    parts = jax.vmap(lambda block: pack([block], owned.shape[1]))(blocks)
    parts = parts.reshape(program.num_chunks, *parts.shape[2:])
    buffer = parts[np.argsort(owned.reshape(-1))]
    buffer = primitives.reduce_scatter(buffer, axis_name=axis_name, program=program, wire=wire)
    (mine,) = unpack(own_chunks(buffer, axis_name, program), [blocks.shape[1:]])
    return mine


def _gather_blocks(
    block: jax.Array, axis_name: Any, program: Program, kind: Precision
) -> jax.Array:
    """Every rank's vector, ``[rank, element]``."""
    size = program.num_ranks
    wire = kind.wire(program.depth)
    if not program.owns_evenly:
        # Minus zero is what leaves every number as it is when added.
        nothing: Any = -0.0 if jnp.issubdtype(block.dtype, np.inexact) else 0
        if jnp.issubdtype(block.dtype, np.complexfloating):
            nothing = complex(-0.0, -0.0)
        placed = jnp.full((size, block.size), nothing, block.dtype)
        placed = lax.dynamic_update_index_in_dim(
            _compat.varying_as(placed, block), block, lax.axis_index(axis_name), 0
        )
        buffer = pack([placed], program.num_chunks, kind.results.itemsize)
        total = primitives.sum_varying(buffer, axis_name=axis_name, program=program, wire=wire)
        (every,) = unpack(total, [placed.shape])
        return every
    owned = program.owned
    chunks = pack([block], owned.shape[1], kind.results.itemsize)
    buffer = place_chunks(chunks, axis_name, program)
    buffer = primitives.all_gather(buffer, axis_name=axis_name, program=program, wire=wire)
    return buffer[owned.reshape(-1)].reshape(size, -1)[:, : block.size]


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
    plan = plan.with_reduce_scatter
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
    program = plan.with_reduce_scatter.program
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
    plan = plan.with_reduce_scatter
    program = plan.program
    check_owned(plan)
    chunks = shard.reshape(-1, *_shape_of_chunks(shard, size, program))
    buffer = gather_chunks(chunks, axis_name, plan=plan, wire_dtype=wire_dtype)
    return buffer.reshape(-1)[:size]


def gather_chunks(
    chunks: jax.Array, axis_name: Any, *, plan: Plan, wire_dtype: Any = None
) -> jax.Array:
    """The buffer of which every rank has its chunks; see `gather_from_owners`."""
    program = plan.with_reduce_scatter.program
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
