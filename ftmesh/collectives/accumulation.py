"""Accumulation: gradients of a rank's share of a batch in parts, for one reduction at the end.

    value_and_grad = accumulated(jax.value_and_grad(loss), 4)
    loss, grads = plan.pmean(value_and_grad(params, batch), "data")

Activations take the memory of one part, and links carry gradients once a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.collectives.calls import countable
from ftmesh.collectives.precision import precision
from ftmesh.errors import ArgumentError
from ftmesh.execute import _compat


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
