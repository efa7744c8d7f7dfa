"""Slabs: the sum of a large array a slab at a time, each written where it was.

A sum takes a buffer, and where the array is a parameter of the program and nothing else is computed
(an average of weights, donated), that is a second copy of it: compilers let nothing that
communicates write to what goes out. A slab at a time, it is a copy of one slab. What this costs is
the latency of all rounds, once for every slab; and a loop in the program for every large array.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from ftmesh.collectives.all_reduce import sum_in_buffer
from ftmesh.collectives.precision import Precision
from ftmesh.errors import CollectiveError
from ftmesh.execute import primitives
from ftmesh.execute.lowering import Program
from ftmesh.layout.element_order import (
    TILE_ROWS,
    WIDTH,
    Shape,
    as_matrix,
    in_memory,
    lies_as_matrix,
    of_matrix,
)


def sum_in_slabs(
    array: jax.Array,
    axis_name: Any,
    program: Program,
    kind: Precision,
    divisor: int | None,
    most: int,
) -> jax.Array:
    """The sum of an array, divided by `divisor` if there is one, in slabs of up to `most` elements.

    Rather of somewhat fewer, if those fill the chunks of the program.
    """
    is_merged = lies_as_matrix(array.shape)
    laid = as_matrix(array) if is_merged else array.reshape(array.shape or -1)
    counted = _counted(laid)
    filled = program.num_chunks * TILE_ROWS * 4 // kind.results.itemsize * WIDTH
    cut = cut_of(counted.shape, most // filled * filled or most, array.dtype.itemsize)
    total = _sum.bind(
        counted, axis_name=axis_name, program=program, kind=kind, divisor=divisor, cut=cut
    ).reshape(laid.shape)
    return of_matrix(total, array.shape) if is_merged else total.reshape(array.shape)


def _counted(laid: jax.Array) -> jax.Array:
    """An array as it is, or as rows of tiles where int32 does not count the length of an axis."""
    if max(laid.shape) < 2**31:
        return laid
    if laid.size % WIDTH or laid.size // WIDTH >= 2**31:
        raise CollectiveError(
            f"an array that is laid out as {laid.shape} is longer than int32 counts, and cut into "
            f"slabs only if it fills rows of {WIDTH}, fewer than 2**31: pad it, shape it otherwise "
            "or leave out slab_bytes"
        )
    return laid.reshape(-1, WIDTH)


@dataclass(frozen=True)
class Cut:
    """How an array is cut: into slabs that have so much of one of its axes, and a shorter last.

    The axes of a slab are taken in some `order`, outermost first.
    """

    axis: int
    length: int
    order: tuple[int, ...]


def cut_of(shape: Shape, most: int, itemsize: int) -> Cut:
    """How to cut an array into slabs of up to `most` elements, through no tile.

    Along the outermost axis in memory of which a slab has enough to fill tiles. Where it has not of
    any, it is cut through tiles; where it has not one row or column, it is the shortest of those.

    >>> cut_of((100_000,), 10_000, itemsize=4)
    Cut(axis=0, length=9216, order=(0,))
    >>> cut_of((1000, 1024), 50_000, itemsize=4)
    Cut(axis=0, length=48, order=(0, 1))
    >>> cut_of((8, 100_000), 50_000, itemsize=4)
    Cut(axis=1, length=6144, order=(0, 1))
    >>> cut_of((5, 1000, 130), 100_000, itemsize=4)
    Cut(axis=2, length=16, order=(0, 2, 1))
    """
    order = in_memory(shape, itemsize)
    *_, inner = order
    rows = TILE_ROWS * 4 // itemsize or 1
    grains = [1] * len(shape)
    for axis, grain in zip(reversed(order), (WIDTH, rows), strict=False):
        grains[axis] = grain if len(shape) > 1 else rows * WIDTH
    fits = [most // (math.prod(shape) // length) for length in shape]
    filling = [axis for axis in order if fits[axis] >= grains[axis]]
    fitting = [axis for axis in order if fits[axis]]
    axis = (filling or fitting or [shape.index(max(shape))])[0]
    length = _whole(max(1, fits[axis]), grains[axis])
    if axis != inner and shape[inner] % WIDTH and length % WIDTH == 0:
        length -= grains[axis]  # or it would be packed as the innermost
    return Cut(axis, length, order)


def _whole(length: int, tile: int) -> int:
    """At most so much, in whole tiles if there is one of them."""
    return length // tile * tile or length


def _run(
    x: Any,
    *,
    axis_name: Any,
    program: Program,
    kind: Precision,
    divisor: int | None,
    cut: Cut,
    emulated: bool,
) -> Any:
    """The program of one rank. Batches are further dimensions of the array, and of its slabs."""
    taken = (*cut.order, *range(len(cut.order), x.ndim))

    def with_sum(x: Any, start: Any, length: int) -> Any:
        slab = lax.dynamic_slice_in_dim(x, start, length, cut.axis).transpose(taken)
        (total,) = sum_in_buffer(
            [slab], axis_name, program, kind, divisor, all_reduce=primitives.sum_varying
        )
        total = total.astype(x.dtype).transpose(np.argsort(taken))
        return lax.dynamic_update_slice_in_dim(x, total, start, cut.axis)

    number, rest = divmod(x.shape[cut.axis], cut.length)
    x = lax.fori_loop(0, number, lambda i, x: with_sum(x, i * cut.length, cut.length), x)
    return with_sum(x, number * cut.length, rest) if rest else x


_sum, *_ = primitives.summing(("sum_in_slabs", "sum_in_slabs_varying", "spread_in_slabs"), _run)
