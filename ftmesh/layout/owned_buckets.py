"""Owned: the leaves of a pytree in buckets whose chunks are shared out among their owners.

A rank holds one array per bucket, ``[rows, width]``: its chunks, one below the other. Rows belong
to one leaf each, or to none. Every device of a program holds arrays of one shape: a rank that owns
fewer chunks than others, as chips off the main rings do, holds zeros in place of those.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
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
    """Some leaves, by their position, in one buffer; `owned` has the chunks of each rank.

    Ranks with fewer chunks than others have `num_chunks` in place of those.
    """

    members: tuple[int, ...]
    dtype: Any
    packing: Packing
    owned: Ints

    @property
    def num_rows(self) -> int:
        """Rows of a rank."""
        return int(self.owned.shape[1]) * self.packing.rows

    @property
    def shape(self) -> Shape:
        """That of the array of a rank."""
        return self.num_rows, self.packing.width

    def rows(self, axis_name: Any) -> Rows:
        """Whose rows the calling rank has."""
        mine = jnp.asarray(self.owned)[lax.axis_index(axis_name)]
        place = (mine[:, None] * self.packing.rows + jnp.arange(self.packing.rows)).reshape(-1)
        width = self.packing.width
        starts = np.array(self.packing.starts) // width
        is_beyond = place[:, None] >= jnp.asarray(starts[1:], place.dtype)
        member = jnp.minimum(is_beyond.sum(1, dtype=np.int32), len(self.members) - 1)
        sizes = jnp.asarray([math.prod(shape) for shape in self.packing.shapes], np.int32)
        left = sizes[member] - (place - jnp.asarray(starts[:-1], place.dtype)[member]) * width
        return Rows(len(self.members), member, jnp.clip(left, 0, width), width)


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows that a rank has of a bucket: which member each is of, and how much of it is real."""

    num_members: int
    member: jax.Array
    length: jax.Array  # elements that are not padding
    width: int  # elements with padding

    def sums(self, x: jax.Array) -> jax.Array:
        """For each member, the sum of what is in its rows."""
        is_real = lax.broadcasted_iota(np.int32, x.shape, 1) < self.length[:, None]
        of_row = jnp.sum(jnp.where(is_real, x, jnp.zeros((), x.dtype)), axis=1)
        is_of = self.member[:, None] == jnp.arange(self.num_members, dtype=np.int32)
        return jnp.sum(jnp.where(is_of, of_row[:, None], jnp.zeros((), x.dtype)), axis=0)

    def spread(self, numbers: jax.Array) -> jax.Array:
        """The number of its member, in every row."""
        return jnp.broadcast_to(numbers[self.member][:, None], (len(self.member), self.width))


@dataclass(frozen=True, eq=False)
class Owned:
    """All leaves of a pytree: in buckets, but for those that are `whole` at every rank.

    Those are single numbers and empty arrays.
    """

    types: tuple[jax.ShapeDtypeStruct, ...]
    buckets: tuple[OwnedBucket, ...]

    @staticmethod
    def of(
        leaves: Sequence[Any],
        owned: Ints,
        num_chunks: int,
        bucket_bytes: int,
        order: Sequence[int] | None = None,
    ) -> Owned:
        """Buckets of up to `bucket_bytes`, filled in `order`, for the owners of chunks."""
        types = tuple(jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in leaves)
        order = range(len(types)) if order is None else order
        shared = [i for i in order if types[i].ndim and types[i].size]
        some = [types[i] for i in shared]
        made = make_buckets(some, [each.dtype for each in some], bucket_bytes)
        buckets = []
        for bucket in sorted(made, key=lambda bucket: max(bucket.members)):
            members = tuple(shared[i] for i in bucket.members)
            shapes = [types[i].shape for i in members]
            packing = Packing.of(shapes, num_chunks, bucket.kind.itemsize)
            buckets.append(OwnedBucket(members, bucket.kind, packing, owned))
        return Owned(types, tuple(buckets))

    @cached_property
    def whole(self) -> tuple[int, ...]:
        """The leaves that are in no bucket."""
        return tuple(i for i in range(len(self.types)) if i not in self.home)

    @cached_property
    def home(self) -> dict[int, tuple[int, int]]:
        """For each leaf in a bucket, which one, and which of its members it is."""
        return {
            leaf: (at, place)
            for at, bucket in enumerate(self.buckets)
            for place, leaf in enumerate(bucket.members)
        }

    @cached_property
    def fingerprint(self) -> str:
        """A mark of where everything lies and who owns it."""
        leaves = [(each.shape, str(each.dtype)) for each in self.types]
        buckets = [(b.members, b.packing.shape, b.owned.tolist()) for b in self.buckets]
        return hashlib.sha256(repr((leaves, buckets)).encode()).hexdigest()[:16]
