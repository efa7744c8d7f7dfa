"""The dtype in which partial sums travel, given how often each is rounded on its way.

A partial sum in few bits is rounded at every addition. If all numbers have one sign, a chain of d
additions is off by up to ``d * roundoff``, and from ``1 / roundoff`` on a sum of ones stops
growing: at 256 in bfloat16. So partial sums travel in the requested dtype only while that error is
at most `LARGEST_ERROR`, and otherwise in the dtype in which they are added. Results are rounded
once and always travel as requested.

Dtypes go by name here: planning does not import JAX.

>>> partial_sum_dtype("bfloat16", depth=2)
'bfloat16'
>>> partial_sum_dtype("bfloat16", depth=503)
'float32'
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ftmesh.errors import ArgumentError
from ftmesh.schedule.schedule import Schedule, SplitSchedule

LARGEST_ERROR = 0.01  # of a sum of numbers of one sign, in the worst case


class FloatFormat(NamedTuple):
    """A floating-point format."""

    num_bytes: int
    roundoff: float  # the largest relative error of one rounding
    exponent_bits: int


FLOAT_FORMATS = {
    "float64": FloatFormat(8, 2.0**-53, 11),
    "float32": FloatFormat(4, 2.0**-24, 8),
    "bfloat16": FloatFormat(2, 2.0**-8, 8),
    "float16": FloatFormat(2, 2.0**-11, 5),
    "float8_e5m2": FloatFormat(1, 2.0**-3, 5),
    "float8_e4m3": FloatFormat(1, 2.0**-4, 4),
    "float8_e4m3fn": FloatFormat(1, 2.0**-4, 4),
}
WIRE_DTYPES = tuple(name for name, kind in FLOAT_FORMATS.items() if kind.num_bytes <= 4)


def wire_dtype_name(dtype: Any) -> str:
    """Return the name of a dtype, or of its name; raise ArgumentError unless in `WIRE_DTYPES`."""
    name = dtype
    if not isinstance(dtype, str):
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = repr(dtype)
    if name not in WIRE_DTYPES:
        raise ArgumentError(
            f"wire_dtype must be a floating dtype of at most 32 bits, one of "
            f"{', '.join(WIRE_DTYPES)}; not {name!r}"
        )
    return str(name)


def accumulation_dtype(name: str) -> str:
    """The dtype in which numbers are added by default: float32, or their own if wider."""
    return "float32" if FLOAT_FORMATS[name].num_bytes < 4 else name


def worst_error(name: str, depth: int) -> float:
    """The largest relative error of a sum of numbers of one sign after `depth` additions."""
    return depth * FLOAT_FORMATS[name].roundoff


def partial_sum_dtype(wire: str, *, depth: int, sums: str | None = None) -> str:
    """The dtype of partial sums on the wire: `wire`, or `sums`, in which they are added.

    It is `sums` also if that has the larger range: a mean may fit where the partial sums of it
    overflow.
    """
    sums = accumulation_dtype(wire) if sums is None else sums
    narrow, wide = FLOAT_FORMATS[wire], FLOAT_FORMATS[sums]
    if narrow.num_bytes >= wide.num_bytes or narrow.exponent_bits < wide.exponent_bits:
        return sums
    return wire if worst_error(wire, depth) <= LARGEST_ERROR else sums


def schedule_partial_dtype(schedule: Schedule, wire_dtype: str) -> str:
    """The dtype in which the partial sums of `schedule` travel.

    If it is not a reduce-scatter followed by an all-gather, partial sums and results cannot be told
    apart, so everything is sent in the dtype of the sums.
    """
    if not isinstance(schedule, SplitSchedule):
        return accumulation_dtype(wire_dtype)
    return partial_sum_dtype(wire_dtype, depth=addition_depth(schedule))


def partial_sum_scale(schedule: Schedule, wire_dtype: str) -> int:
    """The bytes of partial sums of `schedule` as a multiple of those of results."""
    partials = schedule_partial_dtype(schedule, wire_dtype)
    return FLOAT_FORMATS[partials].num_bytes // FLOAT_FORMATS[wire_dtype].num_bytes


def addition_depth(schedule: Schedule) -> int:
    """The longest chain of additions, including those between the devices of a chip."""
    return schedule.depth + schedule.topology.devices_per_chip - 1
