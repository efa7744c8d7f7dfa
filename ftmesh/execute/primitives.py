"""Primitives: the collectives of a lowered program, inside any context with the axis bound.

They are typed, batched and transposed as JAX's own, and run by the executor that the program names.
A buffer has shape ``[chunks, rows, width]`` (and whatever batch dimensions follow).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from ftmesh.execute import _compat, ppermute
from ftmesh.execute.context import OWN, Setting, Wire, check_devices, of_live, with_idle_ones
from ftmesh.execute.lowering import PALLAS, Loop, Program

Run = Callable[..., Any]


def all_reduce(
    buffer: jax.Array,
    *,
    axis_name: Any,
    program: Program,
    wire: Wire = OWN,
    divisor: int | None = None,
) -> jax.Array:
    """Every rank's buffer summed, the same at all ranks.

    A sum is divided by `divisor`, if there is one, before it is rounded to the dtype of results.
    """
    return _all_reduce.bind(
        buffer, axis_name=axis_name, program=program, wire=wire, divisor=divisor
    )


def sum_varying(
    buffer: jax.Array,
    *,
    axis_name: Any,
    program: Program,
    wire: Wire = OWN,
    divisor: int | None = None,
) -> jax.Array:
    """As `all_reduce`, typed as what may differ: for sums of which each rank takes a part."""
    return _sum_varying.bind(
        buffer, axis_name=axis_name, program=program, wire=wire, divisor=divisor
    )


def spread(
    buffer: jax.Array,
    *,
    axis_name: Any,
    program: Program,
    wire: Wire = OWN,
    divisor: int | None = None,
) -> jax.Array:
    """The transpose of `all_reduce`: what all ranks have, typed as what may differ, if live."""
    return _spread.bind(buffer, axis_name=axis_name, program=program, wire=wire, divisor=divisor)


def reduce_scatter(
    buffer: jax.Array, *, axis_name: Any, program: Program, wire: Wire = OWN
) -> jax.Array:
    """The first half: chunks are sums at their owners, and anything elsewhere."""
    return _reduce_scatter.bind(buffer, axis_name=axis_name, program=program, wire=wire)


def all_gather(
    buffer: jax.Array, *, axis_name: Any, program: Program, wire: Wire = OWN
) -> jax.Array:
    """The second half: every rank gets each chunk as its owner has it."""
    return _all_gather.bind(buffer, axis_name=axis_name, program=program, wire=wire)


def gather_invariant(
    buffer: jax.Array, *, axis_name: Any, program: Program, wire: Wire = OWN
) -> jax.Array:
    """As `all_gather`, typed as the same at all ranks."""
    return _gather_invariant.bind(buffer, axis_name=axis_name, program=program, wire=wire)


def spread_to_owners(
    buffer: jax.Array, *, axis_name: Any, program: Program, wire: Wire = OWN
) -> jax.Array:
    """The transpose of `gather_invariant`: what all ranks have, typed as what may differ."""
    return _spread_to_owners.bind(buffer, axis_name=axis_name, program=program, wire=wire)


def _loops(
    buffer: jax.Array, loops: tuple[Loop, ...], program: Program, setting: Setting
) -> jax.Array:
    executor = _pallas() if program.executor == PALLAS else ppermute
    return cast(jax.Array, executor.run_loops(buffer, loops, program, setting))


def _pallas() -> Any:
    """Imported where it is asked for: it brings much of JAX with it."""
    from ftmesh.execute import pallas

    return pallas


def is_interpreted(*, program: Program, **_: Any) -> bool:
    """Whether a program calls back to Python while it runs."""
    return program.executor == PALLAS and bool(_pallas().is_interpreted(program))


def _run_all(
    buffer: Any, *, axis_name: Any, program: Program, wire: Wire, divisor: Any, emulated: bool
) -> Any:
    setting = Setting(axis_name, program.num_ranks, OWN, emulated)
    if program.scatter and (wire != OWN or divisor is not None):
        options = {"axis_name": axis_name, "program": program, "wire": wire, "emulated": emulated}
        sums = _run_first(buffer, **options)
        return _run_second(_divided(sums, divisor), **options)
    # Without halves nothing tells partial sums from results: all travels as it is added, and is
    # divided and rounded at the end.
    total = _divided(_loops(buffer, program.loops, program, setting), divisor)
    if wire.results is None:
        return total
    return lax.optimization_barrier(total.astype(wire.results)).astype(buffer.dtype)


def _run_first(buffer: Any, *, axis_name: Any, program: Program, wire: Wire, emulated: bool) -> Any:
    partials = Wire(wire.partials, wire.partials)
    setting = Setting(axis_name, program.num_ranks, partials, emulated)
    return _loops(buffer, program.scatter, program, setting)


def _run_second(
    buffer: Any, *, axis_name: Any, program: Program, wire: Wire, emulated: bool
) -> Any:
    setting = Setting(axis_name, program.num_ranks, OWN, emulated)
    # Owners keep what others get. A buffer that is rounded and at once made wide again would not
    # do: compilers that allow excess precision take the two for nothing.
    rounded = _loops(_as(buffer, wire.results), program.gather, program, setting)
    return rounded.astype(buffer.dtype)


def _as(x: jax.Array, dtype: Any) -> jax.Array:
    return x if dtype is None else x.astype(dtype)


def _divided(x: jax.Array, divisor: int | None) -> jax.Array:
    return x if divisor is None else x / divisor


def _check_mesh(mesh: jax.sharding.Mesh, *, axis_name: Any, program: Program, **_: Any) -> None:
    check_devices(mesh.devices, mesh.axis_names, axis_name, *program.lines)


# Transposes ------------------------------------------------------------------------------------
#
# An idle rank brings nothing to a sum, so that nothing comes back to it; and it has every result,
# so that what comes back for its own counts like that of the others. What is typed as the same at
# all ranks is spread where it is to vary: JAX's own cast would be transposed into JAX's own sum.


def _run_spread(
    x: Any, *, axis_name: Any, program: Program, divisor: Any, emulated: bool, **_: Any
) -> Any:
    wide = x.astype(np.float32) if divisor is not None and x.dtype.itemsize < 4 else x
    return of_live(_divided(wide, divisor).astype(x.dtype), axis_name, program)


def _transposed_scatter(cotangent: Any, *, axis_name: Any, program: Program, **params: Any) -> Any:
    every = all_gather(cotangent, axis_name=axis_name, program=program, **params)
    return of_live(every, axis_name, program)


def _transposed_gather(cotangent: Any, *, axis_name: Any, program: Program, **params: Any) -> Any:
    whole = with_idle_ones(cotangent, axis_name, program)
    return reduce_scatter(whole, axis_name=axis_name, program=program, **params)


def summing(names: tuple[str, str, str], run: Run) -> tuple[Primitive, Primitive, Primitive]:
    """Three primitives for what `run` sums, of some shape that it keeps.

    The first gives what is typed as the same at all ranks, the second what may differ, and the
    third is the first one's transpose.
    """
    same, varying, spread_back = names

    def transposed(cotangent: Any, *, axis_name: Any, program: Program, **params: Any) -> Any:
        whole = with_idle_ones(cotangent, axis_name, program)
        sums = as_varying.bind(whole, axis_name=axis_name, program=program, **params)
        return of_live(sums, axis_name, program)

    checks: dict[str, Any] = {"check_mesh": _check_mesh, "is_interpreted": is_interpreted}
    as_varying = _compat.linear_collective(varying, run, transposed, **checks)
    as_spread = _compat.linear_collective(
        spread_back,
        _run_spread,
        lambda cotangent, **params: as_same.bind(cotangent, **params),
        makes_varying=True,
        check_mesh=_check_mesh,
    )
    as_same = _compat.linear_collective(same, run, transposed, as_spread.bind, **checks)
    return as_same, as_varying, as_spread


_all_reduce, _sum_varying, _spread = summing(("all_reduce", "sum_varying", "spread"), _run_all)
_reduce_scatter = _compat.linear_collective(
    "reduce_scatter",
    _run_first,
    _transposed_scatter,
    check_mesh=_check_mesh,
    is_interpreted=is_interpreted,
)
_all_gather = _compat.linear_collective(
    "all_gather",
    _run_second,
    _transposed_gather,
    check_mesh=_check_mesh,
    is_interpreted=is_interpreted,
)
_gather_invariant = _compat.linear_collective(
    "gather_invariant",
    _run_second,
    _transposed_gather,
    spread_to_owners,
    check_mesh=_check_mesh,
    is_interpreted=is_interpreted,
)
_spread_to_owners = _compat.linear_collective(
    "spread_to_owners",
    lambda x, **_: x,
    gather_invariant,
    makes_varying=True,
    check_mesh=_check_mesh,
)
