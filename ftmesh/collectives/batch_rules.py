"""What ranks run instead of operations on whole batches: arithmetic, shapes, sums, products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ftmesh.collectives.batch_layout import PARTIAL, SAME, BatchLayout
from ftmesh.collectives.batch_program import (
    PLACEMENTS,
    Fact,
    MixedExamplesError,
    ResplitError,
    Scope,
    is_index_dtype,
    rule,
)
from ftmesh.collectives.partitioning import entry_axes

SMALL = 4_096  # elements that are summed by themselves at little cost

# Element by element -----------------------------------------------------------------------------

ELEMENTWISE = (
    "abs", "acos", "acosh", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj",
    "cos", "cosh", "digamma", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1",
    "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "integer_pow", "is_finite", "le",
    "le_to", "lgamma", "log", "log1p", "log2", "logistic", "lt", "lt_to", "max", "min", "mulhi",
    "ne", "nextafter", "not", "one_minus_square", "or", "polygamma", "polynomial",
    "population_count", "pow", "random_clone", "random_fold_in", "random_gamma", "random_seed",
    "reduce_precision", "regularized_incomplete_beta", "rem", "round", "rsqrt", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square",
    "stop_gradient", "tan", "tanh", "threefry2x32", "xor", "zeta",
)  # fmt: skip


def common_rows(scope: Scope, eqn: Any) -> BatchLayout | None:
    """The layout of all operands that have rows; None if there are none."""
    rows = {layout for layout in scope.layouts_of(eqn.invars) if layout.is_rows}
    if len(rows) > 1:
        raise MixedExamplesError("combines each example with others")
    return next(iter(rows), None)


def aligned(eqn: Any, rows: BatchLayout) -> list[BatchLayout]:
    """Layouts of operands that are combined with rows: those as long are cut into rows too."""
    length = max(atom.aval.shape[rows.dim] for atom in eqn.invars if atom.aval.ndim > rows.dim)
    return [
        rows if atom.aval.ndim > rows.dim and atom.aval.shape[rows.dim] == length else SAME
        for atom in eqn.invars
    ]


@rule(*ELEMENTWISE)
def elementwise(scope: Scope, eqn: Any) -> None:
    scope.sum_partial(*eqn.invars)
    rows = common_rows(scope, eqn)
    if rows is None:
        scope.emit_as_is(eqn, [SAME] * len(eqn.outvars), None)
        return
    if eqn.primitive.name.startswith("random_"):
        check_keys(eqn)
    is_gamma = eqn.primitive.name == "random_gamma"
    if is_gamma and eqn.invars[0].aval.ndim <= rows.dim:
        raise MixedExamplesError(
            "draws for all examples from one key, which depends on how many they are (use a key "
            "for each: jax.vmap over jax.random.split)"
        )
    if not is_gamma and any(
        atom.aval.ndim not in (0, eqn.outvars[0].aval.ndim) for atom in eqn.invars
    ):
        raise MixedExamplesError("has operands of different ranks")
    scope.emit_as_is(eqn, [rows] * len(eqn.outvars), aligned(eqn, rows))


def check_keys(eqn: Any) -> None:
    """Raise for keys per example whose random numbers depend on how many keys there are."""
    for atom in (*eqn.invars, *eqn.outvars):
        dtype = atom.aval.dtype
        if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) and "fry" not in str(dtype):
            raise MixedExamplesError(
                f"draws from a {dtype} for each example, whose numbers depend on the other examples"
            )


@rule("add", "sub", "add_any")
def add(scope: Scope, eqn: Any) -> None:
    layouts = scope.layouts_of(eqn.invars)
    grows = any(
        layout.is_partial and atom.aval.size < eqn.outvars[0].aval.size
        for atom, layout in zip(eqn.invars, layouts, strict=True)
    )
    if any(layout.is_rows for layout in layouts) or grows or PARTIAL not in layouts:
        elementwise(scope, eqn)
    else:
        scope.emit_as_is(eqn, [PARTIAL], [PARTIAL] * len(layouts))


@rule("mul")
def multiply(scope: Scope, eqn: Any) -> None:
    _scale(scope, eqn, scaled=range(2))


@rule("div")
def divide(scope: Scope, eqn: Any) -> None:
    is_exact = jnp.issubdtype(eqn.outvars[0].aval.dtype, np.inexact)  # whole numbers are rounded
    _scale(scope, eqn, scaled=range(1) if is_exact else ())


def _scale(scope: Scope, eqn: Any, scaled: Sequence[int]) -> None:
    """A product of parts of a sum and what all ranks have is a part of a sum."""
    for i in scaled:
        part, factor = eqn.invars[i], eqn.invars[1 - i]
        keeps_size = part.aval.size == eqn.outvars[0].aval.size
        if scope.layout(part).is_partial and keeps_size and not scope.layout(factor).is_rows:
            scope.sum_partial(factor)
            if scope.layout(part).is_partial:  # and not the factor itself
                scope.emit_as_is(eqn, [PARTIAL], None)
                return
    elementwise(scope, eqn)


@rule("select_n")
def select(scope: Scope, eqn: Any) -> None:
    which, *cases = eqn.invars
    layouts = scope.layouts_of(cases)
    if scope.layout(which).is_same and PARTIAL in layouts and not any(x.is_rows for x in layouts):
        scope.emit_as_is(eqn, [PARTIAL], [SAME, *[PARTIAL] * len(cases)])
    else:
        elementwise(scope, eqn)


@rule("neg", "real", "imag", "name", "copy", "copy_p")
def linear(scope: Scope, eqn: Any) -> None:
    scope.emit_as_is(eqn, [scope.layout(eqn.invars[0])], None)


@rule("convert_element_type")
def convert(scope: Scope, eqn: Any) -> None:
    """Conversions between inexact numbers are linear but for their rounding.

    Parts of whole numbers may have wrapped around where their sum does not. Parts of a small sum,
    and those that may not fit where their sum does, are summed before they lose bits; large
    gradients are summed in more bits than they have anyway.
    """
    (x,), dtype = eqn.invars, eqn.outvars[0].aval.dtype
    is_linear = jnp.issubdtype(x.aval.dtype, np.inexact) and jnp.issubdtype(dtype, np.inexact)
    if not is_linear or _loses_bits(x.aval, dtype):
        scope.sum_partial(x)
    linear(scope, eqn)


def _loses_bits(aval: Any, dtype: Any) -> bool:
    old, new = jnp.finfo(aval.dtype), jnp.finfo(dtype)
    return bool(new.maxexp < old.maxexp or (new.bits < old.bits and aval.size <= SMALL))


@rule("optimization_barrier")
def barrier(scope: Scope, eqn: Any) -> None:
    scope.emit_as_is(eqn, scope.layouts_of(eqn.invars), None)


@rule(*PLACEMENTS)
def place(scope: Scope, eqn: Any) -> None:
    """Along the axis of the plan, arrays are placed as their layout says."""
    spec = getattr(eqn.params.get("sharding"), "spec", None) or ()
    others = [
        entry
        if entry is PartitionSpec.UNCONSTRAINED
        else tuple(name for name in entry_axes(entry) if name != scope.ranks.axis_name) or None
        for entry in spec
    ]
    is_placed = any(entry not in (None, PartitionSpec.UNCONSTRAINED) for entry in others)

    def run(*operands: Any) -> list[Any]:
        if not is_placed:
            return list(operands)
        return [lax.with_sharding_constraint(x, PartitionSpec(*others)) for x in operands]

    scope.emit(eqn, scope.layouts_of(eqn.invars), run)


# Shapes -----------------------------------------------------------------------------------------


def local_length(scope: Scope, layout: BatchLayout, length: int) -> int:
    """What becomes of an offset or length in the dimension of rows that is a multiple of them."""
    block = scope.ranks.units * layout.inner
    if length % block:
        raise MixedExamplesError("cuts the batch into parts that are not those of ranks")
    return length // block * scope.ranks.local_units * layout.inner


@rule("broadcast_in_dim")
def broadcast_in_dim(scope: Scope, eqn: Any) -> None:
    x, shape = eqn.invars[0], eqn.params["shape"]
    if x.aval.size < eqn.outvars[0].aval.size:
        scope.sum_partial(x)
    layout = scope.layout(x)
    if not layout.is_rows:
        scope.emit_as_is(eqn, [layout], None)
        return
    rows = layout.moved_to(eqn.params["broadcast_dimensions"][layout.dim])
    scope.emit_as_is(eqn, [rows], None, shape=scope.ranks.local_shape(shape, rows))


@rule("reshape")
def reshape(scope: Scope, eqn: Any) -> None:
    layout, old = scope.layout(eqn.invars[0]), eqn.invars[0].aval.shape
    new = eqn.params["new_sizes"]
    if not layout.is_rows:
        scope.emit_as_is(eqn, [layout], None)
        return
    if 0 in old:
        raise MixedExamplesError("reshapes an array without elements")
    units = scope.ranks.units
    stride = math.prod(old[layout.dim + 1 :]) * layout.inner  # of units, in the array in order
    minors = []  # numbers of units in a row, if the new shape makes a matrix of them
    for dim, length in enumerate(new):
        step = math.prod(new[dim + 1 :])
        inner = stride // step
        if stride % step == 0 and length % (units * inner) == 0:
            outer = length // (units * inner)
            rows = BatchLayout(layout.spread, dim, outer, inner)
            scope.emit_as_is(eqn, [rows], None, new_sizes=scope.ranks.local_shape(new, rows))
            return
        if stride < step < stride * units and step % stride == 0 and units % (step // stride) == 0:
            minors.append(step // stride)
    if minors:
        raise ResplitError("splits the batch into parts that are not those of ranks", minors[0])
    raise MixedExamplesError("splits the batch into parts that are not those of ranks")


@rule("transpose")
def transpose(scope: Scope, eqn: Any) -> None:
    layout = scope.layout(eqn.invars[0])
    new = layout.moved_to(eqn.params["permutation"].index(layout.dim)) if layout.has_dim else layout
    scope.emit_as_is(eqn, [new], None)


@rule("squeeze")
def squeeze(scope: Scope, eqn: Any) -> None:
    layout = scope.layout(eqn.invars[0])
    if layout.has_dim:
        layout = layout.moved_to(_dim_without(layout.dim, eqn.params["dimensions"]))
    scope.emit_as_is(eqn, [layout], None)


def _dim_without(dim: int, removed: Sequence[int]) -> int:
    return dim - sum(other < dim for other in removed)


@rule("rev")
def reverse(scope: Scope, eqn: Any) -> None:
    layout = scope.layout(eqn.invars[0])
    if layout.is_rows and layout.dim in eqn.params["dimensions"]:
        raise MixedExamplesError("reverses the order of examples")
    scope.emit_as_is(eqn, [layout], None)


@rule("concatenate")
def concatenate(scope: Scope, eqn: Any) -> None:
    dimension, layouts = eqn.params["dimension"], scope.layouts_of(eqn.invars)
    if not any(layout.is_rows for layout in layouts):
        out = PARTIAL if PARTIAL in layouts else SAME
        scope.emit_as_is(eqn, [out], [out] * len(layouts))
        return
    scope.sum_partial(*eqn.invars)
    layouts = scope.layouts_of(eqn.invars)
    first = next(layout for layout in layouts if layout.is_rows)
    if first.dim != dimension:
        rows = common_rows(scope, eqn)
        assert rows is not None
        scope.emit_as_is(eqn, [rows], [rows] * len(layouts))
        _note_own_columns(scope, eqn, rows)
        return
    block, wanted = scope.ranks.units * first.inner, []
    for atom, layout in zip(eqn.invars, layouts, strict=True):
        length = atom.aval.shape[dimension]
        rows = replace(first, outer=length // block)
        if length % block or (layout.is_rows and layout != rows):
            raise MixedExamplesError("puts other rows before or after those of the examples")
        wanted.append(rows)
    total = replace(first, outer=sum(x.outer for x in wanted))
    scope.emit_as_is(eqn, [total], wanted)


def _note_own_columns(scope: Scope, eqn: Any, rows: BatchLayout) -> None:
    """Note in which columns of an array of indices each example has its own number."""
    out = eqn.outvars[0]
    if not is_index_dtype(out.aval.dtype) or eqn.params["dimension"] != out.aval.ndim - 1:
        return
    own, column = set(), 0
    for atom in eqn.invars:
        width, value = atom.aval.shape[-1], scope.fact(atom).value
        for i in range(width):
            if value is not None and is_row_number(value[..., i], rows.dim):
                own.add(column + i)
        column += width
    scope.facts[out] = Fact(own_columns=frozenset(own))


def is_row_number(value: Any, dim: int) -> bool:
    """Whether every element of an array is its own index along a dimension."""
    shape = [1] * value.ndim
    shape[dim] = value.shape[dim]
    return bool((value == np.arange(value.shape[dim]).reshape(shape)).all())


@rule("pad")
def pad(scope: Scope, eqn: Any) -> None:
    x, value = eqn.invars
    scope.sum_partial(value)
    layout, config = scope.layout(x), list(eqn.params["padding_config"])
    if layout.is_partial:
        scope.emit_as_is(eqn, [PARTIAL], [PARTIAL, PARTIAL])
        return
    if not layout.is_rows:
        scope.emit_as_is(eqn, [SAME], None)
        return
    before, after, between = config[layout.dim]
    if between:
        raise MixedExamplesError("puts rows between the examples")
    local = tuple(local_length(scope, layout, length) for length in (before, after))
    config[layout.dim] = (*local, 0)
    outer = layout.outer + (before + after) // (scope.ranks.units * layout.inner)
    out = replace(layout, outer=outer)
    scope.emit_as_is(eqn, [out], None, padding_config=tuple(config))


@rule("slice")
def slice_(scope: Scope, eqn: Any) -> None:
    layout, params = scope.layout(eqn.invars[0]), eqn.params
    if not layout.is_rows:
        scope.emit_as_is(eqn, [layout], None)
        return
    dim = layout.dim
    starts, limits = list(params["start_indices"]), list(params["limit_indices"])
    if params["strides"] is not None and params["strides"][dim] != 1:
        raise MixedExamplesError("takes some of the examples")
    outer = (limits[dim] - starts[dim]) // (scope.ranks.units * layout.inner)
    for bounds in (starts, limits):
        bounds[dim] = local_length(scope, layout, bounds[dim])
    out = BatchLayout(layout.spread, dim, outer, layout.inner)
    scope.emit_as_is(eqn, [out], None, start_indices=tuple(starts), limit_indices=tuple(limits))


@rule("split")
def split(scope: Scope, eqn: Any) -> None:
    layout, sizes = scope.layout(eqn.invars[0]), eqn.params["sizes"]
    if not layout.is_rows or layout.dim != eqn.params["axis"]:
        scope.emit_as_is(eqn, [layout] * len(sizes), None)
        return
    local = tuple(local_length(scope, layout, size) for size in sizes)
    block = scope.ranks.units * layout.inner
    outs = [replace(layout, outer=size // block) for size in sizes]
    scope.emit_as_is(eqn, outs, None, sizes=local)


@rule("stack")
def stack(scope: Scope, eqn: Any) -> None:
    axis, layouts = eqn.params["axis"], scope.layouts_of(eqn.invars)
    if not any(layout.is_rows for layout in layouts):
        scope.emit_as_is(eqn, [PARTIAL], [PARTIAL] * len(layouts))
        return
    scope.sum_partial(*eqn.invars)
    rows = common_rows(scope, eqn)
    assert rows is not None
    scope.emit_as_is(eqn, [rows.moved_to(rows.dim + (axis <= rows.dim))], [rows] * len(layouts))


@rule("unstack")
def unstack(scope: Scope, eqn: Any) -> None:
    layout, axis = scope.layout(eqn.invars[0]), eqn.params["axis"]
    if layout.is_rows:
        if layout.dim == axis:
            raise MixedExamplesError("takes examples apart")
        layout = layout.moved_to(_dim_without(layout.dim, [axis]))
    scope.emit_as_is(eqn, [layout] * len(eqn.outvars), None)


@rule("tile")
def tile(scope: Scope, eqn: Any) -> None:
    scope.sum_partial(*eqn.invars)
    layout, reps = scope.layout(eqn.invars[0]), eqn.params["reps"]
    if layout.is_rows:
        if len(reps) != eqn.invars[0].aval.ndim:
            raise MixedExamplesError("repeats examples along a new dimension")
        layout = replace(layout, outer=layout.outer * reps[layout.dim])
    scope.emit_as_is(eqn, [layout], None)
