"""The collectives of a lowered program as JAX primitives, for any context with the axis bound.

They are typed, batched and transposed like JAX's own, and run by the executor that the program
names. A buffer has shape ``[chunks, rows, width]``, followed by any batch dimensions.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import jax
import numpy as np
from jax import lax

from ftmesh.execute import _compat, ppermute
from ftmesh.execute.context import (
    NO_CAST,
    ExecutionContext,
    WireDtypes,
    add_from_idle,
    check_mesh_devices,
    zero_if_idle,
)
from ftmesh.execute.lowering import PALLAS, Loop, Program


def all_reduce(
    buffer: jax.Array,
    *,
    axis_name: Any,
    program: Program,
    wire: WireDtypes = NO_CAST,
    divisor: int | None = None,
) -> jax.Array:
    """Sum the buffers of all live ranks; the result is typed as the same on all ranks.

    The sum is divided by `divisor` before it is rounded to the dtype of results.
    """
    return _all_reduce.bind(
        buffer, axis_name=axis_name, program=program, wire=wire, divisor=divisor
    )


def all_reduce_varying(
    buffer: jax.Array,
    *,
    axis_name: Any,
    program: Program,
    wire: WireDtypes = NO_CAST,
    divisor: int | None = None,
) -> jax.Array:
    """`all_reduce`, with the result typed as varying over ranks."""
    return _all_reduce_varying.bind(
        buffer, axis_name=axis_name, program=program, wire=wire, divisor=divisor
    )


def all_reduce_transpose(buffer: jax.Array, *, axis_name: Any, program: Program) -> jax.Array:
    """Type what all ranks share as varying over ranks, with zeros on idle ranks."""
    return _all_reduce_transpose.bind(
        buffer, axis_name=axis_name, program=program, wire=NO_CAST, divisor=None
    )


def reduce_scatter(
    buffer: jax.Array, *, axis_name: Any, program: Program, wire: WireDtypes = NO_CAST
) -> jax.Array:
    """Sum every chunk at its owner; the other chunks of a buffer are undefined."""
    return _reduce_scatter.bind(buffer, axis_name=axis_name, program=program, wire=wire)


def all_gather(
    buffer: jax.Array, *, axis_name: Any, program: Program, wire: WireDtypes = NO_CAST
) -> jax.Array:
    """Send every chunk from its owner to all ranks."""
    return _all_gather.bind(buffer, axis_name=axis_name, program=program, wire=wire)


def all_gather_invariant(
    buffer: jax.Array, *, axis_name: Any, program: Program, wire: WireDtypes = NO_CAST
) -> jax.Array:
    """`all_gather`, with the result typed as the same on all ranks."""
    return _all_gather_invariant.bind(buffer, axis_name=axis_name, program=program, wire=wire)


def to_owner_order(buffer: jax.Array, *, axis_name: Any, program: Program) -> jax.Array:
    """Order chunks as `Program.owned_chunks` lists them.

    The transpose is `from_owner_order`, which the compiler can do in one copy; that of an index
    would be a scatter into zeros.
    """
    if program.is_in_owner_order:
        return buffer
    return cast(jax.Array, _to_owner_order.bind(buffer, axis_name=axis_name, program=program))


def from_owner_order(buffer: jax.Array, *, axis_name: Any, program: Program) -> jax.Array:
    """Order chunks by number; the inverse of `to_owner_order`."""
    if program.is_in_owner_order:
        return buffer
    return cast(jax.Array, _from_owner_order.bind(buffer, axis_name=axis_name, program=program))


def on_mesh_of_plan(x: jax.Array, *, axis_name: Any, program: Program) -> jax.Array:
    """Return `x`; on a mesh whose devices are not those of the plan in its order, raise."""
    return _on_mesh_of_plan.bind(x, axis_name=axis_name, program=program)


def is_interpreted(*, program: Program, **_: Any) -> bool:
    """True if a program calls back to Python while it runs."""
    return program.executor == PALLAS and bool(_pallas().is_interpreted(program))


# What one rank runs -----------------------------------------------------------------------------


def _run_loops(
    buffer: jax.Array, loops: tuple[Loop, ...], program: Program, context: ExecutionContext
) -> jax.Array:
    executor = _pallas() if program.executor == PALLAS else ppermute
    return cast(jax.Array, executor.run_loops(buffer, loops, program, context))


def _pallas() -> Any:
    """The Pallas executor, imported on demand: Pallas takes long to import."""
    from ftmesh.execute import pallas

    return pallas


def _run_all_reduce(
    buffer: Any, *, axis_name: Any, program: Program, wire: WireDtypes, divisor: Any, emulated: bool
) -> Any:
    context = ExecutionContext(axis_name, program.num_ranks, NO_CAST, emulated)
    if program.reduce_scatter and (wire != NO_CAST or divisor is not None):
        options = {"axis_name": axis_name, "program": program, "wire": wire, "emulated": emulated}
        sums = _run_reduce_scatter(buffer, **options)
        return _run_all_gather(_divide(sums, divisor), **options)
    # Without a reduce-scatter nothing tells partial sums from results: all travels in the dtype of
    # the sum, and is divided and rounded at the end.
    total = _divide(_run_loops(buffer, program.loops, program, context), divisor)
    if wire.results is None:
        return total
    return lax.optimization_barrier(total.astype(wire.results)).astype(buffer.dtype)


def _run_reduce_scatter(
    buffer: Any, *, axis_name: Any, program: Program, wire: WireDtypes, emulated: bool
) -> Any:
    partials = WireDtypes(wire.partials, wire.partials)
    context = ExecutionContext(axis_name, program.num_ranks, partials, emulated)
    return _run_loops(buffer, program.reduce_scatter, program, context)


def _run_all_gather(
    buffer: Any, *, axis_name: Any, program: Program, wire: WireDtypes, emulated: bool
) -> Any:
    context = ExecutionContext(axis_name, program.num_ranks, NO_CAST, emulated)
    # The whole buffer is rounded, so that owners keep what others receive. Rounding and widening
    # again before the loops would not do: compilers that allow excess precision drop both casts.
    rounded = buffer if wire.results is None else buffer.astype(wire.results)
    return _run_loops(rounded, program.all_gather, program, context).astype(buffer.dtype)


def _run_to_owner_order(x: Any, *, program: Program, **_: Any) -> Any:
    return x[program.owned_chunks.reshape(-1)]


def _run_from_owner_order(x: Any, *, program: Program, **_: Any) -> Any:
    return x[np.argsort(program.owned_chunks, axis=None)]


def _divide(x: jax.Array, divisor: int | None) -> jax.Array:
    return x if divisor is None else x / divisor


def _check_mesh(mesh: jax.sharding.Mesh, *, axis_name: Any, program: Program, **_: Any) -> None:
    check_mesh_devices(mesh.devices, mesh.axis_names, axis_name, *program.device_lines)


# Transposes -------------------------------------------------------------------------------------
#
# An idle rank contributes nothing to a sum, so its cotangent is zero; but it has every result, so
# the cotangent of its result counts like that of the others. What is typed as the same on all ranks
# becomes varying through primitives of our own: the transpose of JAX's cast would be JAX's sum.


def _run_all_reduce_transpose(
    x: Any, *, axis_name: Any, program: Program, divisor: Any, emulated: bool, **_: Any
) -> Any:
    wide = x.astype(np.float32) if divisor is not None and x.dtype.itemsize < 4 else x
    return zero_if_idle(_divide(wide, divisor).astype(x.dtype), axis_name, program)


def _transpose_all_reduce(ct: Any, *, axis_name: Any, program: Program, **params: Any) -> Any:
    total = add_from_idle(ct, axis_name, program)
    sums = _all_reduce_varying.bind(total, axis_name=axis_name, program=program, **params)
    return zero_if_idle(sums, axis_name, program)


def _transpose_reduce_scatter(ct: Any, *, axis_name: Any, program: Program, **params: Any) -> Any:
    gathered = all_gather(ct, axis_name=axis_name, program=program, **params)
    return zero_if_idle(gathered, axis_name, program)


def _transpose_all_gather(ct: Any, *, axis_name: Any, program: Program, **params: Any) -> Any:
    total = add_from_idle(ct, axis_name, program)
    return reduce_scatter(total, axis_name=axis_name, program=program, **params)


def _transpose_on_mesh(ct: Any, **params: Any) -> Any:
    return on_mesh_of_plan(ct, **params)


_collective = partial(
    _compat.linear_collective, check_mesh=_check_mesh, is_interpreted=is_interpreted
)
_spread = partial(_compat.linear_collective, makes_varying=True, check_mesh=_check_mesh)
_all_reduce_transpose = _spread("all_reduce_transpose", _run_all_reduce_transpose, all_reduce)
_all_gather_transpose = _spread("all_gather_transpose", lambda x, **_: x, all_gather_invariant)
_all_reduce = _collective(
    "all_reduce", _run_all_reduce, _transpose_all_reduce, _all_reduce_transpose.bind
)
_all_reduce_varying = _collective("all_reduce_varying", _run_all_reduce, _transpose_all_reduce)
_reduce_scatter = _collective("reduce_scatter", _run_reduce_scatter, _transpose_reduce_scatter)
_all_gather = _collective("all_gather", _run_all_gather, _transpose_all_gather)
_all_gather_invariant = _collective(
    "all_gather_invariant", _run_all_gather, _transpose_all_gather, _all_gather_transpose.bind
)
_to_owner_order = _collective("to_owner_order", _run_to_owner_order, from_owner_order)
_from_owner_order = _collective("from_owner_order", _run_from_owner_order, to_owner_order)
_on_mesh_of_plan = _collective("on_mesh_of_plan", lambda x, **_: x, _transpose_on_mesh)
