"""Rank: one rank's rows of parameters, gradients and states, and what is computed on them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ftmesh.layout.owned_buckets import Owned, Rows
from ftmesh.optim.leafwise import Leafwise, NotShardableError
from ftmesh.optim.on_shards import OnShards, Sum
from ftmesh.optim.states import ShardedState, Slot, StateForm, rows_of
from ftmesh.optim.values import Given, Graph, Kind, Value


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Held:
    """What a rank has of a pytree: its rows of every bucket, and the leaves that are in none."""

    rows: list[jax.Array]
    whole: dict[int, Any]


class Rank:
    """A traced function of pytrees, computed on what one rank has of them."""

    def __init__(
        self, layout: Owned, types: Sequence[Any], rows: Sequence[Rows], total: Sum
    ) -> None:
        self.layout = layout
        self.types = types  # of whole tensors
        self._graph = Graph()
        self._on_shards = OnShards(layout, rows, total)

    def given(self, name: Hashable, held: Held) -> list[Value]:
        """The leaves of a pytree."""
        elements = self._graph.node(Given(name, held.rows), kind=Kind.ELEMENTS)
        return [
            Value(elements, type_.shape, leaf)
            if leaf in self.layout.home
            else self._plain((name, leaf), held.whole[leaf])
            for leaf, type_ in enumerate(self.types)
        ]

    def given_state(self, state: ShardedState, form: StateForm) -> list[Value]:
        """Those of a state."""
        rows = [
            self._graph.node(Given(("row", at), arrays), kind=Kind.ELEMENTS)
            for at, arrays in enumerate(rows_of(state, self.layout))
        ]
        plain = iter(jax.tree.leaves(state.inner))
        return [
            Value(rows[leaf.row], self.types[leaf.leaf].shape, leaf.leaf)
            if isinstance(leaf, Slot)
            else self._plain(("state", at), next(plain))
            for at, leaf in enumerate(form.leaves)
        ]

    def _plain(self, name: Hashable, value: Any) -> Value:
        value = jnp.asarray(value)
        return Value(self._graph.node(Given(name, value)), value.shape, is_uniform=not value.shape)

    def results(self, traced: Any, inputs: Sequence[Value]) -> list[Value]:
        """What a traced function makes of values; see `leafwise` for those that are refused."""
        values = Leafwise(self._graph).results(traced, inputs)
        self._on_shards.compute([value.node for value in values])
        return values

    def held(self, values: Sequence[Value], dtypes: Sequence[Any]) -> Held:
        """A pytree like the parameters, of values for its leaves."""
        rows = []
        for at, bucket in enumerate(self.layout.buckets):
            for leaf in bucket.members:
                self._check(values[leaf], leaf)
            dtype = jnp.result_type(*(dtypes[leaf] for leaf in bucket.members))
            rows.append(self._on_shards.bucket(at, [values[i] for i in bucket.members], dtype))
        return Held(rows, {i: self._whole(values[i]) for i in self.layout.whole})

    def state(self, form: StateForm, values: Sequence[Value]) -> ShardedState:
        """A state of that form, of values for its leaves."""
        found: list[dict[int, Value]] = [{} for _ in form.dtypes]
        inner: list[Any] = []
        for leaf, value in zip(form.leaves, values, strict=True):
            if isinstance(leaf, Slot):
                self._check(value, leaf.leaf)
                found[leaf.row][leaf.leaf] = value
                inner.append(leaf)
            else:
                inner.append(self._whole(value))
        zero = self._graph.constant(0.0, jax.typeof(jnp.float32(0)))
        self._on_shards.compute([zero.node])
        rows = tuple(
            tuple(
                self._on_shards.bucket(at, [row.get(i, zero) for i in bucket.members], dtype)
                if not row.keys().isdisjoint(bucket.members)
                else None
                for at, bucket in enumerate(self.layout.buckets)
            )
            for row, dtype in zip(found, form.dtypes, strict=True)
        )
        return ShardedState(form.tree.unflatten(inner), rows, self.layout.fingerprint)

    def _whole(self, value: Value) -> Any:
        node = self._graph.whole(value)
        self._on_shards.compute([node])
        return jnp.asarray(self._on_shards.plain(node))

    def _check(self, value: Value, leaf: int) -> None:
        """Refuses a value that is not one for the elements of a leaf."""
        if value.leaf != leaf and not (value.leaf is None and value.is_uniform):
            raise NotShardableError(
                "this optimizer cannot be sharded: what it makes for one tensor is of another, or "
                "of none"
            )
