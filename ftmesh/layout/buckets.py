"""Pack the leaves of a pytree into a few large buffers of equal chunks, and unpack them.

A buffer has shape ``[chunks, rows, width]``. Rows of 128 keep a chunk contiguous in the tiled
memory of a TPU; a payload too small for that has shorter rows. Every leaf starts at a row. The rest
is padded with zeros.
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
from ftmesh.layout.element_order import TILE_ROWS, WIDTH, Shape, from_tile_order, to_tile_order
from ftmesh.units import check_bytes


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
