"""Blocks: `psum_scatter` and `all_gather` as in `jax.lax`, on a plan.

Each takes its half of the schedule where every rank owns as many chunks as any other, and the whole
schedule otherwise.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.collectives.calls import as_summand, axis_of, countable, the_axis
from ftmesh.collectives.owners import own_chunks, place_chunks
from ftmesh.collectives.pieces import gathered, on_pieces, scattered
from ftmesh.collectives.precision import Precision, precision
from ftmesh.errors import CollectiveError
from ftmesh.execute import _compat, primitives
from ftmesh.execute.lowering import Program
from ftmesh.layout.buckets import pack, unpack

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
    program = plan.halves.program
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
    program = plan.halves.program
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
