"""How an array of a loss is spread over ranks, and how to go from one layout to another.

A loss is traced with the whole batch. Each of its arrays then has a layout: all ranks have it
(`SAME`), each rank has the rows of its own examples (`ROWS`) or its shard of a weight or gradient
(`SHARD`), or the array is the sum over ranks of what they have (`PARTIAL`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.collectives.all_reduce import psum
from ftmesh.collectives.reduce_scatter import all_gather, psum_scatter
from ftmesh.execute.types import AxisName, DTypeLike, PlanLike, PyTree
from ftmesh.layout.batch_shares import BatchShares


class Spread(Enum):
    """What a rank has of an array."""

    SAME = "the same on all ranks"
    ROWS = "the rows of its examples"
    SHARD = "its shard of an array that is sharded along the axis"
    PARTIAL = "a part of a sum over ranks"


@dataclass(frozen=True)
class BatchLayout:
    """The layout of one array.

    A shard is cut along dimension `dim`. For rows, dimension `dim` has ``outer * units * inner``
    entries in the whole batch, of which ranks share the units. A unit is an example, or several
    that one rank must have.
    """

    spread: Spread
    dim: int = 0
    outer: int = 1
    inner: int = 1

    @property
    def is_rows(self) -> bool:
        return self.spread == Spread.ROWS

    @property
    def is_shard(self) -> bool:
        return self.spread == Spread.SHARD

    @property
    def has_dim(self) -> bool:
        """Whether ranks have different parts along `dim`."""
        return self.is_rows or self.is_shard

    @property
    def is_partial(self) -> bool:
        return self.spread == Spread.PARTIAL

    @property
    def is_same(self) -> bool:
        return self.spread == Spread.SAME

    def moved_to(self, dim: int) -> BatchLayout:
        """The same rows or shard along another dimension."""
        return replace(self, dim=dim)


SAME = BatchLayout(Spread.SAME)
PARTIAL = BatchLayout(Spread.PARTIAL)


@dataclass(frozen=True)
class UnitSplit:
    """The examples of a batch as ``outer * units * inner``; ranks share the units."""

    outer: int
    units: int
    inner: int

    @property
    def layout(self) -> BatchLayout:
        """The layout of an array whose first dimension is the batch."""
        return BatchLayout(Spread.ROWS, 0, self.outer, self.inner)

    def split_at(self, minor: int) -> tuple[UnitSplit, UnitSplit]:
        """Two ways to share units that are a matrix whose rows have `minor` entries."""
        major = self.units // minor
        return (
            UnitSplit(self.outer * major, minor, self.inner),
            UnitSplit(self.outer, major, minor * self.inner),
        )


@dataclass(frozen=True, eq=False)
class RankUnits:
    """The units of this rank, where the axis of the plan is bound."""

    plan: PlanLike
    axis_name: AxisName
    shares: BatchShares  # of units
    wire_dtype: DTypeLike | None = None  # of gradients that are scattered, as for `psum_scatter`
    accumulate_dtype: DTypeLike | None = None

    @cached_property
    def has_padding(self) -> bool:
        return bool(self.shares.global_batch % len(self.shares.live))

    @property
    def units(self) -> int:
        return self.shares.global_batch

    @property
    def local_units(self) -> int:
        return self.shares.per_rank

    def length(self, layout: BatchLayout) -> int:
        """Entries of the dimension of rows on one rank."""
        return layout.outer * self.local_units * layout.inner

    def local_shape(self, shape: Sequence[int], layout: BatchLayout) -> tuple[int, ...]:
        """The shape on one rank of an array with this shape for the whole batch."""
        local = list(shape)
        if layout.is_rows:
            local[layout.dim] = self.length(layout)
        return tuple(local)

    # What follows runs on each rank ---------------------------------------------------------------

    def positions(self) -> jax.Array:
        """The units of this rank; -1 is padding."""
        positions = self.shares.positions().astype(np.int32)
        return jnp.asarray(positions)[lax.axis_index(self.axis_name)]

    def take_rows(self, x: Any, layout: BatchLayout) -> Any:
        """The rows of this rank, of an array that it has whole. Padding repeats the last unit."""
        dim, shape = layout.dim, x.shape
        parts = x.reshape(*shape[:dim], layout.outer, self.units, layout.inner, *shape[dim + 1 :])
        if self.shares.is_even:
            start = lax.axis_index(self.axis_name) * self.local_units
            rows = lax.dynamic_slice_in_dim(parts, start, self.local_units, dim + 1)
        else:
            positions = jnp.where(self.positions() < 0, self.units - 1, self.positions())
            rows = jnp.take(parts, positions, axis=dim + 1, mode="clip")
        return rows.reshape(self.local_shape(shape, layout))

    def gather_rows(self, x: Any, layout: BatchLayout) -> Any:
        """The rows of all ranks, without padding."""
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            words = self.gather_rows(jax.random.key_data(x), layout)
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
        numbers = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
        dim, shape = layout.dim, x.shape
        split = (layout.outer, self.local_units, layout.inner)
        parts = jnp.moveaxis(numbers.reshape(*shape[:dim], *split, *shape[dim + 1 :]), dim + 1, 0)
        positions = jnp.where(self.positions() < 0, self.units, self.positions())
        whole = jnp.zeros((self.units, *parts.shape[1:]), numbers.dtype)
        whole = self.sum(whole.at[positions].set(parts, mode="drop"))
        whole = jnp.moveaxis(whole, 0, dim + 1)
        length = layout.outer * self.units * layout.inner
        return whole.reshape(*shape[:dim], length, *shape[dim + 1 :]).astype(x.dtype)

    def mask_rows(self, x: Any, layout: BatchLayout, fill: Any) -> Any:
        """Replace the rows of padding by `fill`, the neutral element of a reduction."""
        if not self.has_padding:
            return x
        is_unit = jnp.broadcast_to(
            (self.positions() >= 0)[None, :, None], (layout.outer, self.local_units, layout.inner)
        )
        shape = [1] * x.ndim
        shape[layout.dim] = math.prod(is_unit.shape)
        return jnp.where(is_unit.reshape(shape), x, jnp.asarray(fill, x.dtype))

    def sum(self, x: PyTree) -> PyTree:
        """Sum over ranks."""
        return psum(x, self.axis_name, plan=self.plan)

    def gather_shards(self, x: Any, dim: int) -> Any:
        """The whole array, from the shards of all ranks."""
        return all_gather(x, self.axis_name, axis=dim, tiled=True, plan=self.plan)

    def scatter_sum(self, x: Any, dim: int) -> Any:
        """The shard of this rank of the sum over ranks."""
        return psum_scatter(
            x,
            self.axis_name,
            scatter_dimension=dim,
            tiled=True,
            plan=self.plan,
            wire_dtype=self.wire_dtype,
            accumulate_dtype=self.accumulate_dtype,
        )

    def on_first(self, x: Any) -> Any:
        """`x` on the first live rank and zeros on the others: parts whose sum is `x`."""
        is_first = lax.axis_index(self.axis_name) == int(self.shares.live[0])
        x = jnp.asarray(x)
        return jnp.where(is_first, x, jnp.zeros((), x.dtype))

    def reduce_over_ranks(self, x: Any, reduce: Callable[[Any], Any]) -> Any:
        """Reduce what live ranks have; `reduce` is called with all of it, stacked."""
        numbers = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
        index = np.zeros(self.shares.num_ranks, np.int32)
        index[self.shares.live] = np.arange(len(self.shares.live))
        own = jnp.asarray(index)[lax.axis_index(self.axis_name)]
        stacked = jnp.zeros((len(self.shares.live), *x.shape), numbers.dtype)
        stacked = self.sum(lax.dynamic_update_index_in_dim(stacked, numbers, own, 0))
        return reduce(stacked.astype(x.dtype))

    def convert(self, x: Any, source: BatchLayout, target: BatchLayout) -> Any:
        """Change the layout of an array. Rows stay rows."""
        if source == target:
            return x
        if source.is_shard:
            x, source = self.gather_shards(x, source.dim), SAME
        if source.is_partial:
            x, source = self.sum(x), SAME
        if target.is_rows:
            return self.take_rows(x, target)
        return self.on_first(x) if target.is_partial else x
