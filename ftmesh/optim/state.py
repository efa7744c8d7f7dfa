"""Rank: one rank's rows of parameters, gradients and states, and what is computed on them.

States: which tensors of an optimizer's state are sharded, and in which arrays they lie.

A state has the structure that optax gives it, with a `Slot` in place of every tensor that is as
large as a leaf of the parameters. What belongs there is in an array for each bucket; all tensors of
a kind, such as the first moments of all leaves, share one such row of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from ftmesh.layout.owned_buckets import Owned, Rows
from ftmesh.optim.elementwise.evaluate import OnShards, Sum
from ftmesh.optim.elementwise.graph import Given, Graph, Kind, Value
from ftmesh.optim.elementwise.trace import Leafwise, NotShardableError


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


_NO_SIZE = 1_000_003  # nothing is so long


@jax.tree_util.register_static
@dataclass(frozen=True)
class Slot:
    """In place of a tensor: the one of leaf `leaf` in row `row` of arrays."""

    row: int
    leaf: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShardedState:
    """A state as optax makes it, with slots, and for each row of them an array per bucket.

    A bucket in which a row has no slot has none. `owners` is a mark of who owns what.
    """

    inner: Any
    rows: tuple[tuple[jax.Array | None, ...], ...]
    owners: str = field(metadata={"static": True})


@dataclass(frozen=True, eq=False)
class StateForm:
    """The form of a state: its tree, and for each of its leaves a slot or the type."""

    tree: Any
    leaves: tuple[Slot | Any, ...]
    dtypes: tuple[Any, ...]  # of each row
    types: tuple[Any, ...]  # of whole leaves

    def buckets(self, layout: Owned, row: int) -> tuple[bool, ...]:
        """In which buckets a row has slots."""
        found = {leaf.leaf for leaf in self.leaves if isinstance(leaf, Slot) and leaf.row == row}
        return tuple(not found.isdisjoint(bucket.members) for bucket in layout.buckets)


def form_of(
    init: Callable[[Any], Any], layout: Owned, types: Sequence[Any], tree: Any
) -> StateForm:
    """The form of the state that `init` makes for parameters of such `types` that lie so.

    Tensors tell by their length which leaf they belong to, if every leaf has one of its own.
    """
    marked = [
        jax.ShapeDtypeStruct((*(1 for _ in t.shape[1:]), _NO_SIZE + i), t.dtype)
        if i in layout.home
        else t
        for i, t in enumerate(types)
    ]
    whole, state_tree = jax.tree.flatten(jax.eval_shape(init, tree.unflatten(types)))
    told, other_tree = jax.tree.flatten(jax.eval_shape(init, tree.unflatten(marked)))
    if state_tree != other_tree:
        raise NotShardableError(
            "this optimizer cannot be sharded: the form of its state depends on the size of a "
            "tensor. Give masks as pytrees of booleans, or as functions of names or of the number "
            "of dimensions"
        )
    leaf_of = {marked[i].shape: i for i in layout.home}
    rows: dict[tuple[int, Any], int] = {}
    counts: dict[tuple[int, Any], int] = {}
    leaves: list[Any] = []
    for found, mark in zip(whole, told, strict=True):
        leaf = leaf_of.get(mark.shape)
        expected = found.shape if leaf is None else types[leaf].shape
        if found.shape != expected or (leaf is None and mark.shape != found.shape):
            raise NotShardableError(
                f"this optimizer cannot be sharded: it keeps a state of shape {found.shape}, which "
                "is not that of a tensor, and depends on one"
            )
        if leaf is None:
            leaves.append(found)
            continue
        kind = (leaf, found.dtype)
        counts[kind] = counts.get(kind, -1) + 1
        leaves.append(Slot(rows.setdefault((counts[kind], found.dtype), len(rows)), leaf))
    return StateForm(state_tree, tuple(leaves), tuple(dtype for _, dtype in rows), tuple(whole))


def rows_of(state: ShardedState, layout: Owned) -> list[list[jax.Array]]:
    """The arrays of every row, with zeros for buckets in which it has no slot."""
    return [
        [
            jnp.zeros(bucket.shape, _dtype(row)) if array is None else array
            for array, bucket in zip(row, layout.buckets, strict=True)
        ]
        for row in state.rows
    ]


def _dtype(row: Sequence[jax.Array | None]) -> Any:
    return next(array.dtype for array in row if array is not None)
