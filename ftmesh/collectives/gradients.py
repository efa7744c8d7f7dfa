"""Gradients: averaged during the backward pass, or accumulated over parts of a batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Literal

from ftmesh.collectives.all_reduce import pmean
from ftmesh.collectives.operands import as_numbers, choose_precision
from ftmesh.errors import ArgumentError
from ftmesh.execute import _compat
from ftmesh.execute.types import AxisName, DTypeLike, PlanLike, PyTree
from ftmesh.layout.buckets import make_buckets

BUCKET_BYTES = 32 * 2**20  # large enough to fill the links, small enough to start early

SCOPE = "sums_in_the_backward_pass"  # the name of these sums in compiled programs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReducedGradients:
    """Gradients that are means over all ranks: whole, or a list of this rank's parts of them.

    The `value_and_grad` of an optimizer returns them, and its `update` takes them.
    """

    tree: PyTree
    is_sharded: bool = field(default=False, metadata={"static": True})


def with_mean_gradients(
    params: PyTree,
    axis_name: AxisName,
    *,
    plan: PlanLike,
    bucket_bytes: int = BUCKET_BYTES,
    wire_dtype: DTypeLike | None = None,
    accumulate_dtype: DTypeLike | None = None,
    order: Sequence[int] | None = None,
) -> PyTree:
    """Return `params` unchanged, with gradients that are means over all ranks.

    Call it inside the function that is differentiated, and use the gradients as they come out:
    under ``check_vma=True`` those of replicated parameters are replicated, and counted once. The
    all-reduce of a bucket waits for its gradients and for the bucket before it, and overlaps with
    the backward pass of earlier layers. Not for forward-mode derivatives.

    Args:
        params: A pytree of arrays.
        plan: The backward pass can overlap with the sums of an unrolled plan
            (`Plan.unrolled_variant`), but not with loops or kernels.
        bucket_bytes: The largest bucket of gradients that are summed together.
        axis_name, wire_dtype, accumulate_dtype: As for `psum`.
        order: The order in which buckets are filled: positions of leaves, the first to have a
            gradient first, as `backward_order` returns them. By default the last leaf is first.
    """
    leaves, tree = jax.tree.flatten(params)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    order = range(len(leaves))[::-1] if order is None else order
    check_order(order, len(leaves))
    arrays = [leaves[i] for i in order]
    filled = make_buckets(arrays, [array.dtype for array in arrays], bucket_bytes)
    filled.sort(key=lambda bucket: max(bucket.members))  # the first to be complete first
    buckets = [tuple(order[i] for i in bucket.members) for bucket in filled]

    def mean(_: int, bucket: list[Any]) -> list[Any]:
        means = pmean(
            {i: grad for i, grad in enumerate(bucket) if grad is not None},
            axis_name,
            plan=plan,
            wire_dtype=wire_dtype,
            accumulate_dtype=accumulate_dtype,
            bucket_bytes=sys.maxsize,
        )
        return [means.get(i) for i in range(len(bucket))]

    slots = [[leaves[i] for i in bucket] for bucket in buckets]
    return tree.unflatten(reduce_in_backward(leaves, buckets, slots, mean, axis_name))


def reduce_in_backward(
    leaves: list[Any],
    buckets: Sequence[Sequence[int]],
    slots: list[list[Any]],
    reduce: Callable[[int, list[Any]], list[Any]],
    axis_name: AxisName,
) -> list[Any]:
    """Return `leaves` unchanged; in the backward pass, reduce their gradients bucket by bucket.

    A bucket has the positions of its leaves, and a leaf in none keeps its gradient. `reduce` is
    called with the index of a bucket and its gradients; the `slots` of the bucket get as gradients
    what it returns. None stands for a gradient that is zero because the loss does not depend on
    the leaf.
    """
    bucketed = {i: leaves[i] for bucket in buckets for i in bucket}
    varies = [[axis_name in _compat.varying_axes(slot) for slot in bucket] for bucket in slots]

    def identity(bucketed: dict[int, Any], _: list[list[Any]]) -> dict[int, Any]:
        return {i: _compat.as_varying(leaf, axis_name) for i, leaf in bucketed.items()}

    def forward(bucketed: dict[int, Any], slots: list[list[Any]]) -> tuple[dict[int, Any], None]:
        return identity({i: leaf.value for i, leaf in bucketed.items()}, slots), None

    def store(slot_grads: list[list[Any]], filled: list[tuple[int, int]], grads: list[Any]) -> None:
        for (index, slot), grad in zip(filled, grads, strict=True):
            is_varying = varies[index][slot]
            slot_grads[index][slot] = _compat.as_varying(grad, axis_name) if is_varying else grad

    def backward(_: None, grads: dict[int, Any]) -> tuple[None, list[list[Any]]]:
        slot_grads: list[list[Any]] = [[None] * len(bucket) for bucket in slots]
        previous: list[Any] = []
        filled: list[tuple[int, int]] = []  # the bucket and slot of each array in `previous`
        for index, positions in enumerate(buckets):
            bucket = [None if isinstance(grads[i], SymbolicZero) else grads[i] for i in positions]
            present = [grad for grad in bucket if grad is not None]
            if not present:
                continue
            # XLA was seen to put all sums after the backward pass if it may run them at once. A
            # barrier orders them. Nothing waits for an operand of it that is not used.
            if previous:
                passed = _compat.barrier([*present, *previous])
                present, previous = passed[: len(present)], passed[len(present) :]
                store(slot_grads, filled, previous)
            waiting = iter(present)
            with jax.named_scope(SCOPE):
                reduced = reduce(index, [None if g is None else next(waiting) for g in bucket])
            filled = [(index, slot) for slot, grad in enumerate(reduced) if grad is not None]
            previous = [grad for grad in reduced if grad is not None]
        store(slot_grads, filled, previous)
        return None, slot_grads

    marked = jax.custom_vjp(identity)
    marked.defvjp(forward, backward, symbolic_zeros=True)
    passed = marked(bucketed, slots)
    return [passed.get(i, leaf) for i, leaf in enumerate(leaves)]


def local_value_and_grad(
    loss: Callable[..., Any], axis_name: AxisName, *, has_aux: bool = False
) -> Callable[..., Any]:
    """As `jax.value_and_grad`, but never summed over ranks.

    Under ``check_vma=True`` JAX sums the gradients of replicated parameters itself.
    """

    def run(params: PyTree, *args: PyTree) -> Any:
        local = jax.tree.map(lambda leaf: _compat.as_varying(leaf, axis_name), params)
        return jax.value_and_grad(loss, has_aux=has_aux)(local, *args)

    return run


def backward_order(
    loss: Callable[..., Any], params: PyTree, *args: PyTree, has_aux: bool = False
) -> tuple[int, ...]:
    """Return the positions of the leaves of `params` in the order their gradients are computed.

    Traces the backward pass of ``loss(params, *args)`` without running it. If one operation, such
    as a jitted function, computes several gradients, that of the last leaf counts as first. `loss`
    may call collectives if their axis is bound.
    """
    traced = jax.make_jaxpr(jax.value_and_grad(loss, has_aux=has_aux))(params, *args)
    jaxpr, num_grads = traced.jaxpr, len(jax.tree.leaves(params))
    computed_at = {var: step for step, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    grads = jaxpr.outvars[len(jaxpr.outvars) - num_grads :]
    steps = [-1 if isinstance(var, Literal) else computed_at.get(var, -1) for var in grads]
    return tuple(sorted(range(num_grads), key=lambda i: (steps[i], -i)))


def check_order(order: Sequence[int], num_leaves: int) -> None:
    """Raise ArgumentError unless `order` is a permutation of the positions of the leaves."""
    if sorted(order) != list(range(num_leaves)):
        raise ArgumentError(
            f"order must have each position from 0 to {num_leaves - 1} once, one for each leaf of "
            f"the parameters; it is {list(order)}"
        )


def accumulate_gradients(
    value_and_grad: Callable[..., Any],
    num_parts: int,
    *,
    mean: bool = True,
    accumulate_dtype: DTypeLike | None = None,
) -> Callable[..., Any]:
    """Return `value_and_grad` run on equal parts of a batch, one after the other.

    Activations need the memory of one part. Under ``check_vma=True`` gradients are those of this
    rank alone, even for replicated parameters: sum them over ranks once, with `Plan.pmean`.

    Args:
        value_and_grad: Called as ``value_and_grad(params, *batch)``; returns a value (or a pytree)
            and gradients, as the function that `jax.value_and_grad` returns does. Arrays of the
            batch are split along their first dimension.
        num_parts: The number of parts. It must divide the batch.
        mean: Return the mean over the parts, and the sum of integers such as counts. If False,
            return sums, for losses that are sums themselves, as those of
            `BatchShares.mean_contribution` are, or weighted ones together with their weight.
        accumulate_dtype: The dtype in which gradients are added. By default float32 for those of
            16 bits or fewer, and their own for others. Values are added in float32 or wider. All
            results have their own dtype.

    >>> square = jax.value_and_grad(lambda w, x: jnp.mean((w * x) ** 2))
    >>> value, grad = accumulate_gradients(square, 2)(3.0, jnp.arange(4.0))
    >>> float(value), float(grad)
    (31.5, 21.0)
    """
    if not isinstance(num_parts, int) or num_parts < 1:
        raise ArgumentError(f"num_parts must be a positive whole number, not {num_parts!r}")

    def run(params: PyTree, *batch: PyTree) -> Any:
        parts = jax.tree.map(lambda rows: _split_rows(rows, num_parts), batch)
        for rows in jax.tree.leaves(parts):
            params = jax.tree.map(partial(_compat.varying_like, other=rows), params)

        def run_part(part: PyTree) -> Any:
            result = value_and_grad(params, *part)
            if not isinstance(result, tuple) or len(result) != 2:
                raise ArgumentError(
                    "accumulate_gradients takes a function that returns a value and gradients: "
                    "give it jax.value_and_grad(loss), not the loss"
                )
            return jax.tree.map(as_numbers, result)

        def add(totals: list[Any], part: PyTree) -> tuple[list[Any], None]:
            results = jax.tree.leaves(run_part(part))
            return [t + x.astype(t.dtype) for t, x in zip(totals, results, strict=True)], None

        def finish(total: Any, aval: Any) -> Any:
            is_divided = mean and jnp.issubdtype(total.dtype, np.inexact)
            return (total / num_parts if is_divided else total).astype(aval.dtype)

        first = jax.tree.map(lambda rows: rows[0], parts)
        traced, (value, grads) = jax.make_jaxpr(run_part, return_shape=True)(first)
        dtypes: list[DTypeLike | None] = [None for _ in jax.tree.leaves(value)]
        dtypes += [accumulate_dtype for _ in jax.tree.leaves(grads)]
        zeros = [
            _compat.zeros_of_aval(aval, choose_precision(aval.dtype, None, dtype).sum_dtype)
            for aval, dtype in zip(traced.out_avals, dtypes, strict=True)
        ]
        totals, _ = lax.scan(add, zeros, parts)
        results = map(finish, totals, traced.out_avals)
        return jax.tree.unflatten(jax.tree.structure((value, grads)), results)

    return run


def _split_rows(rows: Any, num_parts: int) -> jax.Array:
    rows = jnp.asarray(rows)
    num_rows = rows.shape[0] if rows.ndim else 0
    if not rows.ndim or num_rows % num_parts:
        divisors = [n for n in range(1, num_rows + 1) if num_rows % n == 0]
        raise ArgumentError(
            f"an array of shape {rows.shape} cannot be split into {num_parts} equal parts: take a "
            f"number of parts from {divisors or 'the divisors of the number of rows'}, or pad the "
            f"batch to {-(-num_rows // num_parts) * num_parts} rows with examples of weight zero"
        )
    return rows.reshape(num_parts, num_rows // num_parts, *rows.shape[1:])
