"""Sums: `psum` and `pmean` as in `jax.lax`, on a plan.

    grads = ftmesh.pmean(grads, "data", plan=plan)

They run inside anything that binds the axis: shard_map (with check_vma on or off), pmap, or
``vmap(axis_name=...)``; under jit, grad, scan and remat. All ranks get bitwise the same result, and
the same inputs give the same bits every time.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.collectives.calls import as_summand, countable, is_constant, the_axis
from ftmesh.collectives.pieces import on_pieces
from ftmesh.collectives.precision import Precision, precision
from ftmesh.execute import _compat, primitives
from ftmesh.execute.lower import PALLAS
from ftmesh.layout.buckets import make_buckets, pack, unpack

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
    specs: Any = None,
) -> Any:
    """The sum of `x` over all ranks, as `jax.lax.psum`; `x` may be a pytree.

    Leaves are packed into buckets of up to `bucket_bytes` each, and each bucket takes the plan for
    its size, `Plan.at`. Floating-point leaves are added in `accumulate_dtype`: float32 for those of
    16 bits or fewer, unless given, and their own for others. Results travel in `wire_dtype`, the
    leaf's own unless given, and partial sums do where the plan is shallow enough for that; see
    `ftmesh.collectives.precision`. What comes out has the leaf's dtype. Booleans are counted, as in
    lax. Where a shard_map leaves other axes of the mesh to the compiler, each device sums its own
    piece: `specs` say how leaves are cut along those axes, and Explicit ones need not be named; see
    `ftmesh.collectives.pieces`.

    >>> import ftmesh
    >>> from ftmesh.testing import on_one_device
    >>> plan = ftmesh.plan(ftmesh.Topology.grid("4x2", failed="2x2@2,0"))
    >>> on_one_device(lambda x: psum(x, "data", plan=plan))(jnp.arange(4)).tolist()
    [6, 6, 6, 6]
    """
    axis_name = the_axis(axis_name, axis_index_groups, plan, "psum")
    options = wire_dtype, accumulate_dtype, bucket_bytes
    return on_pieces(lambda x: _sums(x, axis_name, plan, *options, divisor=None), x, specs)


def pmean(
    x: Any,
    axis_name: Any,
    *,
    axis_index_groups: None = None,
    plan: Plan,
    wire_dtype: Any = None,
    accumulate_dtype: Any = None,
    bucket_bytes: int = BUCKET_BYTES,
    specs: Any = None,
) -> Any:
    """The mean of `x` over all ranks, as `jax.lax.pmean`; see `psum` for the options.

    Sums are divided before they are rounded: a mean of 16 bits is right where the sum would not
    fit.
    """
    axis_name = the_axis(axis_name, axis_index_groups, plan, "pmean")
    size = len(plan.program.live)
    options = wire_dtype, accumulate_dtype, bucket_bytes
    means = on_pieces(lambda x: _sums(x, axis_name, plan, *options, divisor=size), x, specs)
    return jax.tree.map(lambda leaf, mean: mean if _is_divided(leaf) else mean / size, x, means)


def _sums(
    x: Any,
    axis_name: Any,
    plan: Plan,
    wire_dtype: Any,
    accumulate_dtype: Any,
    bucket_bytes: int,
    *,
    divisor: int | None,
) -> Any:
    """The sums over all ranks; with a `divisor`, those that have to be are divided by it."""
    leaves, tree = jax.tree.flatten(x)
    options = wire_dtype, accumulate_dtype
    out = [_constant_sum(leaf, plan) if is_constant(leaf) else leaf for leaf in leaves]
    places = [i for i, leaf in enumerate(leaves) if not is_constant(leaf)]
    arrays = [as_summand(leaves[i], axis_name) for i in places]
    kinds = [(precision(array.dtype, *options), _is_divided(array)) for array in arrays]
    for i, array in zip(places, arrays, strict=True):
        if array.size == 0:
            out[i] = _compat.zeros_as_sum(array, axis_name)
    for bucket in make_buckets(arrays, kinds, bucket_bytes):
        members = [arrays[i] for i in bucket.members]
        kind, is_divided = bucket.kind
        totals = _bucket_sum(members, axis_name, plan, kind, divisor if is_divided else None)
        for i, array, total in zip(bucket.members, members, totals, strict=True):
            out[places[i]] = _compat.sum_as(total.astype(array.dtype), array, axis_name)
    return tree.unflatten(out)


def _bucket_sum(
    leaves: list[jax.Array],
    axis_name: Any,
    plan: Plan,
    kind: Precision,
    divisor: int | None,
) -> list[jax.Array]:
    """The sums of leaves of one kind, in one buffer, divided by `divisor` if there is one."""
    itemsize = kind.results.itemsize
    num_bytes = sum(leaf.size for leaf in leaves) * itemsize
    program = plan.at(num_bytes, wire_dtype=kind.priced_as).program
    wide = [leaf.astype(kind.sums) for leaf in leaves]
    is_rounded = kind.sums != kind.results
    is_divided_after = divisor is not None and not is_rounded
    buffer = pack(wide, program.num_chunks, itemsize)
    if is_divided_after and program.executor == PALLAS and buffer.size == wide[0].size:
        buffer = _computed(buffer, axis_name)
    total = primitives.all_reduce(
        buffer,
        axis_name=axis_name,
        program=program,
        wire=kind.wire(program.depth),
        divisor=divisor if is_rounded else None,
    )
    sums = unpack(total, [leaf.shape for leaf in leaves])
    # What is not rounded on its way is divided where it is unpacked, which takes no more memory.
    return [each / divisor for each in sums] if is_divided_after else sums


@partial(jax.custom_jvp, nondiff_argnums=(1,))  # a derivative needs nothing of it
def _computed(buffer: jax.Array, axis_name: Any) -> jax.Array:
    """The same, as something that the compiler takes for computed.

    A parameter that is given to a kernel as it is, it copies before and after where a result of
    the kernel is computed with. This is one pass, into the kernel's own buffer, and part of what
    computes a gradient where the compiler fuses the two.
    """
    return jnp.where(lax.axis_index(axis_name) >= 0, buffer, jnp.zeros_like(buffer))


_computed.defjvp(lambda axis_name, primals, tangents: (_computed(*primals, axis_name), *tangents))


def _constant_sum(leaf: Any, plan: Plan) -> Any:
    """A constant is the same everywhere, as for lax."""
    numbers = countable(leaf)
    return _compat.times_constant(
        numbers if jnp.result_type(leaf) == np.bool_ else leaf, len(plan.program.live)
    )


def _is_divided(leaf: Any) -> bool:
    """Whether the mean of a leaf is made on its way; that of others is made of the sum."""
    return not is_constant(leaf) and jnp.issubdtype(leaf.dtype, np.inexact)
