"""Gradients: their mean over all ranks, after the backward pass or during it.

    grads = mean_gradients(grads, "data", plan=plan)

sums what a backward pass has left, as `plan.pmean` does. The same in the backward pass itself:

    loss = lambda params, batch: model(with_mean_gradients(params, "data", plan=plan), batch)

Parameters pass through unchanged, and what comes back for them is the mean. The sum of a bucket of
gradients waits for those and for the sum before it, and nothing in the backward pass waits for it:
it may run beside that of earlier layers.

Accumulation: gradients of a rank's share of a batch in parts, for one reduction at the end.

    value_and_grad = accumulated(jax.value_and_grad(loss), 4)
    loss, grads = plan.pmean(value_and_grad(params, batch), "data")

Activations take the memory of one part, and links carry gradients once a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Literal

from ftmesh import collectives
from ftmesh.collectives.all_reduce import in_turns
from ftmesh.collectives.precision import precision
from ftmesh.collectives.validation import countable
from ftmesh.errors import ArgumentError
from ftmesh.execute import _compat
from ftmesh.layout.buckets import make_buckets
from ftmesh.planning.plan import Plan

BUCKET_BYTES = 32 * 2**20  # large enough to fill the links, small enough to set out early

SCOPE = "sums_in_the_backward_pass"  # how they are called in compiled programs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Means:
    """Gradients that are means over all ranks already: whole, or a rank's shards for some owners.

    As the optimizers' `value_and_grad` leaves them, and their `update` takes them.
    """

    tree: Any
    owners: str = field(default="", metadata={"static": True})  # a mark of them; empty for whole


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

    `wire_dtype` and `accumulate_dtype` are as for `ftmesh.psum`; see `plan_for` for what `plan` may
    be.
    """
    leaves, tree = jax.tree.flatten(grads)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    options = {"wire_dtype": wire_dtype, "accumulate_dtype": accumulate_dtype}
    for members in _buckets(leaves, range(len(leaves)), bucket_bytes):
        means = _mean([leaves[i] for i in members], axis_name, plan, options)
        for i, mean in zip(members, means, strict=True):
            leaves[i] = mean
    return tree.unflatten(leaves)


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
    taken to come first. An unrolled plan lets the backward pass go on beside the sums; beside loops
    and kernels nothing runs. Not for forward-mode derivatives.
    """
    leaves, tree = jax.tree.flatten(params)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    turns = _buckets(leaves, range(len(leaves))[::-1] if order is None else order, bucket_bytes)
    options = {"wire_dtype": wire_dtype, "accumulate_dtype": accumulate_dtype}

    def mean(_: int, bucket: list[Any]) -> list[Any]:
        there = [i for i, grad in enumerate(bucket) if grad is not None]
        means = _mean([bucket[i] for i in there], axis_name, plan, options)
        found = dict(zip(there, means, strict=True))
        return [found.get(i) for i in range(len(bucket))]

    slots = [[leaves[i] for i in members] for members in turns]
    return tree.unflatten(reduced_on_the_way(leaves, turns, slots, mean, axis_name))


def reduced_on_the_way(
    leaves: list[Any],
    turns: Sequence[Sequence[int]],
    slots: list[list[Any]],
    reduce: Callable[[int, list[Any]], list[Any]],
    axis_name: Any,
) -> list[Any]:
    """`leaves` as they are; `slots` get as gradients what `reduce` makes of those of the leaves.

    Turn by turn: of each, the positions of some leaves, `reduce` is given the number of the turn
    and their gradients, and makes those of its slots. In both, None stands for a gradient that is
    zero, since the loss does not depend on a leaf. A leaf in no turn gets its own.
    """
    given = {i: leaves[i] for members in turns for i in members}
    varied = [[axis_name in _compat.varying_axes(slot) for slot in turn] for turn in slots]

    def identity(given: dict[int, Any], _: list[list[Any]]) -> dict[int, Any]:
        return {i: _compat.as_varying(leaf, axis_name) for i, leaf in given.items()}

    def forward(given: dict[int, Any], slots: list[list[Any]]) -> tuple[dict[int, Any], None]:
        return identity({i: leaf.value for i, leaf in given.items()}, slots), None

    def backward(_: None, grads: dict[int, Any]) -> tuple[None, list[list[Any]]]:
        known = [[_known(grads[i]) for i in members] for members in turns]
        there = [at for at, turn in enumerate(known) if any(grad is not None for grad in turn)]
        found: list[list[Any]] = [[None] * len(turn) for turn in slots]
        places: dict[int, list[int]] = {}

        def run(turn: int, some: list[Any]) -> list[Any]:
            at, waiting = there[turn], iter(some)
            given = [None if grad is None else next(waiting) for grad in known[at]]
            with jax.named_scope(SCOPE):
                made = reduce(at, given)
            places[at] = [place for place, grad in enumerate(made) if grad is not None]
            return [grad for grad in made if grad is not None]

        # A compiler that may do all at once was seen to put all sums behind the backward pass, each
        # into the gaps of another.
        made = in_turns([[grad for grad in known[at] if grad is not None] for at in there], run)
        for at, turn in zip(there, made, strict=True):
            for place, grad in zip(places[at], turn, strict=True):
                is_varied = varied[at][place]
                found[at][place] = _compat.as_varying(grad, axis_name) if is_varied else grad
        return None, found

    marked = jax.custom_vjp(identity)
    marked.defvjp(forward, backward, symbolic_zeros=True)
    passed = marked(given, slots)
    return [passed.get(i, leaf) for i, leaf in enumerate(leaves)]


def _known(grad: Any) -> Any:
    return None if isinstance(grad, SymbolicZero) else grad


def value_and_own_grad(loss: Callable[..., Any], axis_name: Any, *, has_aux: bool = False) -> Any:
    """As `jax.value_and_grad`, of this rank alone; for parameters that all ranks have.

    Under ``check_vma=True`` those would get the sum over all ranks by themselves.
    """

    def run(params: Any, *args: Any) -> Any:
        own = jax.tree.map(lambda leaf: _compat.as_varying(leaf, axis_name), params)
        return jax.value_and_grad(loss, has_aux=has_aux)(own, *args)

    return run


def backward_order(
    loss: Callable[..., Any], params: Any, *args: Any, has_aux: bool = False
) -> tuple[int, ...]:
    """The positions of the leaves of `params` in the order in which their gradients come to be.

    Traces the backward pass of ``loss(params, *args)`` and runs nothing; `loss` may call
    collectives where their axis is bound. `has_aux` is as for `jax.grad`. Of gradients that one
    operation makes, a jitted function for one, that of the last leaf counts as the first.
    """
    traced = jax.make_jaxpr(jax.value_and_grad(loss, has_aux=has_aux))(params, *args)
    return _order(traced.jaxpr, len(jax.tree.leaves(params)))


def _order(jaxpr: Any, num_grads: int) -> tuple[int, ...]:
    """The order of the gradients, which are the last that a traced function gives."""
    made = {var: at for at, step in enumerate(jaxpr.eqns) for var in step.outvars}
    grads = jaxpr.outvars[len(jaxpr.outvars) - num_grads :]
    when = [-1 if isinstance(var, Literal) else made.get(var, -1) for var in grads]
    return tuple(sorted(range(len(when)), key=lambda i: (when[i], -i)))


def _buckets(
    leaves: Sequence[Any], order: Sequence[int], bucket_bytes: int
) -> list[tuple[int, ...]]:
    """Positions of leaves that travel together, first those that are complete first.

    An empty leaf is in none.
    """
    check_order(order, len(leaves))
    arrays = [leaves[i] for i in order]
    made = make_buckets(arrays, [array.dtype for array in arrays], bucket_bytes)
    made.sort(key=lambda bucket: max(bucket.members))
    return [tuple(order[i] for i in bucket.members) for bucket in made]


def check_order(order: Sequence[int], num_leaves: int) -> None:
    """Refuses an order that is none."""
    if sorted(order) != list(range(num_leaves)):
        raise ArgumentError(
            f"order must have each position from 0 to {num_leaves - 1} once, one for each leaf of "
            f"the parameters; it is {list(order)}"
        )


def _mean(bucket: list[Any], axis_name: Any, plans: Plans, options: dict[str, Any]) -> list[Any]:
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in bucket)
    means: list[Any] = collectives.pmean(
        bucket, axis_name, plan=plan_for(plans, num_bytes), bucket_bytes=sys.maxsize, **options
    )
    return means


def accumulated(
    value_and_grad: Callable[..., Any],
    num_parts: int,
    *,
    mean: bool = True,
    accumulate_dtype: Any = None,
) -> Callable[..., Any]:
    """`value_and_grad`, run on `num_parts` equal parts of a batch, one after the other.

    It is called as ``value_and_grad(params, *batch)``, and gives a value, with or without others
    beside it, and gradients, as what `jax.value_and_grad` makes does. Arrays of the batch are cut
    along their first dimension. What comes out is the mean over the parts; of whole numbers, such
    as counts, the sum. With `mean` off it is the sum of all, for losses that are sums themselves:
    those of `Shares.part_of_mean`, or weighted ones with the weight beside them.

    Gradients are added in `accumulate_dtype`, float32 or bfloat16 for one: where it is not given,
    in float32 for those of 16 bits or fewer, and in their own for others. They come out in their
    own. Values are added in no less than float32. Under ``check_vma=True`` gradients are those of
    this rank alone, also for parameters that are the same at all ranks: sum them once, after this.

    >>> square = jax.value_and_grad(lambda w, x: jnp.mean((w * x) ** 2))
    >>> value, grad = accumulated(square, 2)(3.0, jnp.arange(4.0))
    >>> float(value), float(grad)
    (31.5, 21.0)
    """
    if not isinstance(num_parts, int) or num_parts < 1:
        raise ArgumentError(f"num_parts must be a positive whole number, not {num_parts!r}")

    def run(params: Any, *batch: Any) -> Any:
        parts = jax.tree.map(lambda rows: _cut(rows, num_parts), batch)
        rows = jax.tree.leaves(parts)
        params = jax.tree.map(lambda leaf: _varying_as_any(leaf, rows), params)

        def of_part(part: Any) -> Any:
            return jax.tree.map(countable, _pair(value_and_grad(params, *part)))

        def add(total: list[Any], part: Any) -> tuple[list[Any], None]:
            found = jax.tree.leaves(of_part(part))
            return [sums + x.astype(sums.dtype) for sums, x in zip(total, found, strict=True)], None

        first = jax.tree.map(lambda rows: rows[0], parts)
        traced, (value, grads) = jax.make_jaxpr(of_part, return_shape=True)(first)
        wanted = [None for _ in jax.tree.leaves(value)]
        wanted += [accumulate_dtype for _ in jax.tree.leaves(grads)]
        nothing = [
            _compat.zeros_of(aval, precision(aval.dtype, None, dtype).sums)
            for aval, dtype in zip(traced.out_avals, wanted, strict=True)
        ]
        total, _ = lax.scan(add, nothing, parts)
        results = [
            (sums / num_parts if mean and jnp.issubdtype(sums.dtype, np.inexact) else sums)
            for sums in total
        ]
        return jax.tree.unflatten(
            jax.tree.structure((value, grads)),
            [x.astype(aval.dtype) for x, aval in zip(results, traced.out_avals, strict=True)],
        )

    return run


def _cut(rows: Any, num_parts: int) -> jax.Array:
    """An array of rows in equal parts, in the order they have."""
    rows = jnp.asarray(rows)
    num_rows = rows.shape[0] if rows.ndim else 0
    if not rows.ndim or num_rows % num_parts:
        fitting = [n for n in range(1, num_rows + 1) if num_rows % n == 0]
        raise ArgumentError(
            f"an array of shape {rows.shape} is not {num_parts} equal parts of rows: take a number "
            f"of parts from {fitting or 'those that divide the rows'}, or fill the batch up to "
            f"{-(-num_rows // num_parts) * num_parts} rows with ones of weight zero"
        )
    return rows.reshape(num_parts, num_rows // num_parts, *rows.shape[1:])


def _varying_as_any(leaf: Any, others: list[jax.Array]) -> Any:
    """A leaf as one that may differ along all axes along which any of the others may."""
    for other in others:
        leaf = _compat.varying_as(leaf, other)
    return leaf


def _pair(found: Any) -> tuple[Any, Any]:
    if not isinstance(found, tuple) or len(found) != 2:
        raise ArgumentError(
            "accumulated takes a function that gives a value and gradients: give it "
            "jax.value_and_grad(loss), not the loss"
        )
    return found
