"""XLA's own collectives along the ring of a plan, for the executor ``"xla"``.

They are those of `jax.lax`, with its types and derivatives, on the mesh that the plan orders. Sums
of 16 bits or fewer are added in float32, as on every executor.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ftmesh.collectives.operands import Precision, choose_precision
from ftmesh.execute import _compat, primitives
from ftmesh.execute.lowering import Program
from ftmesh.execute.types import AxisName

TILE = 1024  # elements: XLA for TPUs gathers whole tiles, and sums what is not made of them


def all_reduce(
    x: jax.Array, axis_name: AxisName, program: Program, precision: Precision, divisor: int | None
) -> jax.Array:
    """Sum an array over all ranks, in the dtype of its sum; divide it by `divisor`, if given."""
    total = lax.psum(_wide(x, axis_name, program, precision), axis_name)
    return _rounded(total if divisor is None else total / divisor, precision)


def reduce_scatter(
    x: jax.Array, axis_name: AxisName, program: Program, precision: Precision, dimension: int
) -> jax.Array:
    """Sum an array over all ranks and return this rank's block of a dimension."""
    wide = _wide(x, axis_name, program, precision)
    total = lax.psum_scatter(wide, axis_name, scatter_dimension=dimension, tiled=True)
    return _rounded(total, precision)


def all_gather(
    x: jax.Array,
    axis_name: AxisName,
    program: Program,
    *,
    invariant: bool = False,
    tiled: bool = False,
) -> jax.Array:
    """Gather the arrays of all ranks, ``[rank, ...]``; the derivative is summed as in `psum`.

    With `invariant` the result is typed as the same on all ranks, and with `tiled` too, arrays are
    concatenated along their first dimension.
    """
    x = primitives.on_mesh_of_plan(x, axis_name=axis_name, program=program)
    if invariant:
        return _compat.all_gather_invariant(x, axis_name, tiled=tiled)
    if jnp.issubdtype(x.dtype, jnp.floating) and choose_precision(x.dtype).sum_dtype != x.dtype:
        return _gather_narrow(x, axis_name)
    return lax.all_gather(x, axis_name)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather_narrow(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """Gather numbers of few bits as they are; their cotangents are summed in more."""
    return lax.all_gather(x, axis_name)


def _gather_narrow_backward(axis_name: AxisName, _: None, cotangent: jax.Array) -> tuple[Any]:
    precision = choose_precision(cotangent.dtype)
    wide = cotangent.astype(precision.sum_dtype)
    return (lax.psum_scatter(wide, axis_name).astype(cotangent.dtype),)


_gather_narrow.defvjp(
    lambda x, axis_name: (_gather_narrow(x, axis_name), None), _gather_narrow_backward
)


def _wide(x: jax.Array, axis_name: AxisName, program: Program, precision: Precision) -> jax.Array:
    x = primitives.on_mesh_of_plan(x, axis_name=axis_name, program=program)
    return x.astype(precision.sum_dtype)


def _rounded(total: jax.Array, precision: Precision) -> jax.Array:
    return total.astype(precision.result_dtype)
