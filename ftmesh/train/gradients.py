"""Gradients: their mean over all ranks, after the backward pass or during it.

    grads = mean_gradients(grads, "data", plan=plan)

sums what a backward pass has left, as `plan.pmean` does. The same in the backward pass itself:

    loss = lambda params, batch: model(with_mean_gradients(params, "data", plan=plan), batch)

Parameters pass through unchanged, and what comes back for them is the mean. The sum of a bucket of
gradients waits for those alone, and nothing but its own results waits for it: it may run beside the
backward pass of earlier layers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from ftmesh import _compat, collectives
from ftmesh.errors import ArgumentError
from ftmesh.packing import make_buckets
from ftmesh.plan import Plan

BUCKET_BYTES = 32 * 2**20  # large enough to fill the links, small enough to set out early

Plans = Plan | Mapping[int, Plan] | Callable[[int], Plan]


def plan_for(plans: Plans, num_bytes: int) -> Plan:
    """The plan for a bucket of so many bytes.

    `plans` is one plan; or a function from bytes to a plan; or plans by the bytes from which on
    they are taken, as in ``{0: quick, 2**20: bulk}``.
    """
    if isinstance(plans, Plan):
        return plans
    if callable(plans):
        return plans(num_bytes)
    fitting = [least for least in plans if least <= num_bytes]
    if not fitting:
        raise ArgumentError(
            f"no plan for a bucket of {num_bytes} bytes: the smallest given is for "
            f"{min(plans, default='none')}; give one from 0 bytes on"
        )
    return plans[max(fitting)]


def mean_gradients(
    grads: Any,
    axis_name: Any,
    *,
    plan: Plans,
    bucket_bytes: int = collectives.BUCKET_BYTES,
    wire_dtype: Any = None,
    accumulate_dtype: Any = None,
) -> Any:
    """The mean of a pytree over all ranks, in buckets, each on the plan for its size.

    The options are those of `ftmesh.pmean`; see `plan_for` for what `plan` may be.
    """
    leaves, tree = jax.tree.flatten(grads)
    options = {"wire_dtype": wire_dtype, "accumulate_dtype": accumulate_dtype}
    means = list(leaves)
    for members in _buckets(leaves, range(len(leaves)), bucket_bytes):
        bucket = _mean([leaves[i] for i in members], axis_name, plan, options)
        for i, mean in zip(members, bucket, strict=True):
            means[i] = mean
    return tree.unflatten(means)


def with_mean_gradients(
    params: Any,
    axis_name: Any,
    *,
    plan: Plans,
    bucket_bytes: int = BUCKET_BYTES,
    wire_dtype: Any = None,
    accumulate_dtype: Any = None,
    order: Sequence[int] | None = None,
) -> Any:
    """`params` as they are, but with gradients that are means over all ranks.

    Call it inside the function that is differentiated, and leave the gradients as they come out.
    Under ``check_vma=True`` they are typed as the parameters given: replicated for replicated ones,
    and counted once. Buckets are filled in `order`: the positions of the leaves, the first to have
    a gradient first, as `backward_order` finds them. Where that is not given, the last leaf is
    taken to come first. Not for forward-mode derivatives.
    """
    leaves, tree = jax.tree.flatten(params)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    order = range(len(leaves))[::-1] if order is None else order
    if sorted(order) != list(range(len(leaves))):
        raise ArgumentError(
            f"order must have each position from 0 to {len(leaves) - 1} once, one for each leaf of "
            f"the parameters; it is {list(order)}"
        )
    options = {"wire_dtype": wire_dtype, "accumulate_dtype": accumulate_dtype}
    marked = list(leaves)
    for members in _buckets(leaves, order, bucket_bytes):
        bucket = [leaves[i] for i in members]
        for i, leaf in zip(members, _marked(bucket, axis_name, plan, options), strict=True):
            marked[i] = leaf
    return tree.unflatten(marked)


def backward_order(
    loss: Callable[..., Any], params: Any, *args: Any, has_aux: bool = False
) -> tuple[int, ...]:
    """The positions of the leaves of `params` in the order in which their gradients come to be.

    Traces the backward pass of ``loss(params, *args)`` and runs nothing; `loss` may call
    collectives where their axis is bound. `has_aux` is as for `jax.grad`.
    """
    traced = jax.make_jaxpr(jax.grad(loss, has_aux=has_aux))(params, *args).jaxpr
    made = {var: at for at, step in enumerate(traced.eqns) for var in step.outvars}
    grads = traced.outvars[: len(jax.tree.leaves(params))]
    when = [-1 if isinstance(var, Literal) else made.get(var, -1) for var in grads]
    return tuple(int(i) for i in np.argsort(when, kind="stable"))


def _buckets(
    leaves: Sequence[Any], order: Sequence[int], bucket_bytes: int
) -> list[tuple[int, ...]]:
    """Positions of leaves that travel together; of an empty leaf, none."""
    arrays = [jnp.asarray(leaves[i]) for i in order]
    made = make_buckets(arrays, [array.dtype for array in arrays], bucket_bytes)
    return [tuple(order[i] for i in bucket.members) for bucket in made]


def _mean(bucket: list[Any], axis_name: Any, plans: Plans, options: dict[str, Any]) -> list[Any]:
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in map(jnp.asarray, bucket))
    means: list[Any] = collectives.pmean(
        bucket, axis_name, plan=plan_for(plans, num_bytes), bucket_bytes=sys.maxsize, **options
    )
    return means


def _marked(bucket: list[Any], axis_name: Any, plans: Plans, options: dict[str, Any]) -> list[Any]:
    """The leaves of one bucket, whose gradients are summed together."""
    varied = axis_name in _compat.varying_axes(bucket[0])

    def varying(bucket: list[Any]) -> list[Any]:
        return [_compat.as_varying(leaf, axis_name) for leaf in bucket]

    def forward(bucket: list[Any]) -> tuple[list[Any], None]:
        return varying(bucket), None

    def backward(_: None, grads: list[Any]) -> tuple[list[Any]]:
        means = _mean(varying(grads), axis_name, plans, options)
        return (varying(means) if varied else means,)

    identity = jax.custom_vjp(varying)
    identity.defvjp(forward, backward)
    marked: list[Any] = identity(bucket)
    return marked
