"""What ranks run instead of operations that combine entries of an array: reductions, products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ftmesh.collectives.batch_layout import PARTIAL, SAME, BatchLayout
from ftmesh.collectives.batch_program import MixedExamplesError, Scope, bind, rule
from ftmesh.collectives.batch_rules import check_keys, common_rows

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
    "reduce_prod": jnp.prod,
    "reduce_and": jnp.all,
    "reduce_or": jnp.any,
}


def _neutral(name: str, dtype: Any) -> Any:
    """What does not change the result of a reduction."""
    if name in ("reduce_max", "reduce_min"):
        if dtype == np.bool_:
            return name == "reduce_min"
        sign = -1 if name == "reduce_max" else 1
        if jnp.issubdtype(dtype, np.inexact):
            return sign * np.inf
        limits = jnp.iinfo(dtype)
        return limits.min if sign < 0 else limits.max
    return {"reduce_prod": 1, "reduce_and": True}.get(name, 0)


@rule("reduce_sum", "reduce_xor", *REDUCTIONS)
def reduce(scope: Scope, eqn: Any) -> None:
    name, axes, dtype = eqn.primitive.name, eqn.params["axes"], eqn.outvars[0].aval.dtype
    if name != "reduce_sum":
        scope.sum_partial(*eqn.invars)
    layout = scope.layout(eqn.invars[0])
    if not layout.is_rows:
        scope.emit_as_is(eqn, [layout], None)
        return
    if layout.dim not in axes:
        below = sum(axis < layout.dim for axis in axes)
        scope.emit_as_is(eqn, [layout.moved_to(layout.dim - below)], None)
        return
    is_bitwise = name in ("reduce_and", "reduce_or") and dtype != np.bool_
    if name == "reduce_xor" or is_bitwise:
        raise MixedExamplesError("combines all examples")
    fill = _neutral(name, dtype)

    def run(x: Any) -> list[Any]:
        (local,) = bind(eqn, [scope.ranks.mask_rows(x, layout, fill)])
        if name == "reduce_sum":
            return [local]
        return [scope.ranks.reduce_over_ranks(local, lambda all_: REDUCTIONS[name](all_, axis=0))]

    scope.emit(eqn, [PARTIAL if name == "reduce_sum" else SAME], run)


@rule("argmax", "argmin")
def argmax(scope: Scope, eqn: Any) -> None:
    scope.sum_partial(*eqn.invars)
    layout, axes = scope.layout(eqn.invars[0]), eqn.params["axes"]
    if layout.is_rows and layout.dim in axes:
        raise MixedExamplesError("picks one of all examples")
    if layout.is_rows:
        layout = layout.moved_to(layout.dim - sum(axis < layout.dim for axis in axes))
    scope.emit_as_is(eqn, [layout], None)


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulate(scope: Scope, eqn: Any) -> None:
    if eqn.primitive.name != "cumsum":
        scope.sum_partial(*eqn.invars)
    layout = scope.layout(eqn.invars[0])
    if layout.is_rows and layout.dim == eqn.params["axis"]:
        raise MixedExamplesError("adds up examples one after the other")
    scope.emit_as_is(eqn, [layout], None)


@rule("sort")
def sort(scope: Scope, eqn: Any) -> None:
    _along_rows(scope, eqn, eqn.params["dimension"], "sorts the examples")


@rule("top_k", "approx_top_k")
def top_k(scope: Scope, eqn: Any) -> None:
    last = eqn.invars[0].aval.ndim - 1
    dimension = eqn.params.get("axis", eqn.params.get("reduction_dimension", last))
    _along_rows(scope, eqn, dimension % (last + 1), "picks some of all examples")


def _along_rows(scope: Scope, eqn: Any, dimension: int, reason: str) -> None:
    """Operations along one dimension, that of all operands, which must not be that of rows."""
    scope.sum_partial(*eqn.invars)
    rows = common_rows(scope, eqn)
    if rows is None:
        scope.emit_as_is(eqn, [SAME] * len(eqn.outvars), None)
        return
    if rows.dim == dimension:
        raise MixedExamplesError(reason)
    scope.emit_as_is(eqn, [rows] * len(eqn.outvars), [rows] * len(eqn.invars))


# Products ---------------------------------------------------------------------------------------


@rule("dot_general")
def dot_general(scope: Scope, eqn: Any) -> None:
    layouts = scope.layouts_of(eqn.invars)
    if PARTIAL in layouts and SAME in layouts:
        part = eqn.invars[layouts.index(PARTIAL)]
        if eqn.outvars[0].aval.size <= part.aval.size:
            scope.emit_as_is(eqn, [PARTIAL], None)
            return
    scope.sum_partial(*eqn.invars)
    layouts = scope.layouts_of(eqn.invars)
    if not any(layout.is_rows for layout in layouts):
        scope.emit_as_is(eqn, [SAME], None)
        return
    contracting, batch = eqn.params["dimension_numbers"]
    first = 0 if layouts[0].is_rows else 1
    rows, other = layouts[first], layouts[1 - first]
    for kind, pairs in (("sum", contracting), ("batch", batch)):
        if rows.dim not in pairs[first]:
            continue
        index = list(pairs[first]).index(rows.dim)
        matching = rows.moved_to(pairs[1 - first][index])
        if other.is_rows and other != matching:
            raise MixedExamplesError("multiplies each example with others")
        wanted = [rows, matching] if first == 0 else [matching, rows]
        if kind == "sum":
            _sum_products(scope, eqn, wanted)
        else:
            scope.emit_as_is(eqn, [rows.moved_to(index)], wanted)
        return
    if other.is_rows:
        raise MixedExamplesError("multiplies each example with others")
    num_batch = len(batch[0])
    used = {*contracting[first], *batch[first]}
    dim = num_batch + sum(d not in used for d in range(rows.dim))
    if first == 1:
        dim += eqn.invars[0].aval.ndim - num_batch - len(contracting[0])
    scope.emit_as_is(eqn, [rows.moved_to(dim)], None)


def _sum_products(scope: Scope, eqn: Any, wanted: Sequence[BatchLayout]) -> None:
    """Sum over the examples of a rank. Rows of padding are zero in both operands."""
    ranks, sources = scope.ranks, scope.layouts_of(eqn.invars)

    def run(*operands: Any) -> list[Any]:
        rows = map(ranks.convert, operands, sources, wanted)
        return bind(eqn, [ranks.mask_rows(x, w, 0) for x, w in zip(rows, wanted, strict=True)])

    scope.emit(eqn, [PARTIAL], run)


@rule("conv_general_dilated")
def convolve(scope: Scope, eqn: Any) -> None:
    scope.sum_partial(*eqn.invars)
    images, kernel = scope.layouts_of(eqn.invars)
    if images.is_same and kernel.is_same:
        scope.emit_as_is(eqn, [SAME], None)
        return
    params = eqn.params
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    if images.is_rows and images.dim == numbers.lhs_spec[0] and kernel.is_same:
        if params["batch_group_count"] == 1:
            scope.emit_as_is(eqn, [images.moved_to(numbers.out_spec[0])], None)
            return
    elif images.is_rows and images.dim == numbers.lhs_spec[1] and groups == 1:
        wanted = images.moved_to(
            numbers.rhs_spec[1]
        )  # the derivative by a kernel sums over examples
        if kernel.is_same or kernel == wanted:
            _sum_products(scope, eqn, [images, wanted])
            return
    raise MixedExamplesError("convolves each example with others")


# Windows, factorizations, transforms, random numbers ----------------------------------------------


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window")
@rule("select_and_scatter_add", "select_and_gather_add")
def windows(scope: Scope, eqn: Any) -> None:
    scope.sum_partial(*eqn.invars)
    arrays = [atom for atom in eqn.invars if atom.aval.ndim]
    rows = common_rows(scope, eqn)
    if rows is None:
        scope.emit_as_is(eqn, [SAME] * len(eqn.outvars), None)
        return
    params, dim = eqn.params, rows.dim
    is_apart = all(
        (params.get(name) or default)[dim] == default[dim]
        for name, one in (
            ("window_dimensions", 1), ("window_strides", 1), ("base_dilation", 1),
            ("window_dilation", 1), ("padding", (0, 0)),
        )
        for default in [[one] * arrays[0].aval.ndim]
    )  # fmt: skip
    if not is_apart:
        raise MixedExamplesError("takes windows over several examples")
    wanted = [rows if atom.aval.ndim else SAME for atom in eqn.invars]
    scope.emit_as_is(eqn, [rows] * len(eqn.outvars), wanted)


FACTORIZATIONS = (
    "cholesky", "cholesky_update", "eig", "eigh", "geqp3", "geqrf", "hessenberg",
    "householder_product", "lu", "lu_pivots_to_permutation", "qr", "schur", "svd",
    "triangular_solve", "tridiagonal",
)  # fmt: skip


@rule("fft", *FACTORIZATIONS)
def factorize(scope: Scope, eqn: Any) -> None:
    """Operations on the last dimensions; leading ones are those of all operands and results."""
    scope.sum_partial(*eqn.invars)
    rows = common_rows(scope, eqn)
    if rows is None:
        scope.emit_as_is(eqn, [SAME] * len(eqn.outvars), None)
        return
    ndim = max(atom.aval.ndim for atom in eqn.invars)
    core = len(eqn.params["fft_lengths"]) if eqn.primitive.name == "fft" else 2
    core = 1 if eqn.primitive.name == "lu_pivots_to_permutation" else core
    if rows.dim >= ndim - core:
        raise MixedExamplesError("combines all examples")
    scope.emit_as_is(eqn, [rows] * len(eqn.outvars), [rows] * len(eqn.invars))


@rule("random_bits", "random_split", "random_wrap", "random_unwrap")
def random(scope: Scope, eqn: Any) -> None:
    """Random numbers of keys per example. With one key for all, ranks draw those of all."""
    layout = scope.layout(eqn.invars[0])
    if layout.is_rows:
        check_keys(eqn)
        keys = eqn.outvars[0] if eqn.primitive.name == "random_wrap" else eqn.invars[0]
        if layout.dim >= keys.aval.ndim:
            raise MixedExamplesError("makes one key of several examples")
    scope.emit_as_is(eqn, [layout], None)


@rule("rng_uniform")
def rng_uniform(scope: Scope, eqn: Any) -> None:
    raise MixedExamplesError("draws other random numbers on each rank: use jax.random")
