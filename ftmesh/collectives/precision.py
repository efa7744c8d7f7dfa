"""Precision: in which dtypes leaves are added up and travel; the one place where that is decided.

Floating leaves of 16 bits or fewer are added in float32, unless `accumulate_dtype` says otherwise.
Results travel in `wire_dtype`, by default the leaf's own, rounded once by their owner; partial sums
travel in it where the plan is shallow enough, as `ftmesh.cost.wire_precision` tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ftmesh.cost.wire_precision import FLOATS, WIRES, added_in, partial_sum_dtype
from ftmesh.errors import CollectiveError
from ftmesh.execute.context import Wire

DType = np.dtype[Any]


@dataclass(frozen=True)
class Precision:
    """The dtypes in which leaves are added up, and in which their sums go to every rank."""

    sums: DType
    results: DType

    @property
    def priced_as(self) -> str:
        """The name of the dtype that planning takes for that of results."""
        return self.results.name if self.results.name in WIRES else "float32"

    def wire(self, depth: int) -> Wire:
        """How chunks travel, when a sum is so many additions deep."""
        if self.sums == self.results:
            return Wire()
        partials = self.sums.name
        if self.results.name in FLOATS:  # of others nothing is known
            partials = partial_sum_dtype(self.results.name, depth=depth, sums=partials)
        return Wire(jnp.dtype(partials), self.results)


def precision(dtype: Any, wire_dtype: Any = None, accumulate_dtype: Any = None) -> Precision:
    """What the options make of leaves of `dtype`; those that are not floating keep theirs."""
    wire = _option("wire_dtype", wire_dtype, WIRES)
    sums = _option("accumulate_dtype", accumulate_dtype, tuple(FLOATS))
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, np.floating):
        return Precision(dtype, dtype)
    sums = sums or jnp.dtype(added_in(dtype.name) if dtype.name in FLOATS else "float32")
    results = wire or dtype
    return Precision(sums, results if results.itemsize < sums.itemsize else sums)


def _option(name: str, given: Any, allowed: tuple[str, ...]) -> DType | None:
    """A dtype that was given for some purpose, if it is one that can serve it."""
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
        raise CollectiveError(f"{name} is {dtype.name}, which JAX has only with jax_enable_x64")
    return dtype
