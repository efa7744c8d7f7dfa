"""Sums: `psum` and `pmean` as in `jax.lax`, on a plan.

    grads = ftmesh.pmean(grads, "data", plan=plan)

They run inside anything that binds the axis: shard_map (with check_vma on or off), pmap, or
``vmap(axis_name=...)``; under jit, grad, scan and remat. All ranks get bitwise the same result, and
the same inputs give the same bits every time.

Buffer: arrays that are summed together, in one buffer that a program works on.

In turns: sums that are made one after the other, and not at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.collectives.partitioning import on_pieces
from ftmesh.collectives.precision import Precision, precision
from ftmesh.collectives.validation import as_summand, countable, is_constant, the_axis
from ftmesh.execute import _compat, primitives
from ftmesh.execute.lowering import PALLAS, Program
from ftmesh.layout.buckets import Bucket, make_buckets, pack, unpack
from ftmesh.units import check_bytes

if TYPE_CHECKING:
    from ftmesh.planning.plan import Plan

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
    slab_bytes: int | None = None,
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
    `ftmesh.collectives.partitioning`.

    With `slab_bytes`, buffers have so many bytes at most, and one is there at a time: a larger leaf
    is summed slab by slab, in place. That is for donated arrays that leave no room for a copy; it
    costs the latency of all rounds for each slab, and a larger program. Then both numbers of bytes
    count leaves in the dtype in which they are added, and a vmap has as much for each example.
    Padding comes on top; and a slab is never less than the shorter of a row and a column of a
    matrix. Sums are as exact, but not of the same bits. See `ftmesh.collectives.slabs`.

    >>> import ftmesh
    >>> from ftmesh.testing import on_one_device
    >>> plan = ftmesh.plan(ftmesh.Topology.grid("4x2", failed="2x2@2,0"))
    >>> on_one_device(lambda x: psum(x, "data", plan=plan))(jnp.arange(4)).tolist()
    [6, 6, 6, 6]
    """
    axis_name = the_axis(axis_name, axis_index_groups, plan, "psum")
    options = wire_dtype, accumulate_dtype, bucket_bytes, slab_bytes
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
    slab_bytes: int | None = None,
    specs: Any = None,
) -> Any:
    """The mean of `x` over all ranks, as `jax.lax.pmean`; see `psum` for the options.

    Sums are divided before they are rounded: a mean of 16 bits is right where the sum would not
    fit.
    """
    axis_name = the_axis(axis_name, axis_index_groups, plan, "pmean")
    size = len(plan.program.live)
    options = wire_dtype, accumulate_dtype, bucket_bytes, slab_bytes
    means = on_pieces(lambda x: _sums(x, axis_name, plan, *options, divisor=size), x, specs)
    return jax.tree.map(lambda leaf, mean: mean if _is_divided(leaf) else mean / size, x, means)


def _sums(
    x: Any,
    axis_name: Any,
    plan: Plan,
    wire_dtype: Any,
    accumulate_dtype: Any,
    bucket_bytes: int,
    slab_bytes: int | None,
    *,
    divisor: int | None,
) -> Any:
    """The sums over all ranks; with a `divisor`, those that have to be are divided by it."""
    slab_bytes = _checked(slab_bytes)
    leaves, tree = jax.tree.flatten(x)
    options = wire_dtype, accumulate_dtype
    out = [_constant_sum(leaf, plan) if is_constant(leaf) else leaf for leaf in leaves]
    places = [i for i, leaf in enumerate(leaves) if not is_constant(leaf)]
    arrays = [as_summand(leaves[i], axis_name) for i in places]
    kinds = [(precision(array.dtype, *options), _is_divided(array)) for array in arrays]
    for i, array in zip(places, arrays, strict=True):
        if array.size == 0:
            out[i] = _compat.zeros_as_sum(array, axis_name)
    buckets = _buckets(arrays, kinds, bucket_bytes, slab_bytes)

    def total(at: int, members: list[Any]) -> list[Any]:
        kind, is_divided = buckets[at].kind
        over = divisor if is_divided else None
        taken = Taken.by(members, kind, plan, slab_bytes)
        if taken.is_a_slab:
            (large,) = members
            from ftmesh.collectives.slabs import sum_in_slabs

            return [sum_in_slabs(large, axis_name, taken.plan.program, kind, over, taken.size)]
        return sum_in_buffer(members, axis_name, taken.plan.program, kind, over)

    each = [[arrays[i] for i in bucket.members] for bucket in buckets]
    if slab_bytes is None:
        totals = list(map(total, itertools.count(), each))
    else:  # a compiler that keeps barriers makes no buffer before the one before it has gone
        totals = in_turns(each, total)
    for bucket, sums in zip(buckets, totals, strict=True):
        for i, sum_ in zip(bucket.members, sums, strict=True):
            array = arrays[i]
            out[places[i]] = _compat.sum_as(sum_.astype(array.dtype), array, axis_name)
    return tree.unflatten(out)


@dataclass(frozen=True)
class Taken:
    """What is summed at a time, a bucket or a slab, and the plan for its size."""

    size: int  # in elements, at most
    is_a_slab: bool
    plan: Plan

    @classmethod
    def by(
        cls, arrays: Sequence[Any], kind: Precision, plan: Plan, slab_bytes: int | None
    ) -> Taken:
        """By the arrays of a bucket."""
        size = sum(array.size for array in arrays)
        most = size if slab_bytes is None else max(1, slab_bytes // kind.sums.itemsize)
        num_bytes = min(size, most) * kind.results.itemsize
        return cls(
            min(size, most), size > most, plan.for_payload(num_bytes, wire_dtype=kind.priced_as)
        )


def taken(x: Any, plan: Plan, *, slab_bytes: int | None = None) -> list[Taken]:
    """What `pmean` of a pytree takes one after the other; its leaves may be shapes and dtypes."""
    slab_bytes = _checked(slab_bytes)
    leaves = jax.tree.leaves(x)
    kinds = [(precision(leaf.dtype), _is_divided(leaf)) for leaf in leaves]
    return [
        Taken.by([leaves[i] for i in bucket.members], bucket.kind[0], plan, slab_bytes)
        for bucket in _buckets(leaves, kinds, BUCKET_BYTES, slab_bytes)
    ]


def _checked(slab_bytes: int | None) -> int | None:
    return None if slab_bytes is None else check_bytes(slab_bytes, name="slab_bytes", most=None)


def _buckets(
    arrays: list[jax.Array], kinds: list[Any], bucket_bytes: int, slab_bytes: int | None
) -> list[Bucket]:
    """What is summed in one buffer, and what is larger than a slab, by itself."""
    if slab_bytes is None:
        return make_buckets(arrays, kinds, bucket_bytes)
    bucket_bytes = check_bytes(bucket_bytes, name="bucket_bytes", most=None)
    itemsizes = [kind.sums.itemsize for kind, _ in kinds]
    sizes = [array.size * each for array, each in zip(arrays, itemsizes, strict=True)]
    return make_buckets(arrays, kinds, min(bucket_bytes, slab_bytes), sizes)


def _constant_sum(leaf: Any, plan: Plan) -> Any:
    """A constant is the same everywhere, as for lax."""
    numbers = countable(leaf)
    return _compat.times_constant(
        numbers if jnp.result_type(leaf) == np.bool_ else leaf, len(plan.program.live)
    )


def _is_divided(leaf: Any) -> bool:
    """Whether the mean of a leaf is made on its way; that of others is made of the sum."""
    return not is_constant(leaf) and jnp.issubdtype(leaf.dtype, np.inexact)


def sum_in_buffer(
    leaves: list[jax.Array],
    axis_name: Any,
    program: Program,
    kind: Precision,
    divisor: int | None,
    all_reduce: Callable[..., jax.Array] = primitives.all_reduce,
) -> list[jax.Array]:
    """The sums of leaves of one kind, in the dtype of sums, divided by `divisor` if there is one.

    `all_reduce` is that of `ftmesh.execute.primitives`, or `sum_varying`.
    """
    itemsize = kind.results.itemsize
    wide = [leaf.astype(kind.sums) for leaf in leaves]
    is_rounded = kind.sums != kind.results
    is_divided_after = divisor is not None and not is_rounded
    buffer = pack(wide, program.num_chunks, itemsize)
    if is_divided_after and program.executor == PALLAS and buffer.size == wide[0].size:
        buffer = _computed(buffer, axis_name)
    total = all_reduce(
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


def in_turns(
    buckets: Sequence[list[Any]], reduce: Callable[[int, list[Any]], list[Any]]
) -> list[list[Any]]:
    """What `reduce` makes of each bucket, given its number and its arrays, one after the other."""
    found: list[list[Any]] = []
    for at, bucket in enumerate(buckets):
        now = bucket
        if found:
            # All that comes out must be used: nothing waits for an operand that is not.
            passed = _compat.barrier([*now, *found[-1]])
            now, found[-1] = passed[: len(now)], passed[len(now) :]
        found.append(reduce(at, now))
    return found
