"""The operands of a collective: checks, and the dtypes in which they are added and sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.collectives.partitioning import unmapped_axes
from ftmesh.cost.wire_precision import (
    FLOAT_FORMATS,
    WIRE_DTYPES,
    accumulation_dtype,
    partial_sum_dtype,
)
from ftmesh.errors import CollectiveError
from ftmesh.execute import _compat, primitives
from ftmesh.execute.context import WireDtypes
from ftmesh.execute.types import AxisName, DTypeLike, PlanLike

DType = np.dtype[Any]


def check_call(
    name: str,
    axis_name: AxisName,
    axis_index_groups: None,
    plan: PlanLike,
    *,
    needs_all_ranks: bool = False,
) -> AxisName:
    """Check a call of the collective `name`, and return the name of its one axis."""
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
    """True if a leaf is known while tracing, and so the same on all ranks."""
    return not isinstance(leaf, jax.core.Tracer)


def as_operand(leaf: Any, axis_name: AxisName) -> jax.Array:
    """Return a leaf as an array of numbers that may vary along the axis.

    Raises CollectiveError for a leaf that is typed as the same on all ranks, usually a gradient
    that JAX has summed already.
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


@dataclass(frozen=True)
class Precision:
    """The dtype in which leaves are added, and the one in which their sums are sent."""

    sum_dtype: DType
    result_dtype: DType

    @property
    def planning_dtype(self) -> str:
        """The name of the dtype for which a plan is chosen."""
        return self.result_dtype.name if self.result_dtype.name in WIRE_DTYPES else "float32"

    def wire(self, depth: int) -> WireDtypes:
        """The dtypes on the links, for a plan whose sums are `depth` additions deep."""
        if self.sum_dtype == self.result_dtype:
            return WireDtypes()
        partials = self.sum_dtype.name
        if self.result_dtype.name in FLOAT_FORMATS:  # the error bound of other dtypes is not known
            partials = partial_sum_dtype(self.result_dtype.name, depth=depth, sums=partials)
        return WireDtypes(jnp.dtype(partials), self.result_dtype)


def choose_precision(
    dtype: DTypeLike, wire_dtype: DTypeLike | None = None, accumulate_dtype: DTypeLike | None = None
) -> Precision:
    """The precision of leaves of `dtype`. Leaves that are not floating-point keep their dtype."""
    wire = _check_dtype("wire_dtype", wire_dtype, WIRE_DTYPES)
    sum_dtype = _check_dtype("accumulate_dtype", accumulate_dtype, tuple(FLOAT_FORMATS))
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, np.floating):
        return Precision(dtype, dtype)
    if sum_dtype is None:
        is_known = dtype.name in FLOAT_FORMATS
        sum_dtype = jnp.dtype(accumulation_dtype(dtype.name) if is_known else "float32")
    result_dtype = wire or dtype
    is_narrower = result_dtype.itemsize < sum_dtype.itemsize
    return Precision(sum_dtype, result_dtype if is_narrower else sum_dtype)


def _check_dtype(name: str, given: DTypeLike | None, allowed: tuple[str, ...]) -> DType | None:
    if given is None:
        return None
    try:
        dtype: DType = jnp.dtype(given)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.name not in allowed:
        raise CollectiveError(
            f"{name} must be a floating dtype, one of {', '.join(allowed)}; it is {given!r}"
        )
    if dtype.itemsize > 4 and not jax.config.jax_enable_x64:
        raise CollectiveError(
            f"{name} is {dtype.name}, which JAX supports only with jax_enable_x64"
        )
    return dtype
