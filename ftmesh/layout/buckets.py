"""Pack the leaves of a pytree into a few large buffers of equal chunks, and unpack them.

A buffer has shape ``[chunks, rows, width]``. Rows of 128 keep a chunk contiguous in the tiled
memory of a TPU; a payload too small for that has shorter rows. Every leaf starts at a row. The rest
is padded with zeros.

The elements of a leaf are in the order of a TPU's tiles. A TPU stores an array tile by tile, with
an axis that fills whole tiles innermost, if there is one, and in that order the compiler has
nothing to rearrange. Row by row, packing and unpacking would each need temporary memory of twice
the payload. Arrays may be JAX's or NumPy's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.execute import _compat
from ftmesh.units import check_bytes

Shape = tuple[int, ...]

WIDTH = 128  # lanes of a TPU's vector registers
TILE_ROWS = 8  # rows of WIDTH 4-byte elements in a tile of a TPU's memory


@dataclass(frozen=True)
class Bucket:
    """The indices of leaves that travel in one buffer, and the kind they share."""

    members: tuple[int, ...]
    kind: Any


def make_buckets(
    leaves: Sequence[Any], kinds: Sequence[Hashable], bucket_bytes: int
) -> list[Bucket]:
    """Group leaves of the same kind, such as the dtype, and varying axes into buckets.

    A leaf larger than a bucket has one of its own; an empty leaf has none. Leaves that fill whole
    tiles come first in a bucket, so that each of them starts at a tile.
    """
    bucket_bytes = check_bytes(bucket_bytes, name="bucket_bytes", maximum=None)
    groups: dict[Any, list[list[int]]] = {}
    filled: dict[Any, int] = {}
    for i, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True)):
        if leaf.size == 0:
            continue
        key, num_bytes = (kind, _compat.varying_axes(leaf)), leaf.size * leaf.dtype.itemsize
        if key not in groups or filled[key] + num_bytes > bucket_bytes:
            groups.setdefault(key, []).append([])
            filled[key] = 0
        groups[key][-1].append(i)
        filled[key] += num_bytes

    def is_ragged(i: int) -> bool:
        return bool(leaves[i].size % (TILE_ROWS * WIDTH))

    return [
        Bucket(tuple(sorted(members, key=is_ragged)), kind)
        for (kind, _), buckets in groups.items()
        for members in buckets
    ]


@dataclass(frozen=True)
class Packing:
    """The layout of arrays, each in rows of its own, in a buffer ``[num_chunks, rows, width]``."""

    shapes: tuple[Shape, ...]
    num_chunks: int
    rows: int
    width: int

    @staticmethod
    def for_shapes(shapes: Sequence[Shape], num_chunks: int, itemsize: int) -> Packing:
        """Choose the shape of chunks for arrays with elements of `itemsize` bytes.

        Rows have 128 elements if a chunk has that many, and fill whole tiles if they fill one.
        Smaller chunks have as few rows as possible, and then rows as short as possible.
        """

        def num_rows(width: int) -> int:
            total = sum(math.ceil(math.prod(shape) / width) for shape in shapes)
            return max(1, math.ceil(total / num_chunks))

        least = math.ceil(sum(map(math.prod, shapes)) / num_chunks)
        width = WIDTH if least >= WIDTH else min(range(1, WIDTH + 1), key=num_rows)
        rows, tile = num_rows(width), max(1, TILE_ROWS * 4 // itemsize)
        if least >= WIDTH and rows >= tile:
            rows = math.ceil(rows / tile) * tile
        return Packing(tuple(shapes), num_chunks, rows, width)

    @property
    def shape(self) -> Shape:
        return self.num_chunks, self.rows, self.width

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The element at which each array starts, and at which the last one ends."""
        sizes = (math.ceil(math.prod(shape) / self.width) * self.width for shape in self.shapes)
        return tuple(itertools.accumulate(sizes, initial=0))

    def pack(self, arrays: Iterable[jax.Array]) -> jax.Array:
        """Pack arrays of one dtype into the buffer."""
        parts: list[jax.Array] = []
        stops = [*self.starts[1:-1], math.prod(self.shape)]
        for array, start, stop in zip(arrays, self.starts, stops, strict=False):
            parts += to_tile_order(array)
            if stop - start > array.size:
                parts.append(jnp.zeros(stop - start - array.size, array.dtype))
        if len(parts) == 1:
            return parts[0].reshape(self.shape)
        is_one_vector = len(self.shapes) == 1 and parts[0].size == math.prod(self.shapes[0])
        joined = _concatenate_zeros(*parts) if is_one_vector else jnp.concatenate(parts)
        return joined.reshape(self.shape)

    def unpack(self, buffer: Any) -> list[Any]:
        """The arrays that `pack` put into a buffer."""
        vector = buffer.reshape(-1)
        return [
            from_tile_order(vector[start : start + math.prod(shape)], shape)
            for shape, start in zip(self.shapes, self.starts, strict=False)
        ]


def _concatenate_zeros(vector: jax.Array, zeros: jax.Array) -> jax.Array:
    # A TPU needs half the time for a concatenation that also computes something.
    padded = jnp.concatenate([vector, zeros])
    if padded.size >= 2**31:
        return padded
    return jnp.where(lax.iota(np.int32, padded.size) < vector.size, padded, jnp.zeros_like(padded))


def pack(leaves: Sequence[jax.Array], num_chunks: int, itemsize: int | None = None) -> jax.Array:
    """Pack arrays of one dtype into a buffer of `num_chunks` chunks.

    Chunks fill whole tiles of elements of `itemsize` bytes, if that is given: chunks may travel in
    a smaller dtype than the arrays'.
    """
    shapes = [leaf.shape for leaf in leaves]
    return Packing.for_shapes(shapes, num_chunks, itemsize or leaves[0].dtype.itemsize).pack(leaves)


def unpack(buffer: jax.Array, shapes: Iterable[Shape]) -> list[Any]:
    """The arrays of the given shapes that `pack` put into `buffer`."""
    return Packing(tuple(shapes), *buffer.shape).unpack(buffer)


# The order of elements ----------------------------------------------------------------------------


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
