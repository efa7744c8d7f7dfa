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

from ftmesh.collectives.buffer import sum_in_buffer
from ftmesh.collectives.precision import Precision
from ftmesh.errors import CollectiveError
from ftmesh.execute import primitives
from ftmesh.execute.lower import Program
from ftmesh.layout.order import (
    TILE_ROWS,
    WIDTH,
    Shape,
    as_matrix,
    inner_axis,
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
    is_matrix = array.ndim > 1 and lies_as_matrix(array.shape)
    laid = as_matrix(array) if is_matrix else array.reshape(array.shape or -1)
    counted = _counted(laid)
    filled = program.num_chunks * TILE_ROWS * 4 // kind.results.itemsize * WIDTH
    cut = cut_of(counted.shape, most // filled * filled or most, array.dtype.itemsize)
    total = _sum.bind(
        counted, axis_name=axis_name, program=program, kind=kind, divisor=divisor, cut=cut
    ).reshape(laid.shape)
    return of_matrix(total, array.shape) if is_matrix else total.reshape(array.shape)


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

    The axes of a slab are taken in some `order`, outermost first; in their own, unless given.
    """

    axis: int
    length: int
    order: tuple[int, ...] = ()


def cut_of(shape: Shape, most: int, itemsize: int) -> Cut:
    """How to cut an array into slabs of up to `most` elements, through no tile.

    Rows of a matrix, or else columns. Where a slab has less than a tile of either, it is cut
    through tiles; where it has not one row or column, it is the shorter of those. Arrays with more
    axes, which are in memory in an order of the compiler's, are cut along the longest; with this
    one and another that fills tiles innermost, slabs of them are what is there.

    >>> cut_of((100_000,), 10_000, itemsize=4)
    Cut(axis=0, length=9216, order=())
    >>> cut_of((1000, 1024), 50_000, itemsize=4)
    Cut(axis=0, length=48, order=())
    >>> cut_of((8, 100_000), 50_000, itemsize=4)
    Cut(axis=1, length=6144, order=())
    >>> cut_of((5, 1000, 130), 100_000, itemsize=4)
    Cut(axis=1, length=128, order=(0, 2, 1))
    """
    tile = TILE_ROWS * 4 // itemsize or 1
    if len(shape) == 1:
        return Cut(0, _whole(most, tile * WIDTH))
    if len(shape) > 2:
        axis = shape.index(max(shape))
        length = max(1, most // (math.prod(shape) // shape[axis]))
        return Cut(axis, _whole(length, WIDTH), _order(shape, axis))
    rows, columns = (most // (math.prod(shape) // length) for length in shape)
    is_in_rows = rows >= tile or (rows >= 1 and columns < WIDTH)
    if is_in_rows or (not columns and shape[1] <= shape[0]):
        return Cut(0, _whole(max(1, rows), tile))
    return Cut(1, _whole(max(1, columns), WIDTH))


def _order(shape: Shape, cut: int) -> tuple[int, ...]:
    """The axes of an array, the one that is cut among the two innermost."""
    inner = inner_axis(shape)
    if shape[inner] % WIDTH:
        inner = cut
    others = [axis for axis in range(len(shape)) if axis not in (inner, cut)]
    return (*others, *[cut] * (cut != inner), inner)


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
