"""Order: the order in which the elements of an array lie in a buffer, and back.

A TPU keeps an array tile by tile, and innermost an axis that fills whole tiles, if it has one.
Elements may travel in any order that all ranks agree on, so an array travels in the order of its
tiles, and the compiler has nothing to rearrange: row by row, packing would take twice the payload
in temporary memory, and unpacking too.

Works on JAX's arrays inside a step and on NumPy's on the host.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Shape = tuple[int, ...]

WIDTH = 128  # lanes of a TPU's vector registers
TILE_ROWS = 8  # a tile of a TPU's memory has so many rows of that width, of 4 bytes each


def flat(x: Any) -> list[Any]:
    """The elements of an array as vectors: first those of its whole tiles, then the others."""
    if x.ndim < 2:
        return [x.reshape(-1)]
    matrix, rows = as_matrix(x), _tiled_rows(_moved(x.shape))
    if not rows:
        return [matrix.reshape(-1)]
    tiles = _first(matrix, rows).reshape(rows // TILE_ROWS, TILE_ROWS, -1, WIDTH).swapaxes(1, 2)
    return [tiles.reshape(-1), *([matrix[rows:].reshape(-1)] if rows < len(matrix) else [])]


def shaped(vector: Any, shape: Shape) -> Any:
    """The array of a given shape that `flat` made vectors of."""
    if len(shape) < 2:
        return vector.reshape(shape)
    moved = _moved(shape)
    rows, width = _tiled_rows(moved), moved[-1]
    xp = _numpy_of(vector)
    if rows:
        whole = _first(vector, rows * width)
        tiles = whole.reshape(rows // TILE_ROWS, -1, TILE_ROWS, WIDTH).swapaxes(1, 2)
        parts = [tiles.reshape(rows, width), vector[rows * width :].reshape(-1, width)]
        vector = xp.concatenate(parts) if len(parts[1]) else parts[0]
    elif xp is jnp:
        # So that the compiler does not give the whole buffer rows of this width, and then slice it.
        vector = lax.optimization_barrier(vector)
    return of_matrix(vector, shape)


def as_matrix(x: Any) -> Any:
    """An array of two or more dimensions with its innermost axis as columns, and others as rows."""
    *rows, width = _moved(x.shape)
    return _numpy_of(x).moveaxis(x, _inner_axis(x.shape), -1).reshape(math.prod(rows), width)


def lies_as_matrix(shape: Shape) -> bool:
    """Whether an array of three or more axes is in a TPU's memory what `as_matrix` makes of it."""
    return len(shape) > 2 and _tiled_rows(_moved(shape)) > 0


def of_matrix(matrix: Any, shape: Shape) -> Any:
    """The array of a given shape of which `as_matrix` made a matrix."""
    return _numpy_of(matrix).moveaxis(matrix.reshape(_moved(shape)), -1, _inner_axis(shape))


def in_memory(shape: Shape, itemsize: int) -> tuple[int, ...]:
    """The axes of an array in the order of a TPU's memory, outermost first.

    Tiles are of the two innermost: those are taken with which the least is padded to fill tiles,
    and the last of several. A tile has fewer rows where the array has. So libtpu 0.0.51 keeps
    parameters of 4 and of 2 bytes an element, on TPU v4, v5p and v6e.

    >>> in_memory((40_000, 5, 128), 4), in_memory((50_257, 513), 2)
    ((1, 0, 2), (1, 0))
    """
    if len(shape) < 2:
        return tuple(range(len(shape)))

    def padded(innermost: tuple[int, ...]) -> tuple[int, ...]:
        row, inner = innermost
        tile = min(TILE_ROWS, max(4 // itemsize, 1 << (shape[row] - 1).bit_length()))
        size = math.prod(shape) // shape[row] * _filled(shape[row], tile)
        return size // shape[inner] * _filled(shape[inner], WIDTH), -inner, -row

    innermost = min(itertools.permutations(range(len(shape)), 2), key=padded)
    return (*(axis for axis in range(len(shape)) if axis not in innermost), *innermost)


def _filled(length: int, tile: int) -> int:
    return -(-length // tile) * tile


def _first(x: Any, number: int) -> Any:
    """So many rows of an array. A TPU takes half as long to copy where something is computed."""
    some = x[:number]
    if number == len(x) or _numpy_of(x) is np or len(x) >= 2**31:
        return some
    is_there = lax.broadcasted_iota(np.int32, some.shape, 0) < len(x)
    return jnp.where(is_there, some, jnp.zeros_like(some))


def _numpy_of(x: Any) -> Any:
    return jnp if isinstance(x, jax.Array) else np


def _inner_axis(shape: Shape) -> int:
    """The axis kept innermost: the last that is a multiple of 128 long, or else the last."""
    whole = [axis for axis, length in enumerate(shape) if length % WIDTH == 0]
    return whole[-1] if whole else len(shape) - 1


def _moved(shape: Shape) -> Shape:
    """The shape with the axis kept innermost at the end."""
    axis = _inner_axis(shape)
    return (*shape[:axis], *shape[axis + 1 :], shape[axis])


def _tiled_rows(shape: Shape) -> int:
    """How many rows of an array, taken as a matrix, are whole rows of tiles."""
    if shape[-1] % WIDTH or (len(shape) > 2 and shape[-2] % TILE_ROWS):
        return 0
    return math.prod(shape[:-1]) // TILE_ROWS * TILE_ROWS
