"""Integers of a traced program that are known before it runs, such as ``jnp.arange(batch)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftmesh.execute.types import PyTree

LARGEST = 2**20  # elements; larger arrays are not followed

Value = NDArray[Any]


def _broadcast(x: Value, *, shape: Any, broadcast_dimensions: Any, **_: Any) -> Value:
    spread = np.ones(len(shape), int)
    spread[list(broadcast_dimensions)] = x.shape
    return np.broadcast_to(x.reshape(spread), shape)


def _iota(*, dtype: Any, shape: Any, dimension: int, **_: Any) -> Value:
    index = np.arange(shape[dimension]).reshape(
        [-1 if i == dimension else 1 for i in range(len(shape))]
    )
    return np.broadcast_to(index, shape).astype(dtype)


def _select(which: Value, *cases: Value, **_: Any) -> Value:
    return np.choose(which.astype(int), cases) if len(cases) < 32 else np.stack(cases)[which]


_FOLDS: dict[str, Callable[..., PyTree]] = {
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "reshape": lambda x, new_sizes, **_: x.reshape(new_sizes),
    "squeeze": lambda x, dimensions, **_: np.squeeze(x, tuple(dimensions)),
    "transpose": lambda x, permutation, **_: np.transpose(x, permutation),
    "concatenate": lambda *xs, dimension, **_: np.concatenate(xs, dimension),
    "convert_element_type": lambda x, new_dtype, **_: x.astype(new_dtype),
    "select_n": _select,
    "lt": lambda x, y, **_: x < y,
    "le": lambda x, y, **_: x <= y,
    "gt": lambda x, y, **_: x > y,
    "ge": lambda x, y, **_: x >= y,
    "eq": lambda x, y, **_: x == y,
    "ne": lambda x, y, **_: x != y,
    "add": lambda x, y, **_: x + y,
    "sub": lambda x, y, **_: x - y,
    "mul": lambda x, y, **_: x * y,
    "max": lambda x, y, **_: np.maximum(x, y),
    "min": lambda x, y, **_: np.minimum(x, y),
    "and": lambda x, y, **_: x & y,
    "or": lambda x, y, **_: x | y,
    "not": lambda x, **_: ~x,
    "copy": lambda x, **_: x,
}


def fold(eqn: Any, operands: Sequence[Value | None]) -> Value | None:
    """The result of an equation on known integers or booleans; None if it is not known."""
    function = _FOLDS.get(eqn.primitive.name)
    aval = eqn.outvars[0].aval
    if function is None or any(x is None for x in operands) or aval.size > LARGEST:
        return None
    kind = getattr(aval.dtype, "kind", "")
    if kind not in "iub" or not kind:
        return None
    with np.errstate(all="ignore"):  # integers wrap around, as in the program
        result: Value = np.asarray(function(*operands, **eqn.params)).astype(aval.dtype)
    return np.broadcast_to(result, aval.shape)
