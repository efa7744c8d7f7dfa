"""Calls: what can be wrong with one, looked at before anything is traced, and said in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.collectives.partitioning import axes_left
from ftmesh.errors import CollectiveError
from ftmesh.execute import _compat, primitives

if TYPE_CHECKING:
    from ftmesh.planning.plan import Plan


def the_axis(
    axis_name: Any, axis_index_groups: Any, plan: Plan, what: str, *, whole: bool = False
) -> Any:
    """The one axis name, after everything that can be wrong with a call has been looked at."""
    if not hasattr(plan, "program"):
        raise CollectiveError(
            f"{what} needs a plan, and not a {type(plan).__name__}: give plan=ftmesh.plan(topology)"
        )
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
        axes = axis_name if plan.topology.num_positions == 1 else (axis_name, "model")
        raise CollectiveError(
            f"axis {axis_name!r} has {size} devices, but the plan for {plan.topology} has "
            f"{wanted}{idle}: make the mesh with plan.jax_mesh({axes!r})"
        )
    if whole and plan.with_idle:
        raise CollectiveError(
            f"{what} gives every rank its part, and a plan with idle devices cannot"
        )
    left = axes_left()
    if left and primitives.is_interpreted(program=plan.program):
        raise CollectiveError(
            "elsewhere than on TPUs the Pallas executor is interpreted, which JAX does only where "
            f"no axis is left to the compiler, as {', '.join(map(repr, left))} here: give "
            "jax.shard_map all axes, or plan with executor='ppermute'"
        )
    return axis_name


def is_constant(leaf: Any) -> bool:
    """Whether a leaf is known while tracing, and so the same at all ranks."""
    return not isinstance(leaf, jax.core.Tracer)


def as_summand(leaf: Any, axis_name: Any) -> jax.Array:
    """A leaf as an array of numbers that may differ along the axis, to be added up along it.

    Refuses one that is typed as the same at all ranks. `lax` sums it all the same; but what comes
    so typed to a sum is mostly a gradient that JAX has summed already.
    """
    if is_constant(leaf):
        return _compat.as_varying(countable(leaf), axis_name)
    leaf = countable(leaf)
    if _compat.checks_varying() and axis_name not in _compat.varying_axes(leaf):
        raise CollectiveError(
            f"this value of shape {leaf.shape} does not vary along {axis_name!r}: it is the same "
            "on every device already. Under shard_map(check_vma=True) the gradient of replicated "
            "parameters comes out summed; summing it again would count it "
            f"{lax.axis_size(axis_name)} times. Either take the gradient with respect to "
            f"jax.lax.pcast(params, {axis_name!r}, to='varying') and sum that, or do not sum"
        )
    return leaf


def countable(leaf: Any) -> jax.Array:
    """A leaf as an array of numbers; booleans are counted, as in lax."""
    leaf = jnp.asarray(leaf)
    if leaf.dtype == np.bool_:
        return leaf.astype(np.int32)
    if not jnp.issubdtype(leaf.dtype, np.number):
        raise CollectiveError(f"values of dtype {leaf.dtype} cannot be summed: pass numbers")
    return leaf


def axis_of(given: int, ndim: int, what: str) -> int:
    """An axis of an array with so many dimensions, counted from the end where it is negative."""
    if not -ndim <= given < ndim:
        raise CollectiveError(f"{what} is {given}, and must be from {-ndim} to {ndim - 1}")
    return given % ndim
