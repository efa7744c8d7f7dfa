"""All-reduce: `psum` and `pmean` as in `jax.lax`, along the routes of a plan.

    grads = ftmesh.pmean(grads, "data", plan=plan)

They run wherever the axis is bound: in shard_map (with check_vma on or off), pmap, or
``vmap(axis_name=...)``; under jit, grad, scan and remat. All ranks get the same bits, and the same
inputs always give the same bits.
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
    is_constant,
)
from ftmesh.collectives.partitioning import map_local_shards
from ftmesh.execute import _compat, primitives
from ftmesh.execute.lowering import PALLAS, XLA
from ftmesh.execute.types import AxisName, DTypeLike, PlanLike, PyTree, Specs
from ftmesh.layout.buckets import make_buckets, pack, unpack

BUCKET_BYTES = 256 * 2**20


def psum(
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: None = None,
    plan: PlanLike,
    wire_dtype: DTypeLike | None = None,
    accumulate_dtype: DTypeLike | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    specs: Specs = None,
) -> PyTree:
    """Sum `x` over all live ranks, as `jax.lax.psum` does.

    Leaves are packed into buckets, and each bucket is summed with the plan for its size
    (`Plan.for_payload`). Results have the dtype of their leaf; booleans are counted, as in lax.

    Args:
        x: An array or a pytree of arrays.
        axis_name: The axis of ``plan.jax_mesh(axis_name)``.
        axis_index_groups: Not supported. Plan for a smaller topology instead.
        plan: What `ftmesh.plan` returns.
        wire_dtype: The dtype in which results are sent, rounded once by their owner; the leaf's own
            by default. Partial sums are sent in it too if so few are added one after
            another that rounding each stays within 1 %; see `ftmesh.cost.wire_precision`.
        accumulate_dtype: The dtype in which floating-point leaves are added. By default float32
            for leaves of 16 bits or fewer, and their own dtype for others.
        bucket_bytes: The largest bucket. A larger leaf gets a bucket of its own.
        specs: How leaves are sharded along mesh axes that the surrounding shard_map leaves to the
            compiler: each device then sums its own shard. Explicit axes need none.

    Raises:
        CollectiveError: If the axis is not bound or does not fit the plan, or if a leaf is typed as
            the same on every device: it has been summed already.

    >>> import ftmesh
    >>> from ftmesh.testing import on_one_device
    >>> plan = ftmesh.plan(ftmesh.Topology.grid("4x2", failed="2x2@2,0"))
    >>> on_one_device(lambda x: psum(x, "data", plan=plan))(jnp.arange(4)).tolist()
    [6, 6, 6, 6]
    """
    axis_name = check_call("psum", axis_name, axis_index_groups, plan)
    options = (axis_name, plan, wire_dtype, accumulate_dtype, bucket_bytes)
    return map_local_shards(lambda x: _sum_leaves(x, *options, divisor=None), x, specs)


def pmean(
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: None = None,
    plan: PlanLike,
    wire_dtype: DTypeLike | None = None,
    accumulate_dtype: DTypeLike | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    specs: Specs = None,
) -> PyTree:
    """Average `x` over all live ranks, as `jax.lax.pmean` does. The arguments are those of `psum`.

    Sums are divided before they are rounded to 16 bits, so a mean is right even if the sum would
    overflow.
    """
    axis_name = check_call("pmean", axis_name, axis_index_groups, plan)
    num_live = len(plan.program.live)
    options = (axis_name, plan, wire_dtype, accumulate_dtype, bucket_bytes)
    means = map_local_shards(lambda x: _sum_leaves(x, *options, divisor=num_live), x, specs)
    return jax.tree.map(lambda leaf, mean: mean if _is_divided(leaf) else mean / num_live, x, means)


def bucket_plans(x: PyTree, plan: PlanLike) -> list[PlanLike]:
    """The plan of each bucket that `pmean` sums, largest first. `x` may have `ShapeDtypeStruct`."""
    leaves = jax.tree.leaves(x)
    kinds = [(choose_precision(leaf.dtype), _is_divided(leaf)) for leaf in leaves]
    buckets = make_buckets(leaves, kinds, BUCKET_BYTES)
    buckets.sort(key=lambda bucket: -sum(leaves[i].size for i in bucket.members))
    return [_plan_for([leaves[i] for i in b.members], b.kind[0], plan) for b in buckets]


def _sum_leaves(
    x: PyTree,
    axis_name: AxisName,
    plan: PlanLike,
    wire_dtype: DTypeLike | None,
    accumulate_dtype: DTypeLike | None,
    bucket_bytes: int,
    *,
    divisor: int | None,
) -> PyTree:
    """Sum the leaves of `x`; divide those by `divisor` that are divided before rounding."""
    leaves, tree = jax.tree.flatten(x)
    sums = [_constant_sum(leaf, plan) if is_constant(leaf) else leaf for leaf in leaves]
    traced = [i for i, leaf in enumerate(leaves) if not is_constant(leaf)]
    arrays = [as_operand(leaves[i], axis_name) for i in traced]
    kinds = [
        (choose_precision(array.dtype, wire_dtype, accumulate_dtype), _is_divided(array))
        for array in arrays
    ]
    for i, array in zip(traced, arrays, strict=True):
        if array.size == 0:
            sums[i] = _compat.zeros_like_psum(array, axis_name)

    for bucket in make_buckets(arrays, kinds, bucket_bytes):
        precision, is_divided = bucket.kind
        members = [arrays[i] for i in bucket.members]
        totals = _sum_bucket(members, axis_name, plan, precision, divisor if is_divided else None)
        for i, array, total in zip(bucket.members, members, totals, strict=True):
            sums[traced[i]] = _compat.weak_like_psum(total.astype(array.dtype), array, axis_name)
    return tree.unflatten(sums)


def _plan_for(arrays: list[Any], precision: Precision, plan: PlanLike) -> PlanLike:
    num_bytes = sum(array.size for array in arrays) * precision.result_dtype.itemsize
    return plan.for_payload(num_bytes, wire_dtype=precision.planning_dtype)


def _constant_sum(leaf: Any, plan: PlanLike) -> Any:
    """The sum of a leaf that is known while tracing, and so the same on all ranks."""
    number = as_numbers(leaf)
    is_bool = jnp.result_type(leaf) == np.bool_
    return _compat.scale_constant(number if is_bool else leaf, len(plan.program.live))


def _is_divided(leaf: Any) -> bool:
    """Whether `_sum_leaves` divides this leaf; `pmean` divides the others at the end."""
    return not is_constant(leaf) and jnp.issubdtype(leaf.dtype, np.inexact)


def _sum_bucket(
    leaves: list[jax.Array],
    axis_name: AxisName,
    plan: PlanLike,
    precision: Precision,
    divisor: int | None,
) -> list[jax.Array]:
    """Sum leaves of one precision in one buffer; the results have the dtype of sums."""
    program = _plan_for(leaves, precision, plan).program
    if program.executor == XLA:
        return [native.all_reduce(leaf, axis_name, program, precision, divisor) for leaf in leaves]
    wide = [leaf.astype(precision.sum_dtype) for leaf in leaves]
    is_rounded = precision.sum_dtype != precision.result_dtype
    is_divided_after = divisor is not None and not is_rounded
    buffer = pack(wide, program.num_chunks, precision.result_dtype.itemsize)
    if is_divided_after and program.executor == PALLAS and buffer.size == wide[0].size:
        buffer = _as_computed(buffer, axis_name)
    total = primitives.all_reduce(
        buffer,
        axis_name=axis_name,
        program=program,
        wire=precision.wire(program.depth),
        divisor=divisor if is_rounded else None,
    )
    sums = unpack(total, [leaf.shape for leaf in leaves])
    # Dividing while unpacking takes no extra memory.
    return [leaf / divisor for leaf in sums] if is_divided_after else sums


@partial(jax.custom_jvp, nondiff_argnums=(1,))  # identity for derivatives
def _as_computed(buffer: jax.Array, axis_name: AxisName) -> jax.Array:
    """Return `buffer` unchanged, as a value that the compiler takes for computed.

    XLA copies a parameter before and after a kernel whose result is used in a computation. This is
    one pass instead, into the kernel's own buffer, and it fuses with what computes a gradient.
    """
    return jnp.where(lax.axis_index(axis_name) >= 0, buffer, jnp.zeros_like(buffer))


_as_computed.defjvp(
    lambda axis_name, primals, tangents: (_as_computed(*primals, axis_name), *tangents)
)
