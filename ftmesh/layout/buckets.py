"""Buckets: the leaves of a pytree in a few large buffers of equal chunks, and back.

A buffer has shape ``[chunks, rows, width]``. Rows of 128 keep a chunk contiguous in the tiled
memory of a TPU; a payload too small for that has shorter ones. Every leaf begins with a row. What
nothing fills is padding, of zeros.
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
from ftmesh.layout.element_order import TILE_ROWS, WIDTH, Shape, flat, shaped
from ftmesh.units import check_bytes


@dataclass(frozen=True)
class Bucket:
    """Some leaves, by their position, that travel in one buffer, and what they have in common."""

    members: tuple[int, ...]
    kind: Any


def make_buckets(
    leaves: Sequence[Any],
    kinds: Sequence[Hashable],
    bucket_bytes: int,
    sizes: Sequence[int] | None = None,
) -> list[Bucket]:
    """Leaves of one kind (and with the same varying axes) together, up to `bucket_bytes` of them.

    A larger leaf has a bucket of its own; an empty one has none. Leaves that fill whole tiles come
    first in a bucket, so that each of them starts with a tile. `sizes` are the bytes that leaves
    take, those of their dtypes unless given.
    """
    bucket_bytes = check_bytes(bucket_bytes, name="bucket_bytes", most=None)
    if sizes is None:
        sizes = [leaf.size * leaf.dtype.itemsize for leaf in leaves]
    groups: dict[Any, list[list[int]]] = {}
    filled: dict[Any, int] = {}
    for i, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True)):
        if leaf.size == 0:
            continue
        key = (kind, _compat.varying_axes(leaf))
        if key not in groups or filled[key] + sizes[i] > bucket_bytes:
            groups.setdefault(key, []).append([])
            filled[key] = 0
        groups[key][-1].append(i)
        filled[key] += sizes[i]

    def is_ragged(i: int) -> bool:
        return bool(leaves[i].size % (TILE_ROWS * WIDTH))

    return [
        Bucket(tuple(sorted(members, key=is_ragged)), key[0])
        for key, buckets in groups.items()
        for members in buckets
    ]


def chunk_shape(size: int, num_chunks: int, itemsize: int) -> tuple[int, int]:
    """Rows and width of one of `num_chunks` chunks that together hold `size` elements."""
    packing = Packing.of([(size,)], num_chunks, itemsize)
    return packing.rows, packing.width


@dataclass(frozen=True)
class Packing:
    """Where arrays of the given shapes lie in a buffer of `num_chunks` chunks, each in its rows.

    A chunk has `rows` of `width` elements.
    """

    shapes: tuple[Shape, ...]
    num_chunks: int
    rows: int
    width: int

    @staticmethod
    def of(shapes: Sequence[Shape], num_chunks: int, itemsize: int) -> Packing:
        """Rows of 128, if there is as much in a chunk, and whole tiles of them if they fill one.

        A tile has so many elements of `itemsize` bytes. Where there is less, there are as few rows
        as can be, and those are as short as can be.
        """

        def rows(width: int) -> int:
            every = sum(math.ceil(math.prod(shape) / width) for shape in shapes)
            return max(1, math.ceil(every / num_chunks))

        least = math.ceil(sum(map(math.prod, shapes)) / num_chunks)
        if least >= WIDTH:
            tile = max(1, TILE_ROWS * 4 // itemsize)
            whole = rows(WIDTH)
            if whole >= tile:
                whole = math.ceil(whole / tile) * tile
            return Packing(tuple(shapes), num_chunks, whole, WIDTH)
        width = min(range(1, WIDTH + 1), key=rows)
        return Packing(tuple(shapes), num_chunks, rows(width), width)

    @property
    def shape(self) -> Shape:
        """That of the buffer."""
        return self.num_chunks, self.rows, self.width

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each array begins, in elements, and where the last one ends."""
        sizes = (math.ceil(math.prod(shape) / self.width) * self.width for shape in self.shapes)
        return tuple(itertools.accumulate(sizes, initial=0))

    def pack(self, arrays: Iterable[jax.Array]) -> jax.Array:
        """The buffer with arrays of one dtype in it."""
        parts: list[jax.Array] = []
        stops = [*self.starts[1:-1], math.prod(self.shape)]
        for array, start, stop in zip(arrays, self.starts, stops, strict=False):
            parts += flat(array)
            if stop - start > array.size:
                parts.append(jnp.zeros(stop - start - array.size, array.dtype))
        if len(parts) == 1:
            return parts[0].reshape(self.shape)
        is_one_vector = len(self.shapes) == 1 and parts[0].size == math.prod(self.shapes[0])
        joined = _padded(*parts) if is_one_vector else jnp.concatenate(parts)
        return joined.reshape(self.shape)

    def unpack(self, buffer: Any) -> list[Any]:
        """The arrays that `pack` put into a buffer."""
        vector = buffer.reshape(-1)
        return [
            shaped(vector[start : start + math.prod(shape)], shape)
            for shape, start in zip(self.shapes, self.starts, strict=False)
        ]


def _padded(vector: jax.Array, zeros: jax.Array) -> jax.Array:
    """A vector and zeros after it. A TPU takes half as long for it where something is computed."""
    whole = jnp.concatenate([vector, zeros])
    if whole.size >= 2**31:
        return whole
    return jnp.where(lax.iota(np.int32, whole.size) < vector.size, whole, jnp.zeros_like(whole))


def pack(leaves: Sequence[jax.Array], num_chunks: int, itemsize: int | None = None) -> jax.Array:
    """Arrays of one dtype in a buffer of `num_chunks` chunks.

    Chunks fill whole tiles of elements of `itemsize` bytes, where those are smaller than the
    arrays' own.
    """
    shapes = [leaf.shape for leaf in leaves]
    return Packing.of(shapes, num_chunks, itemsize or leaves[0].dtype.itemsize).pack(leaves)


def unpack(buffer: jax.Array, shapes: Iterable[Shape]) -> list[Any]:
    """The arrays of the given shapes that `pack` laid into `buffer`."""
    return Packing(tuple(shapes), *buffer.shape).unpack(buffer)
