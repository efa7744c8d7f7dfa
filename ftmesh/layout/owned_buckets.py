"""The leaves of a pytree in buckets whose chunks are sharded over their owners.

A rank holds one array ``[rows, width]`` per bucket: its chunks, stacked. Each row belongs to one
leaf, or to none. All ranks hold arrays of one shape: a rank that owns fewer chunks than others, as
chips off the main rings do, holds zeros in their place.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.layout.buckets import Packing, make_buckets
from ftmesh.layout.element_order import Shape
from ftmesh.schedule.transfers import Ints


@dataclass(frozen=True, eq=False)
class OwnedBucket:
    """The indices of leaves in one buffer, and the chunks that each rank owns."""

    members: tuple[int, ...]
    dtype: Any
    packing: Packing
    owned: Ints  # rows that are shorter than others are padded with `num_chunks`

    @property
    def num_rows(self) -> int:
        return int(self.owned.shape[1]) * self.packing.rows

    @property
    def shape(self) -> Shape:
        return self.num_rows, self.packing.width

    def rows(self, axis_name: Any) -> OwnedRows:
        """The rows of the calling rank."""
        mine = jnp.asarray(self.owned)[lax.axis_index(axis_name)]
        row = (mine[:, None] * self.packing.rows + jnp.arange(self.packing.rows)).reshape(-1)
        width, starts = self.packing.width, np.array(self.packing.starts) // self.packing.width
        is_beyond = row[:, None] >= jnp.asarray(starts[1:], row.dtype)
        member = jnp.minimum(is_beyond.sum(1, dtype=np.int32), len(self.members) - 1)
        sizes = jnp.asarray([math.prod(shape) for shape in self.packing.shapes], np.int32)
        left = sizes[member] - (row - jnp.asarray(starts[:-1], row.dtype)[member]) * width
        return OwnedRows(len(self.members), member, jnp.clip(left, 0, width), width)


@dataclass(frozen=True, eq=False)
class OwnedRows:
    """The rows that a rank has of a bucket: the member of each, and its length without padding."""

    num_members: int
    member: jax.Array
    length: jax.Array  # elements that are not padding
    width: int  # elements with padding

    def sums(self, x: jax.Array) -> jax.Array:
        """For each member, the sum of `x` over its rows."""
        is_real = lax.broadcasted_iota(np.int32, x.shape, 1) < self.length[:, None]
        row_sums = jnp.sum(jnp.where(is_real, x, jnp.zeros((), x.dtype)), axis=1)
        is_member = self.member[:, None] == jnp.arange(self.num_members, dtype=np.int32)
        return jnp.sum(jnp.where(is_member, row_sums[:, None], jnp.zeros((), x.dtype)), axis=0)

    def spread(self, values: jax.Array) -> jax.Array:
        """The value of its member in every element of a row."""
        return jnp.broadcast_to(values[self.member][:, None], (len(self.member), self.width))


@dataclass(frozen=True, eq=False)
class OwnedLayout:
    """All leaves of a pytree: in buckets, except those that are `replicated` on every rank."""

    types: tuple[jax.ShapeDtypeStruct, ...]
    buckets: tuple[OwnedBucket, ...]

    @staticmethod
    def build(
        leaves: Sequence[Any],
        owned: Ints,
        num_chunks: int,
        bucket_bytes: int,
        order: Sequence[int] | None = None,
    ) -> OwnedLayout:
        """Put leaves, or their types, into buckets of up to `bucket_bytes`.

        Buckets are filled with the leaves of the indices in `order`. For `owned` see `OwnedBucket`.
        """
        types = tuple(jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in leaves)
        order = range(len(types)) if order is None else order
        sharded = [i for i in order if types[i].ndim and types[i].size]
        dtypes = [types[i].dtype for i in sharded]
        unordered = make_buckets([types[i] for i in sharded], dtypes, bucket_bytes)
        buckets = []
        for bucket in sorted(unordered, key=lambda bucket: max(bucket.members)):
            members = tuple(sharded[i] for i in bucket.members)
            shapes = [types[i].shape for i in members]
            packing = Packing.for_shapes(shapes, num_chunks, bucket.kind.itemsize)
            buckets.append(OwnedBucket(members, bucket.kind, packing, owned))
        return OwnedLayout(types, tuple(buckets))

    @cached_property
    def replicated(self) -> tuple[int, ...]:
        """The leaves that are in no bucket: scalars and empty arrays."""
        return tuple(i for i in range(len(self.types)) if i not in self.location)

    @cached_property
    def location(self) -> dict[int, tuple[int, int]]:
        """For each leaf in a bucket, the bucket and the index among its members."""
        return {
            leaf: (i, member)
            for i, bucket in enumerate(self.buckets)
            for member, leaf in enumerate(bucket.members)
        }

    @cached_property
    def fingerprint(self) -> str:
        """A hash of where every leaf is and who owns it."""
        leaves = [(t.shape, str(t.dtype)) for t in self.types]
        buckets = [(b.members, b.packing.shape, b.owned.tolist()) for b in self.buckets]
        return hashlib.sha256(repr((leaves, buckets)).encode()).hexdigest()[:16]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Slot:
    """Stands in a state's tree for the tensor of parameter `leaf`, stored in `rows[row]`."""

    row: int
    leaf: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShardedState:
    """An optax state with its large tensors replaced by slots.

    Attributes:
        inner: The state's tree as optax builds it, with a `Slot` for every sharded tensor.
        rows: One tuple per kind of tensor, such as the first moments of all parameters. It has one
            array per bucket, or None where the bucket holds no tensor of that kind.
        owners: The fingerprint of the layout, which identifies who owns what.
    """

    inner: Any
    rows: tuple[tuple[jax.Array | None, ...], ...]
    owners: str = field(metadata={"static": True})
