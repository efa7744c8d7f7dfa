"""The dtypes in which leaves are added and sent. Decided here and nowhere else.

Floating-point leaves of 16 bits or fewer are added in float32, unless `accumulate_dtype` says
otherwise. Results are sent in `wire_dtype`, by default the leaf's own, rounded once by their owner.
Partial sums are sent in it too if the plan is shallow enough; see `ftmesh.cost.wire_precision`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ftmesh.cost.wire_precision import (
    FLOAT_FORMATS,
    WIRE_DTYPES,
    accumulation_dtype,
    partial_sum_dtype,
)
from ftmesh.errors import CollectiveError
from ftmesh.execute.context import WireDtypes
from ftmesh.execute.types import DTypeLike

DType = np.dtype[Any]


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
    dtype: DTypeLike,
    wire_dtype: DTypeLike | None = None,
    accumulate_dtype: DTypeLike | None = None,
) -> Precision:
    """The precision of leaves of `dtype`. Leaves that are not floating-point keep their dtype."""
    wire = _check_dtype("wire_dtype", wire_dtype, WIRE_DTYPES)
    sum_dtype = _check_dtype("accumulate_dtype", accumulate_dtype, tuple(FLOAT_FORMATS))
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, np.floating):
        return Precision(dtype, dtype)
    if sum_dtype is None:
        sum_dtype = jnp.dtype(
            accumulation_dtype(dtype.name) if dtype.name in FLOAT_FORMATS else "float32"
        )
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
