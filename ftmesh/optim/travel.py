"""Travel: what goes between ranks in an update: gradients to the owners of rows, updates back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ftmesh.collectives.gradients import Means
from ftmesh.collectives.owners import check_owned, gather_chunks, own_chunks, scatter_chunks
from ftmesh.errors import ArgumentError
from ftmesh.execute import _compat
from ftmesh.layout.owned_buckets import Owned, OwnedBucket
from ftmesh.optim.rank import Held
from ftmesh.planning.plan import Plan

Reduce = Literal["mean", "sum", "none"]


@dataclass(frozen=True, eq=False)
class Travel:
    """How gradients are added up on a plan, and what is made of them."""

    plan: Plan
    axis_name: Any
    wire_dtype: Any = None
    accumulate_dtype: Any = None
    reduce: Reduce = "mean"

    def __post_init__(self) -> None:
        check_owned(self.plan)
        if self.reduce not in ("mean", "sum", "none"):
            raise ArgumentError(f"reduce is 'mean', 'sum' or 'none', not {self.reduce!r}")

    def owned(self, tree: Any, layout: Owned) -> Held:
        """What a rank owns of arrays that all ranks have."""
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]

        def own(bucket: OwnedBucket) -> jax.Array:
            buffer = bucket.packing.pack(alike([leaves[i] for i in bucket.members]))
            buffer = _compat.as_varying(buffer, self.axis_name)
            return own_chunks(buffer, self.axis_name, self.plan.program).reshape(bucket.shape)

        return Held([own(b) for b in layout.buckets], {i: leaves[i] for i in layout.whole})

    def reduced(self, grads: Any, layout: Owned, tree: Any) -> Held:
        """What a rank owns of what is made of gradients; `tree` is the structure they must have."""
        if isinstance(grads, Means):
            if grads.owners == layout.fingerprint:
                held: Held = grads.tree
                return held
            if grads.owners:
                raise ArgumentError("these gradients are sharded for the owners of another plan")
            return self.owned(grads.tree, layout)
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(grads)]
        shapes = [leaf.shape for leaf in leaves]
        if jax.tree.structure(grads) != tree or shapes != [t.shape for t in layout.types]:
            raise ArgumentError("gradients must have the structure and shapes of the parameters")
        if self.reduce == "none" or self._are_the_same(leaves):
            return self.owned(grads, layout)
        leaves = [_compat.as_varying(leaf, self.axis_name) for leaf in leaves]
        made = [
            self.reduced_turn(layout, at, [leaves[i] for i in turn])
            for at, turn in enumerate(turns(layout))
        ]
        return held_of(made, layout)

    def reduced_turn(self, layout: Owned, at: int, given: list[Any]) -> list[jax.Array]:
        """The same of one turn: a bucket, or those that are in none. None stands for zeros."""
        types = [layout.types[i] for i in turns(layout)[at]]
        arrays = [
            _compat.as_varying(jnp.zeros(type_.shape, type_.dtype), self.axis_name)
            if array is None
            else array
            for array, type_ in zip(given, types, strict=True)
        ]
        if at == len(layout.buckets):
            reduce = self.plan.pmean if self.reduce == "mean" else self.plan.psum
            whole: list[jax.Array] = reduce(arrays, self.axis_name)
            return whole
        bucket = layout.buckets[at]
        mine = scatter_chunks(
            bucket.packing.pack(alike(arrays)),
            self.axis_name,
            plan=self.plan,
            mean=self.reduce == "mean",
            wire_dtype=self.wire_dtype,
            accumulate_dtype=self.accumulate_dtype,
        )
        return [mine.reshape(bucket.shape)]

    def slots(self, leaves: list[jax.Array], layout: Owned) -> list[list[jax.Array]]:
        """Arrays in place of what `reduced_turn` will make of the gradients of `leaves`."""
        made = []
        for bucket in layout.buckets:
            some = alike([leaves[i] for i in bucket.members])[0]
            zeros = jnp.zeros(bucket.shape, some.dtype)
            made.append([_compat.varying_as(_compat.as_varying(zeros, self.axis_name), some)])
        return [*made, [leaves[i] for i in layout.whole]]

    def gathered(self, held: Held, layout: Owned) -> list[jax.Array]:
        """The leaves of which every rank has its rows, the same at all."""
        leaves = dict(held.whole)
        for bucket, mine in zip(layout.buckets, held.rows, strict=True):
            chunks = _compat.as_varying(mine, self.axis_name)
            chunks = chunks.reshape(-1, *bucket.packing.shape[1:])
            buffer = gather_chunks(chunks, self.axis_name, plan=self.plan)
            leaves.update(zip(bucket.members, bucket.packing.unpack(buffer), strict=True))
        return [leaves[i] for i in range(len(layout.types))]

    def _are_the_same(self, leaves: list[jax.Array]) -> bool:
        """Whether gradients are typed as the same at all ranks: they have been summed already."""
        if not _compat.checks_varying() or not leaves:
            return False
        kinds = {self.axis_name in _compat.varying_axes(leaf) for leaf in leaves}
        if len(kinds) > 1:
            raise ArgumentError(
                f"some of these gradients differ along {self.axis_name!r} and others are the same "
                "everywhere, summed already: differentiate with respect to parameters that are "
                "all of one kind, as plan.value_and_grad does"
            )
        return kinds == {False}


def turns(layout: Owned) -> list[tuple[int, ...]]:
    """The leaves that travel together: those of each bucket, and last those in none."""
    return [*(bucket.members for bucket in layout.buckets), layout.whole]


def held_of(made: Sequence[list[jax.Array]], layout: Owned) -> Held:
    """What the turns have made."""
    *rows, few = made
    return Held([row for (row,) in rows], dict(zip(layout.whole, few, strict=True)))


def alike(arrays: list[jax.Array]) -> list[jax.Array]:
    """The same arrays, in one dtype for all of them."""
    dtype = jnp.result_type(*arrays)
    return [array.astype(dtype) for array in arrays]
