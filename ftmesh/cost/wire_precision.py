"""Rounding: in which dtype partial sums may travel, given how often each is rounded on its way.

A partial sum that travels in few bits is rounded at every addition. Where all numbers have one
sign, a chain of d additions is off by up to ``d * roundoff``, and from ``1 / roundoff`` on a sum of
ones does not grow any more: 256 in bfloat16. So partial sums travel in the dtype that was asked for
only where that is no more than `LARGEST_ERROR`, and else in the dtype in which they are added.
Results are rounded once, and always travel as asked.

Knows dtypes by their names: planning does without JAX.

>>> partial_sum_dtype("bfloat16", depth=2)
'bfloat16'
>>> partial_sum_dtype("bfloat16", depth=503)
'float32'
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ftmesh.errors import ArgumentError

LARGEST_ERROR = 0.01  # of a sum of numbers of one sign, in the worst case


@dataclass(frozen=True)
class Float:
    """A floating-point format."""

    num_bytes: int
    roundoff: float  # the largest relative error of a number rounded once
    range_bits: int  # of its exponent


FLOATS = {
    "float64": Float(8, 2.0**-53, 11),
    "float32": Float(4, 2.0**-24, 8),
    "bfloat16": Float(2, 2.0**-8, 8),
    "float16": Float(2, 2.0**-11, 5),
    "float8_e5m2": Float(1, 2.0**-3, 5),
    "float8_e4m3": Float(1, 2.0**-4, 4),
    "float8_e4m3fn": Float(1, 2.0**-4, 4),
}
WIRES = tuple(name for name, kind in FLOATS.items() if kind.num_bytes <= 4)


def wire_named(name: str) -> Float:
    """The format in which a payload may travel, by its name."""
    if name not in WIRES:
        raise ArgumentError(
            f"wire_dtype is the name of a floating dtype of at most 32 bits, one of "
            f"{', '.join(WIRES)}; not {name!r}"
        )
    return FLOATS[name]


def name_of(dtype: Any) -> str:
    """The name of a dtype in which a payload may travel."""
    name = dtype
    if not isinstance(dtype, str):
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = repr(dtype)
    wire_named(name)
    return str(name)


def added_in(name: str) -> str:
    """The dtype in which numbers are added up, unless said otherwise: float32, or their own."""
    return "float32" if FLOATS[name].num_bytes < 4 else name


def worst_error(name: str, depth: int) -> float:
    """How far a sum of numbers of one sign may be off after `depth` additions, as a share of it."""
    return depth * FLOATS[name].roundoff


def partial_sum_dtype(wire: str, *, depth: int, sums: str | None = None) -> str:
    """The dtype of partial sums on the wire: `wire`, or `sums`, in which they are added.

    It is `sums` also where that has the larger range: a mean may fit where the sums on the way to
    it do not.
    """
    sums = added_in(wire) if sums is None else sums
    narrow, wide = FLOATS[wire], FLOATS[sums]
    if narrow.num_bytes >= wide.num_bytes or narrow.range_bits < wide.range_bits:
        return sums
    return wire if worst_error(wire, depth) <= LARGEST_ERROR else sums
