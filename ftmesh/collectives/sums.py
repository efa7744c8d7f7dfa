"""Collectives: `psum`, `pmean`, `psum_scatter`, `all_gather` as in `jax.lax`, on a plan.

    grads = ftmesh.pmean(grads, "data", plan=plan)

They run inside anything that binds the axis: shard_map (with check_vma on or off), pmap, or
``vmap(axis_name=...)``; under jit, grad, scan and remat. All ranks get bitwise the same result, and
the same inputs give the same bits every time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.errors import CollectiveError
from ftmesh.execute import _compat, ppermute
from ftmesh.execute.lower import Program
from ftmesh.layout.buckets import chunk_shape, make_buckets, pack, unpack

if TYPE_CHECKING:
    from ftmesh.plans import Plan

BUCKET_BYTES = 256 * 2**20


def psum(
    x: Any,
    axis_name: Any,
    *,
    axis_index_groups: None = None,
    plan: Plan,
    wire_dtype: Any = None,
    accumulate_dtype: Any = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Any:
    """The sum of `x` over all ranks, as `jax.lax.psum`; `x` may be a pytree.

    Leaves are packed into buffers of up to `bucket_bytes` each. Floating-point leaves are added in
    `accumulate_dtype` and travel in `wire_dtype`; either is the leaf's own unless given, and
    results have the leaf's dtype. Booleans are counted, as in lax.
    """
    axis_name = _the_axis(axis_name, axis_index_groups, plan, "psum")
    leaves, tree = jax.tree.flatten(x)
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        size = len(plan.program.live)  # constants are the same everywhere, as for lax
        return tree.unflatten([_countable(leaf) * size for leaf in leaves])
    leaves = [_to_sum(leaf, axis_name) for leaf in leaves]
    wide = [_accumulated(leaf.dtype, accumulate_dtype) for leaf in leaves]
    out = [jnp.zeros(leaf.shape, leaf.dtype) if leaf.size == 0 else leaf for leaf in leaves]
    for bucket in make_buckets(leaves, wide, bucket_bytes):
        members = [leaves[i] for i in bucket.members]
        buffer = pack((leaf.astype(bucket.dtype) for leaf in members), plan.program.num_chunks)
        total = ppermute.all_reduce(
            buffer,
            axis_name=axis_name,
            program=plan.program,
            wire=_wire(bucket.dtype, wire_dtype),
        )
        arrays = unpack(total, [leaf.shape for leaf in members])
        for i, array in zip(bucket.members, arrays, strict=True):
            out[i] = array.astype(leaves[i].dtype)
    return tree.unflatten(out)


def pmean(
    x: Any,
    axis_name: Any,
    *,
    axis_index_groups: None = None,
    plan: Plan,
    wire_dtype: Any = None,
    accumulate_dtype: Any = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Any:
    """The mean of `x` over all ranks, as `jax.lax.pmean`; see `psum` for the options."""
    total = psum(
        x,
        axis_name,
        axis_index_groups=axis_index_groups,
        plan=plan,
        wire_dtype=wire_dtype,
        accumulate_dtype=accumulate_dtype,
        bucket_bytes=bucket_bytes,
    )
    size = len(plan.program.live)
    return jax.tree.map(lambda leaf: leaf / size, total)


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
) -> Any:
    """Each rank's block of the sum, as `jax.lax.psum_scatter`.

    Takes the reduce-scatter half of the schedule where every rank owns as many chunks as any other,
    and the whole schedule otherwise.
    """
    axis_name = _the_axis(axis_name, axis_index_groups, plan, "psum_scatter", whole=True)
    size = plan.program.num_ranks

    def one(leaf: Any) -> Any:
        leaf = _to_sum(leaf, axis_name)
        length = leaf.shape[scatter_dimension] if leaf.ndim else 0
        if length % size or (not tiled and length != size):
            rule = f"a multiple of {size}" if tiled else f"{size}"
            raise CollectiveError(
                f"psum_scatter(tiled={tiled}) of shape {leaf.shape}: dimension "
                f"{scatter_dimension} has size {length}, and must have {rule}, the number of ranks"
            )
        shape = list(leaf.shape)
        shape[scatter_dimension : scatter_dimension + 1] = [size, length // size]
        blocks = jnp.moveaxis(leaf.reshape(shape), scatter_dimension, 0)
        wide = blocks.astype(_accumulated(leaf.dtype, accumulate_dtype))
        mine = _scatter_blocks(wide, axis_name, plan.program, _wire(wide.dtype, wire_dtype)).astype(
            leaf.dtype
        )
        return mine if tiled else jnp.squeeze(mine, scatter_dimension)

    return jax.tree.map(one, x)


def all_gather(
    x: Any,
    axis_name: Any,
    *,
    axis_index_groups: None = None,
    axis: int = 0,
    tiled: bool = False,
    plan: Plan,
) -> Any:
    """Every rank's `x`, as `jax.lax.all_gather`.

    Takes the all-gather half of the schedule where every rank owns as many chunks as any other, and
    the whole schedule otherwise, adding zeros to each value; some processors round denormal numbers
    to zero in that.
    """
    axis_name = _the_axis(axis_name, axis_index_groups, plan, "all_gather", whole=True)

    def one(leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        if _compat.checks_varying() and axis_name not in _compat.varying_axes(leaf):
            leaf = _compat.to_varying(leaf, axis_name)
        flat = jnp.ravel(leaf).astype(_countable(leaf).dtype)
        every = _gather_blocks(flat, axis_name, plan.program).astype(leaf.dtype)
        every = every.reshape(plan.program.num_ranks, *leaf.shape)
        where = axis % (leaf.ndim if tiled else leaf.ndim + 1)
        every = jnp.moveaxis(every, 0, where)
        if not tiled:
            return every
        shape = list(leaf.shape)
        shape[where] *= plan.program.num_ranks
        return every.reshape(shape)

    return jax.tree.map(one, x)


def reduce_to_owners(x: jax.Array, axis_name: Any, *, plan: Plan, wire_dtype: Any = None) -> Any:
    """The sum of a vector, left with the owners of the schedule's chunks: for sharded optimizers.

    Returns a vector of ``plan.shard_size(x.size)`` elements: this rank's chunks of the sum in
    ascending order, and zeros behind them at ranks that own fewer than others, or none at all.
    """
    axis_name = _the_axis(axis_name, None, plan, "reduce_to_owners")
    program = plan.program
    _check_owned(program)
    buffer = pack([_to_sum(x, axis_name)], program.num_chunks)
    buffer = ppermute.reduce_scatter(
        buffer, axis_name=axis_name, program=program, wire=_wire(x.dtype, wire_dtype)
    )
    return _own_chunks(buffer, axis_name, program).reshape(-1)


def gather_from_owners(
    shard: jax.Array, axis_name: Any, *, plan: Plan, size: int, wire_dtype: Any = None
) -> Any:
    """The inverse of `reduce_to_owners`: a vector of `size` elements put together at every rank."""
    axis_name = _the_axis(axis_name, None, plan, "gather_from_owners")
    program = plan.program
    _check_owned(program)
    rows, width = chunk_shape(size, program.num_chunks, shard.dtype.itemsize)
    buffer = _place_chunks(shard.reshape(-1, rows, width), axis_name, program)
    wire = _wire(shard.dtype, wire_dtype)
    if wire is not None:
        buffer = buffer.astype(wire).astype(shard.dtype)  # owners keep what others get
    buffer = ppermute.gather_invariant(buffer, axis_name=axis_name, program=program, wire=wire)
    return buffer.reshape(-1)[:size]


# What they share --------------------------------------------------------------------------------


def _the_axis(
    axis_name: Any, axis_index_groups: Any, plan: Plan, what: str, *, whole: bool = False
) -> Any:
    """The one axis name, after everything that can be wrong with a call has been looked at."""
    if axis_index_groups is not None:
        raise CollectiveError(
            f"{what} on a plan has no axis_index_groups: the plan says which ranks take part; plan "
            "for the smaller topology instead"
        )
    names = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
    if len(names) != 1:
        raise CollectiveError(
            f"{what} on a plan works along one axis, not {tuple(names)}: call it for the axis of "
            "the plan, and jax.lax for the others"
        )
    (axis_name,) = names
    if not _compat.axis_exists(axis_name):
        raise CollectiveError(
            f"axis {axis_name!r} is not bound here: call {what} inside jax.shard_map (or vmap with "
            f"axis_name={axis_name!r}) over a mesh with that axis"
        )
    size, wanted = lax.axis_size(axis_name), plan.program.num_ranks
    if size != wanted:
        idle = " (idle ones among them)" if plan.with_idle else ""
        raise CollectiveError(
            f"axis {axis_name!r} has {size} devices, but the plan for {plan.topology} has "
            f"{wanted}{idle}: make the mesh with plan.jax_mesh({axis_name!r})"
        )
    if whole and plan.with_idle:
        raise CollectiveError(
            f"{what} gives every rank its part, and a plan with idle devices cannot"
        )
    return axis_name


def _to_sum(leaf: Any, axis_name: Any) -> jax.Array:
    """A leaf as an array that can be added up along the axis."""
    leaf = _countable(leaf)
    if _compat.checks_varying() and axis_name not in _compat.varying_axes(leaf):
        raise CollectiveError(
            f"this value of shape {leaf.shape} does not vary along {axis_name!r}: it is the same "
            "on every device already. Under shard_map(check_vma=True) the gradient of replicated "
            "parameters comes out summed; summing it again would count it "
            f"{lax.axis_size(axis_name)} times. Either take the gradient with respect to "
            f"jax.lax.pcast(params, {axis_name!r}, to='varying') and sum that, or do not sum"
        )
    return leaf


def _countable(leaf: Any) -> jax.Array:
    leaf = jnp.asarray(leaf)
    if leaf.dtype == np.bool_:
        return leaf.astype(np.int32)
    if not jnp.issubdtype(leaf.dtype, np.number):
        raise CollectiveError(f"values of dtype {leaf.dtype} cannot be summed: pass numbers")
    return leaf


def _accumulated(dtype: Any, accumulate_dtype: Any) -> np.dtype[Any]:
    """The dtype in which leaves of `dtype` are added up."""
    floating = jnp.issubdtype(dtype, np.floating)
    wide: np.dtype[Any] = np.dtype(
        accumulate_dtype if floating and accumulate_dtype is not None else dtype
    )
    return wide


def _wire(dtype: Any, wire_dtype: Any) -> np.dtype[Any] | None:
    """The dtype in which chunks of `dtype` travel; None for their own."""
    wire: np.dtype[Any] | None = None
    if wire_dtype is not None and jnp.issubdtype(dtype, np.floating):
        wire = np.dtype(wire_dtype)
    return None if wire == dtype else wire


def _scatter_blocks(blocks: jax.Array, axis_name: Any, program: Program, wire: Any) -> jax.Array:
    """The block of this rank of the sum of ``blocks[rank, ...]``."""
    shape, owned = blocks.shape[1:], program.owned
    if not program.owns_evenly:
        total = ppermute.all_reduce(
            pack([blocks], program.num_chunks), axis_name=axis_name, program=program, wire=wire
        )
        (every,) = unpack(total, [blocks.shape])
        return lax.dynamic_index_in_dim(every, lax.axis_index(axis_name), keepdims=False)
    parts = jax.vmap(lambda block: pack([block], owned.shape[1]))(blocks)
    parts = parts.reshape(program.num_chunks, *parts.shape[2:])
    buffer = parts[np.argsort(owned.reshape(-1))]
    buffer = ppermute.reduce_scatter(buffer, axis_name=axis_name, program=program, wire=wire)
    (mine,) = unpack(_own_chunks(buffer, axis_name, program), [shape])
    return mine


def _gather_blocks(block: jax.Array, axis_name: Any, program: Program) -> jax.Array:
    """Every rank's vector, ``[rank, element]``."""
    size, owned = program.num_ranks, program.owned
    if not program.owns_evenly:
        # Minus zero is what leaves every number as it is when added.
        nothing = -0.0 if jnp.issubdtype(block.dtype, np.inexact) else 0
        placed = jnp.full((size, block.size), nothing, block.dtype)
        placed = lax.dynamic_update_index_in_dim(
            _compat.varying_as(placed, block), block, lax.axis_index(axis_name), 0
        )
        total = ppermute.all_reduce(
            pack([placed], program.num_chunks), axis_name=axis_name, program=program, wire=None
        )
        (every,) = unpack(total, [placed.shape])
        return _compat.varying_as(every, block)
    chunks = pack([block], owned.shape[1])
    buffer = _place_chunks(chunks, axis_name, program)
    buffer = ppermute.all_gather(buffer, axis_name=axis_name, program=program, wire=None)
    return buffer[owned.reshape(-1)].reshape(size, -1)[:, : block.size]


def _own_chunks(buffer: jax.Array, axis_name: Any, program: Program) -> jax.Array:
    """The chunks of this rank; zeros in place of those it has fewer of than other ranks."""
    mine = jnp.asarray(program.owned)[lax.axis_index(axis_name)]
    return jnp.take(buffer, mine, axis=0, mode="fill", fill_value=0)


def _place_chunks(chunks: jax.Array, axis_name: Any, program: Program) -> jax.Array:
    """A buffer with this rank's chunks in their places, and zeros elsewhere."""
    mine = jnp.asarray(program.owned)[lax.axis_index(axis_name)]
    empty = jnp.zeros((program.num_chunks, *chunks.shape[1:]), chunks.dtype)
    return _compat.varying_as(empty, chunks).at[mine].set(chunks, mode="drop")


def _check_owned(program: Program) -> None:
    if program.owner is None:
        raise CollectiveError("this schedule has no reduce-scatter half, so nobody owns a chunk")
