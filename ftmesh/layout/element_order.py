"""The order of an array's elements in a buffer: that of a TPU's tiles.

A TPU stores an array tile by tile, with an axis that fills whole tiles innermost, if there is one.
In that order the compiler has nothing to rearrange. Row by row, packing and unpacking would each
need temporary memory of twice the payload. Arrays may be JAX's or NumPy's.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Shape = tuple[int, ...]

WIDTH = 128  # lanes of a TPU's vector registers
TILE_ROWS = 8  # rows of WIDTH 4-byte elements in a tile of a TPU's memory


def to_tile_order(x: Any) -> list[Any]:
    """The elements of an array as vectors: those of its whole tiles, then the others."""
    if x.ndim < 2:
        return [x.reshape(-1)]
    moved = _inner_axis_last(x.shape)
    matrix = _numpy_of(x).moveaxis(x, _inner_axis(x.shape), -1)
    matrix, rows = matrix.reshape(math.prod(moved[:-1]), moved[-1]), _tiled_rows(moved)
    if not rows:
        return [matrix.reshape(-1)]
    tiles = _first(matrix, rows).reshape(rows // TILE_ROWS, TILE_ROWS, -1, WIDTH).swapaxes(1, 2)
    return [tiles.reshape(-1), *([matrix[rows:].reshape(-1)] if rows < len(matrix) else [])]


def from_tile_order(vector: Any, shape: Shape) -> Any:
    """The array of a given shape from the concatenated vectors of `to_tile_order`."""
    if len(shape) < 2:
        return vector.reshape(shape)
    moved = _inner_axis_last(shape)
    rows, width = _tiled_rows(moved), moved[-1]
    xp = _numpy_of(vector)
    if rows:
        tiled = _first(vector, rows * width)
        tiles = tiled.reshape(rows // TILE_ROWS, -1, TILE_ROWS, WIDTH).swapaxes(1, 2)
        parts = [tiles.reshape(rows, width), vector[rows * width :].reshape(-1, width)]
        vector = xp.concatenate(parts) if len(parts[1]) else parts[0]
    elif xp is jnp:
        # Otherwise the compiler gives the entire buffer rows of this width, and then slices it.
        vector = lax.optimization_barrier(vector)
    return xp.moveaxis(vector.reshape(moved), -1, _inner_axis(shape))


def _first(x: Any, number: int) -> Any:
    """The first rows of an array. A TPU needs half the time for a copy that computes something."""
    rows = x[:number]
    if number == len(x) or _numpy_of(x) is np or len(x) >= 2**31:
        return rows
    always = lax.broadcasted_iota(np.int32, rows.shape, 0) < len(x)
    return jnp.where(always, rows, jnp.zeros_like(rows))


def _numpy_of(x: Any) -> Any:
    return jnp if isinstance(x, jax.Array) else np


def _inner_axis(shape: Shape) -> int:
    """The axis stored innermost: the last whose length is a multiple of 128, or the last."""
    multiples = [axis for axis, length in enumerate(shape) if length % WIDTH == 0]
    return multiples[-1] if multiples else len(shape) - 1


def _inner_axis_last(shape: Shape) -> Shape:
    axis = _inner_axis(shape)
    return (*shape[:axis], *shape[axis + 1 :], shape[axis])


def _tiled_rows(shape: Shape) -> int:
    """How many rows of an array, seen as a matrix, are whole rows of tiles."""
    if shape[-1] % WIDTH or (len(shape) > 2 and shape[-2] % TILE_ROWS):
        return 0
    return math.prod(shape[:-1]) // TILE_ROWS * TILE_ROWS
