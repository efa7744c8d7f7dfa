"""Check the arguments of a collective before anything is traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.collectives.partitioning import unmapped_axes
from ftmesh.errors import CollectiveError
from ftmesh.execute import _compat, primitives
from ftmesh.execute.types import AxisName, PlanLike


def check_call(
    name: str,
    axis_name: AxisName,
    axis_index_groups: None,
    plan: PlanLike,
    *,
    needs_all_ranks: bool = False,
) -> AxisName:
    """Check a call of the collective `name`, and return the name of its one axis.

    With `needs_all_ranks`, a plan with idle devices is an error.
    """
    if not hasattr(plan, "program"):
        raise CollectiveError(
            f"{name} needs a plan, not a {type(plan).__name__}: give plan=ftmesh.plan(topology)"
        )
    if axis_index_groups is not None:
        raise CollectiveError(
            f"{name} on a plan has no axis_index_groups: the plan says which ranks take part. Plan "
            "for the smaller topology instead"
        )
    names = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
    if len(names) != 1:
        raise CollectiveError(
            f"{name} on a plan runs along one axis, not {tuple(names)}: call it for the axis of "
            "the plan, and jax.lax for the others"
        )
    (axis_name,) = names
    if not _compat.axis_exists(axis_name):
        raise CollectiveError(
            f"axis {axis_name!r} is not bound here: call {name} inside jax.shard_map (or vmap with "
            f"axis_name={axis_name!r}) over a mesh with that axis"
        )
    size, num_ranks = lax.axis_size(axis_name), plan.program.num_ranks
    if size != num_ranks:
        idle = " (including idle ones)" if plan.with_idle else ""
        axes = axis_name if plan.topology.num_positions == 1 else (axis_name, "model")
        raise CollectiveError(
            f"axis {axis_name!r} has {size} devices, but the plan for {plan.topology} has "
            f"{num_ranks}{idle}: make the mesh with plan.jax_mesh({axes!r})"
        )
    if needs_all_ranks and plan.with_idle:
        raise CollectiveError(
            f"{name} gives every rank its part, which a plan with idle devices cannot do"
        )
    unmapped = unmapped_axes()
    if unmapped and primitives.is_interpreted(program=plan.program):
        raise CollectiveError(
            "the Pallas executor is interpreted on anything but TPUs, and JAX cannot interpret it "
            f"while axes are left to the compiler, here {', '.join(map(repr, unmapped))}: give "
            "jax.shard_map all axes, or plan with executor='ppermute'"
        )
    return axis_name


def is_constant(leaf: Any) -> bool:
    """Whether a leaf is known while tracing, and so the same on all ranks."""
    return not isinstance(leaf, jax.core.Tracer)


def as_operand(leaf: Any, axis_name: AxisName) -> jax.Array:
    """Return a leaf as an array of numbers that may vary along the axis.

    Raises CollectiveError for a leaf that is typed as the same on all ranks. lax sums such a leaf;
    but it is usually a gradient that JAX has summed already.
    """
    if is_constant(leaf):
        return _compat.as_varying(as_numbers(leaf), axis_name)
    leaf = as_numbers(leaf)
    if _compat.checks_vma() and axis_name not in _compat.varying_axes(leaf):
        raise CollectiveError(
            f"this value of shape {leaf.shape} does not vary along {axis_name!r}: it is the same "
            "on every device already. Under shard_map(check_vma=True) the gradient of replicated "
            "parameters comes out summed; summing it again would count it "
            f"{lax.axis_size(axis_name)} times. Either take the gradient with respect to "
            f"jax.lax.pcast(params, {axis_name!r}, to='varying') and sum that, or do not sum"
        )
    return leaf


def as_numbers(leaf: Any) -> jax.Array:
    """Return a leaf as an array of numbers; booleans become int32, as in lax."""
    leaf = jnp.asarray(leaf)
    if leaf.dtype == np.bool_:
        return leaf.astype(np.int32)
    if not jnp.issubdtype(leaf.dtype, np.number):
        raise CollectiveError(f"values of dtype {leaf.dtype} cannot be summed: pass numbers")
    return leaf
