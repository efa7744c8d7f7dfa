"""Tensors that are stored flat: in their natural order, cut equally along one mesh axis.

On N ranks a tensor is stored as a vector of N equal parts: its own elements, row by row,
then padding. Rank r has the r-th of N equal parts. A tensor that other mesh axes shard is stored in
an array ``[*number of shards along each dimension, length]``: each shard by itself, as above. So
what is stored depends on the number of ranks by padding at the end alone, and not on the plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.errors import ArgumentError
from ftmesh.layout.buckets import Shape, make_buckets

# FLAT: cut as above. LOCAL: the parameter itself is cut along the axis, and a rank stores tensors
# of the shape of its piece. REPLICATED: every rank stores the tensor.
Kind = Literal["flat", "local", "replicated"]

LANES = 128  # elements of a row of a TPU's tiles
MAX_PADDING = 1.25  # times the size of a tensor, for whole rows


@dataclass(frozen=True)
class LeafLayout:
    """How tensors of the shape of one parameter are stored.

    Attributes:
        type: The parameter's type, as one rank has it.
        kind: See `Kind`.
        num_ranks: Of the axis.
        counts: How many shards other axes make of the parameter, along each dimension.
    """

    type: jax.ShapeDtypeStruct
    kind: Kind
    num_ranks: int
    counts: Shape = ()

    @property
    def part_size(self) -> int:
        """How many elements each rank has of a flat tensor."""
        return math.prod(self.row_shape) or -(-int(self.type.size) // self.num_ranks)

    @property
    def row_shape(self) -> Shape:
        """The part of a rank as whole rows of the tensor, if that takes little padding; or zeros.

        On a TPU rows of 128 elements are read and gathered in place, and parts of rows are not.
        """
        size, width = int(self.type.size), (self.type.shape or (1,))[-1]
        if width % LANES or not size:
            return 0, 0
        num_rows = -(-size // (width * self.num_ranks))
        is_near = num_rows * width * self.num_ranks <= MAX_PADDING * size
        return (num_rows, width) if is_near else (0, 0)

    def num_real(self, rank: Any) -> Any:
        """Return how many elements of the part of `rank` are not padding."""
        num_full, rest = divmod(self.type.size, self.part_size)
        return jnp.where(rank < num_full, self.part_size, jnp.where(rank == num_full, rest, 0))

    @property
    def is_split(self) -> bool:
        """True if other axes shard the parameter."""
        return math.prod(self.counts) > 1

    @property
    def own_shape(self) -> Shape:
        """The shape in which a rank computes with the tensor."""
        return (self.part_size,) if self.kind == "flat" else tuple(self.type.shape)

    @property
    def stored_shape(self) -> Shape:
        """The shape of the stored array on one rank."""
        if self.kind != "flat":
            return tuple(self.type.shape)
        return (*(1 for _ in self.counts if self.is_split), self.part_size)

    @property
    def global_shape(self) -> Shape:
        """The shape of the stored array on all ranks, for a flat tensor."""
        return (*(self.counts if self.is_split else ()), self.num_ranks * self.part_size)

    def take_part(self, x: Any, rank: Any) -> jax.Array:
        """Return the part of `rank` of a flat tensor that all ranks have."""
        size = self.part_size
        if self.num_ranks == 1:
            return jnp.reshape(x, -1)
        width = x.shape[-1]  # whole rows are read: flattening all of `x` may take a copy of it
        matrix = jnp.reshape(x, (-1, width))
        if (part := self.row_shape[0]) and part <= len(matrix):
            first = np.minimum(np.arange(self.num_ranks) * part, len(matrix) - part)
            shift = np.minimum(np.arange(self.num_ranks) * part - first, part)
            row, offset = (jnp.asarray(table.astype(np.int32))[rank] for table in (first, shift))
            window = lax.dynamic_slice_in_dim(matrix, row, part)
            window = jnp.concatenate([window, jnp.zeros_like(window)])
            return lax.dynamic_slice_in_dim(window, offset, part).reshape(-1)
        num_rows = min(len(matrix), -(-(size + width - 1) // width))
        per_part, rest = divmod(size, width)
        row = rank * per_part + rank * rest // width  # of rank * size, which may not fit in int32
        first = jnp.minimum(row, len(matrix) - num_rows)
        offset = rank * rest % width + (row - first) * width
        window = lax.dynamic_slice_in_dim(matrix, first, num_rows).reshape(-1)
        window = jnp.concatenate([window, jnp.zeros_like(window, shape=size)])
        return lax.dynamic_slice_in_dim(window, jnp.minimum(offset, num_rows * width), size)

    def to_rows(self, x: Any) -> jax.Array:
        """Return the parts of all ranks of a flat tensor, one row for each."""
        length = self.num_ranks * self.part_size
        return jnp.pad(jnp.reshape(x, -1), (0, length - x.size)).reshape(self.num_ranks, -1)

    def from_gathered_rows(self, matrix: Any) -> jax.Array:
        """Return the tensor from the whole rows of all ranks, one below the other."""
        width = self.row_shape[1]
        return matrix[: int(self.type.size) // width].reshape(self.type.shape)

    def from_rows(self, rows: Any) -> jax.Array:
        """Return the tensor from the parts of all ranks."""
        return rows.reshape(-1)[: self.type.size].reshape(self.type.shape)


@dataclass(frozen=True, eq=False)
class TreeLayout:
    """How all leaves of a pytree are stored; flat ones are communicated in buckets."""

    leaves: tuple[LeafLayout, ...]
    buckets: tuple[tuple[int, ...], ...]  # the indices of flat leaves

    @staticmethod
    def build(
        leaves: Sequence[LeafLayout], bucket_bytes: int, order: Sequence[int] | None = None
    ) -> TreeLayout:
        """Fill buckets of up to `bucket_bytes` with the flat leaves, in the given order."""
        order = range(len(leaves)) if order is None else order
        flat = [i for i in order if leaves[i].kind == "flat"]
        types = [leaves[i].type for i in flat]
        buckets = make_buckets(types, [type_.dtype for type_ in types], bucket_bytes)
        buckets.sort(key=lambda bucket: max(bucket.members))  # the first to be complete first
        members = (tuple(flat[i] for i in bucket.members) for bucket in buckets)
        return TreeLayout(tuple(leaves), tuple(members))

    @cached_property
    def cut(self) -> frozenset[int]:
        """The leaves of which each rank has a part of its own."""
        return frozenset(i for i, leaf in enumerate(self.leaves) if leaf.kind != "replicated")

    @cached_property
    def replicated(self) -> tuple[int, ...]:
        """The leaves that all ranks have."""
        return tuple(i for i in range(len(self.leaves)) if i not in self.cut)


def flatten_tensor(x: Any, stored_shape: Shape) -> Any:
    """Return a full tensor, of NumPy or JAX, as the stored array of that global shape."""
    local = _shard_shape(x.shape, stored_shape)
    *counts, length = stored_shape
    xp = jnp if isinstance(x, jax.Array) else np
    if counts:
        split = [n for pair in zip(counts, local, strict=True) for n in pair]
        x = x.reshape(split).transpose(*range(0, len(split), 2), *range(1, len(split), 2))
    flat = x.reshape(*counts, math.prod(local))
    return xp.pad(flat, [*((0, 0) for _ in counts), (0, length - flat.shape[-1])])


def unflatten_tensor(stored: Any, shape: Shape) -> Any:
    """Return the full tensor of a given shape from a stored array, for any number of ranks."""
    local = _shard_shape(shape, stored.shape)
    *counts, _ = stored.shape
    flat = stored[..., : math.prod(local)]
    if not counts:
        return flat.reshape(shape)
    number = len(counts)
    order = [i for pair in zip(range(number), range(number, 2 * number), strict=True) for i in pair]
    return flat.reshape(*counts, *local).transpose(order).reshape(shape)


def _shard_shape(shape: Shape, stored_shape: Shape) -> Shape:
    """Return the shape of each shard; raise ArgumentError if a tensor is not stored so."""
    *counts, length = stored_shape or (0,)
    known = counts or [1 for _ in shape]
    if len(known) == len(shape) and all(
        n % count == 0 for n, count in zip(shape, known, strict=True) if count
    ):
        local = tuple(n // max(1, count) for n, count in zip(shape, known, strict=True))
        if stored_shape and length >= math.prod(local):
            return local
    raise ArgumentError(
        f"an array of shape {tuple(stored_shape)} does not store a tensor of shape {tuple(shape)}: "
        "the state is of other parameters, or these are sharded in another way"
    )
