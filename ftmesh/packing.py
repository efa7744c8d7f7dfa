"""Packing: the leaves of a pytree in a few large buffers of equal chunks, and back.

A buffer has shape ``[chunks, rows, width]``. Rows of 128 keep a chunk contiguous in the tiled
memory of a TPU; a payload too small for that has one short row per chunk. What does not fill the
last chunk is padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ftmesh import _compat

WIDTH = 128  # lanes of a TPU's vector registers
TILE_BYTES = 8 * 4  # rows of a memory tile, times the bytes of an element


@dataclass(frozen=True)
class Bucket:
    """Some leaves, by their position, that travel in one buffer."""

    members: tuple[int, ...]
    dtype: np.dtype[Any]


def make_buckets(
    leaves: Sequence[jax.Array], dtypes: Sequence[np.dtype[Any]], bucket_bytes: int
) -> list[Bucket]:
    """Leaves of one dtype (and of one kind of varying axes) together, up to `bucket_bytes`.

    A larger leaf has a bucket of its own; an empty one has none.
    """
    groups: dict[Any, list[list[int]]] = {}
    filled: dict[Any, int] = {}
    for i, (leaf, dtype) in enumerate(zip(leaves, dtypes, strict=True)):
        if leaf.size == 0:
            continue
        key = (dtype, _compat.varying_axes(leaf))
        size = leaf.size * dtype.itemsize
        if key not in groups or filled[key] + size > bucket_bytes:
            groups.setdefault(key, []).append([])
            filled[key] = 0
        groups[key][-1].append(i)
        filled[key] += size
    return [
        Bucket(tuple(members), key[0]) for key, buckets in groups.items() for members in buckets
    ]


def chunk_shape(size: int, num_chunks: int, itemsize: int) -> tuple[int, int]:
    """Rows and width of one of `num_chunks` chunks that together hold `size` elements."""
    length = max(1, math.ceil(size / num_chunks))
    if length < WIDTH:
        return 1, length
    rows = math.ceil(length / WIDTH)
    tile = max(1, TILE_BYTES // itemsize)
    return (math.ceil(rows / tile) * tile if rows >= tile else rows), WIDTH


def pack(flat: Iterable[jax.Array], num_chunks: int) -> jax.Array:
    """Arrays of one dtype, laid end to end in a buffer of `num_chunks` chunks."""
    parts = [jnp.ravel(x) for x in flat]
    size = sum(x.size for x in parts)
    rows, width = chunk_shape(size, num_chunks, parts[0].dtype.itemsize)
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
        arrays.append(flat[start:stop].reshape(shape))
        start = stop
    return arrays
