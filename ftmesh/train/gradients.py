"""Gradients: their mean over all ranks, after the backward pass or during it.

    grads = mean_gradients(grads, "data", plan=plan)

sums what a backward pass has left, as `plan.pmean` does. The same in the backward pass itself:

    loss = lambda params, batch: model(with_mean_gradients(params, "data", plan=plan), batch)

Parameters pass through unchanged, and what comes back for them is the mean. The sum of a bucket of
gradients waits for those and for the sum before it, and nothing in the backward pass waits for it:
it may run beside that of earlier layers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
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
    marked, turn = list(leaves), _compat.as_varying(jnp.zeros(()), axis_name)
    for members in reversed(_buckets(leaves, order, bucket_bytes)):  # the backward pass turns round
        bucket, turn = _marked([leaves[i] for i in members], turn, axis_name, plan, options)
        for i, leaf in zip(members, bucket, strict=True):
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


def _marked(
    bucket: list[Any], turn: Any, axis_name: Any, plans: Plans, options: dict[str, Any]
) -> tuple[list[Any], Any]:
    """The leaves of one bucket, whose gradients are summed together, and whose turn is next.

    Buckets take turns, which pass from one to the next as a gradient does. They share the links
    anyway, and the TPU compiler was seen to put more of them beside convolutions so. Where types
    tell replicated parameters apart, turns are not kept.
    """
    varied = axis_name in _compat.varying_axes(bucket[0])

    def varying(bucket: list[Any]) -> list[Any]:
        return [_compat.as_varying(leaf, axis_name) for leaf in bucket]

    def identity(bucket: list[Any], turn: Any) -> tuple[list[Any], Any]:
        return varying(bucket), turn

    def forward(bucket: list[Any], turn: Any) -> tuple[tuple[list[Any], Any], None]:
        return identity(bucket, turn), None

    def backward(_: None, gradients: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
        grads, turn = gradients
        grads, turn = lax.optimization_barrier((varying(grads), turn))
        means = _mean(grads, axis_name, plans, options)
        if varied or not _compat.checks_varying():  # else all that a turn touches is typed varying
            means, turn = lax.optimization_barrier((varying(means), turn))
        return means, turn

    marked = jax.custom_vjp(identity)
    marked.defvjp(forward, backward)
    result: tuple[list[Any], Any] = marked(bucket, turn)
    return result
