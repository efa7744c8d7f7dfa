"""Shards: the part of every array that a rank owns, as the chunks of a plan's schedule lie.

An array is cut into as many equal columns as the schedule has chunks, the last ones padded with
zeros, and column c belongs to the owner of chunk c. So the shard of an array has the same shape at
every rank, and a pytree of arrays becomes a pytree of shards with the same structure: whatever is
decided leaf by leaf is decided for shards as for whole arrays.

Every device of a program holds arrays of one shape. A rank that owns fewer chunks than others, as
chips off the main rings do, holds zeros in place of those it does not own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ftmesh import collectives
from ftmesh.collectives.gradients import reduced_on_the_way
from ftmesh.errors import CollectiveError
from ftmesh.execute import _compat
from ftmesh.layout.buckets import chunk_shape, make_buckets, pack, unpack
from ftmesh.plans import Plan

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Shards:
    """How arrays are shared out among the owners of a plan's chunks, and put together again."""

    plan: Plan
    axis_name: Any
    bucket_bytes: int = collectives.BUCKET_BYTES
    wire_dtype: Any = None  # in which sums travel

    def __post_init__(self) -> None:
        if self.plan.program.owner is None:
            raise CollectiveError(
                f"algorithm {self.plan.algorithm!r} has no reduce-scatter half, so nobody owns a "
                "chunk and nothing can be sharded: plan with one that has, such as 'ring' or "
                "'row_pair'"
            )

    @property
    def num_chunks(self) -> int:
        """Columns of an array."""
        return self.plan.program.num_chunks

    @property
    def most_owned(self) -> int:
        """Columns in a shard: as many as the rank with most chunks owns."""
        return int(self.plan.program.owned.shape[1])

    def shape(self, whole: Shape) -> Shape:
        """The shape of the shard of an array: all elements along the last of as many dimensions.

        An empty array is its own shard.
        """
        length = self.most_owned * self._length(whole)
        return (*(1 for _ in whole[1:]), length) if length else whole

    def empty(self, array: Any) -> jax.Array:
        """Zeros in place of the shard of an array, that may differ from rank to rank."""
        zeros = jnp.zeros(self.shape(jnp.shape(array)), jnp.result_type(array))
        return _compat.varying_as(_compat.as_varying(zeros, self.axis_name), array)

    def own(self, array: Any) -> jax.Array:
        """The shard that a rank owns of an array that all ranks have."""
        columns = jnp.take(
            self._cut(_compat.as_varying(jnp.asarray(array), self.axis_name)),
            self._mine(),
            axis=0,
            mode="fill",
            fill_value=0,
        )
        return columns.reshape(self.shape(array.shape))

    def is_real(self, whole: Shape) -> jax.Array:
        """Which elements of a rank's shard are elements of the array, and not padding."""
        length = self._length(whole)
        places = self._mine()[:, None] * length + jnp.arange(length)
        return (places < math.prod(whole)).reshape(self.shape(whole))

    def scatter_sum(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """The shards that a rank owns of the sums of `arrays` over all ranks."""
        shards = [jnp.zeros(self.shape(array.shape), array.dtype) for array in arrays]
        dtypes = [array.dtype for array in arrays]
        for bucket in make_buckets(arrays, dtypes, self.bucket_bytes):
            shapes = [arrays[i].shape for i in bucket.members]
            columns = self._joined([self._cut(arrays[i]) for i in bucket.members])
            mine = collectives.reduce_to_owners(
                columns.reshape(-1), self.axis_name, plan=self.plan, wire_dtype=self.wire_dtype
            )
            parts = self._parted(mine.reshape(self.most_owned, -1), shapes)
            for i, part in zip(bucket.members, parts, strict=True):
                shards[i] = part.reshape(self.shape(arrays[i].shape))
        return shards

    def scatter_mean(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """The same of their means over all live ranks."""
        num_live = len(self.plan.program.live)
        return [total / num_live for total in self.scatter_sum(arrays)]

    def gather(self, shards: list[jax.Array], wholes: list[Shape]) -> list[jax.Array]:
        """The arrays, of shapes `wholes`, whose shards the ranks hold; the same at all ranks."""
        arrays = [jnp.zeros(whole, s.dtype) for s, whole in zip(shards, wholes, strict=True)]
        dtypes = [shard.dtype for shard in shards]
        shard_bytes = self.bucket_bytes * self.most_owned // self.num_chunks
        for bucket in make_buckets(shards, dtypes, shard_bytes):
            mine = self._joined([shards[i].reshape(self.most_owned, -1) for i in bucket.members])
            columns = collectives.gather_from_owners(
                _compat.as_varying(mine, self.axis_name).reshape(-1),
                self.axis_name,
                plan=self.plan,
                size=self.num_chunks * mine.shape[1],
            )
            shapes = [wholes[i] for i in bucket.members]
            parts = self._parted(columns.reshape(self.num_chunks, -1), shapes)
            for i, part, whole in zip(bucket.members, parts, shapes, strict=True):
                (arrays[i],) = unpack(part.reshape(-1)[: math.prod(whole)], [whole])
        return arrays

    # Columns ----------------------------------------------------------------------------------

    def _length(self, whole: Shape) -> int:
        """Elements in one column of an array."""
        return math.ceil(math.prod(whole) / self.num_chunks)

    def _mine(self) -> jax.Array:
        """The chunks of this rank; `num_chunks` in place of those it has fewer of than others."""
        return jnp.asarray(self.plan.program.owned)[lax.axis_index(self.axis_name)]

    def _cut(self, array: jax.Array) -> jax.Array:
        """An array as its columns, ``[num_chunks, length]``."""
        flat = pack([array], 1).reshape(-1)[: array.size]
        length = self._length(array.shape)
        padded = jnp.pad(flat, (0, self.num_chunks * length - array.size))
        return padded.reshape(self.num_chunks, length)

    def _joined(self, columns: list[jax.Array]) -> jax.Array:
        """Columns of several arrays side by side, padded so that each row fills a chunk."""
        length = sum(each.shape[1] for each in columns)
        itemsize = columns[0].dtype.itemsize
        full = math.prod(chunk_shape(self.num_chunks * length, self.num_chunks, itemsize))
        return jnp.pad(jnp.concatenate(columns, axis=1), ((0, 0), (0, full - length)))

    def _parted(self, columns: jax.Array, wholes: list[Shape]) -> list[jax.Array]:
        """The columns of each of several arrays, from where `_joined` has put them."""
        parts, start = [], 0
        for whole in wholes:
            stop = start + self._length(whole)
            parts.append(columns[:, start:stop])
            start = stop
        return parts


def with_mean_shards(
    params: Any, slots: Any, *, shards: Shards, order: Sequence[int] | None = None
) -> Any:
    """`params` as they are, but what comes back for them goes to `slots`, as a rank's shards.

    To be differentiated with respect to `slots`, arrays of the shapes of shards, whose values do
    not matter: their gradients are the shards of the means over all ranks. So only the first half
    of an all-reduce is in the backward pass, and nothing whole comes out of it. `order` is as for
    `with_mean_gradients`.
    """
    whole = replace(shards, bucket_bytes=sys.maxsize)  # a bucket is not parted again
    return reduced_on_the_way(
        params, slots, whole.scatter_mean, shards.axis_name, shards.bucket_bytes, order
    )
