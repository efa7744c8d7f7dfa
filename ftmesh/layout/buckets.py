"""Packing: the leaves of a pytree in a few large buffers of equal chunks, and back.

A buffer has shape ``[chunks, rows, width]``. Rows of 128 keep a chunk contiguous in the tiled
memory of a TPU; a payload too small for that has one short row per chunk. What does not fill the
last chunk is padding.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ftmesh.errors import ArgumentError
from ftmesh.execute import _compat

WIDTH = 128  # lanes of a TPU's vector registers
TILE_ROWS = 8  # a tile of a TPU's memory has so many rows of that width, of 4 bytes each


@dataclass(frozen=True)
class Bucket:
    """Some leaves, by their position, that travel in one buffer, and what they have in common."""

    members: tuple[int, ...]
    kind: Any


def make_buckets(
    leaves: Sequence[jax.Array], kinds: Sequence[Hashable], bucket_bytes: int
) -> list[Bucket]:
    """Leaves of one kind (and with the same varying axes) together, up to `bucket_bytes` of them.

    A larger leaf has a bucket of its own; an empty one has none. Leaves that fill whole tiles come
    first in a bucket, so that each of them starts with a tile.
    """
    if not isinstance(bucket_bytes, int) or isinstance(bucket_bytes, bool) or bucket_bytes < 1:
        raise ArgumentError(f"bucket_bytes must be a positive whole number, not {bucket_bytes!r}")
    groups: dict[Any, list[list[int]]] = {}
    filled: dict[Any, int] = {}
    for i, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True)):
        if leaf.size == 0:
            continue
        key = (kind, _compat.varying_axes(leaf))
        size = leaf.size * leaf.dtype.itemsize
        if key not in groups or filled[key] + size > bucket_bytes:
            groups.setdefault(key, []).append([])
            filled[key] = 0
        groups[key][-1].append(i)
        filled[key] += size

    def is_ragged(i: int) -> bool:
        return bool(leaves[i].size % (TILE_ROWS * WIDTH))

    return [
        Bucket(tuple(sorted(members, key=is_ragged)), key[0])
        for key, buckets in groups.items()
        for members in buckets
    ]


def chunk_shape(size: int, num_chunks: int, itemsize: int) -> tuple[int, int]:
    """Rows and width of one of `num_chunks` chunks that together hold `size` elements."""
    length = max(1, math.ceil(size / num_chunks))
    if length < WIDTH:
        return 1, length
    rows = math.ceil(length / WIDTH)
    tile = max(1, TILE_ROWS * 4 // itemsize)
    return (math.ceil(rows / tile) * tile if rows >= tile else rows), WIDTH


def pack(leaves: Iterable[jax.Array], num_chunks: int, itemsize: int | None = None) -> jax.Array:
    """Arrays of one dtype, laid end to end in a buffer of `num_chunks` chunks.

    Chunks fill whole tiles of elements of `itemsize` bytes, where those are smaller than the
    arrays' own.
    """
    parts = [piece for leaf in leaves for piece in _flat(leaf)]
    size = sum(x.size for x in parts)
    rows, width = chunk_shape(size, num_chunks, itemsize or parts[0].dtype.itemsize)
    padding = num_chunks * rows * width - size
    if padding:
        parts.append(jnp.zeros(padding, parts[0].dtype))
    joined = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
    return joined.reshape(num_chunks, rows, width)


def unpack(buffer: jax.Array, shapes: Iterable[tuple[int, ...]]) -> list[jax.Array]:
    """The arrays of the given shapes that `pack` laid into `buffer`."""
    flat = buffer.reshape(-1)
    arrays, start = [], 0
    for shape in shapes:
        stop = start + math.prod(shape)
        arrays.append(_shaped(flat[start:stop], shape))
        start = stop
    return arrays


# A TPU keeps an array tile by tile, and innermost an axis that fills whole tiles, if it has one.
# Elements may travel in any order that all ranks agree on, so an array travels in the order of its
# tiles, and the compiler has nothing to rearrange: row by row, packing would take twice the payload
# in temporary memory, and unpacking too.


def _inner_axis(shape: tuple[int, ...]) -> int:
    """The axis kept innermost: the last that is a multiple of 128 long, or else the last."""
    whole = [axis for axis, length in enumerate(shape) if length % WIDTH == 0]
    return whole[-1] if whole else len(shape) - 1


def _tiled_rows(shape: tuple[int, ...]) -> int:
    """How many rows of an array, taken as a matrix, are whole rows of tiles."""
    if shape[-1] % WIDTH or (len(shape) > 2 and shape[-2] % TILE_ROWS):
        return 0
    return math.prod(shape[:-1]) // TILE_ROWS * TILE_ROWS


def _flat(x: jax.Array) -> list[jax.Array]:
    """The elements of an array as vectors: first those of its whole tiles, then the others."""
    if x.ndim < 2:
        return [x.reshape(-1)]
    x = jnp.moveaxis(x, _inner_axis(x.shape), -1)
    rows, width = _tiled_rows(x.shape), x.shape[-1]
    if not rows:
        return [x.reshape(-1)]
    matrix = x.reshape(-1, width)
    tiles = matrix[:rows].reshape(rows // TILE_ROWS, TILE_ROWS, -1, WIDTH).swapaxes(1, 2)
    return [tiles.reshape(-1), *([matrix[rows:].reshape(-1)] if rows < len(matrix) else [])]


def _shaped(flat: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array of a given shape that `_flat` made vectors of."""
    if len(shape) < 2:
        return flat.reshape(shape)
    axis = _inner_axis(shape)
    width = shape[axis]
    moved = (*shape[:axis], *shape[axis + 1 :], width)
    rows = _tiled_rows(moved)
    if rows:
        tiles = flat[: rows * width].reshape(rows // TILE_ROWS, -1, TILE_ROWS, WIDTH).swapaxes(1, 2)
        parts = [tiles.reshape(rows, width), flat[rows * width :].reshape(-1, width)]
        flat = jnp.concatenate(parts) if len(parts[1]) else parts[0]
    else:
        # So that the compiler does not give the whole buffer rows of this width, and then slice it.
        flat = lax.optimization_barrier(flat)
    return jnp.moveaxis(flat.reshape(moved), -1, axis)
