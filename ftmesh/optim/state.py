"""One rank's rows of parameters, gradients and optimizer states, and computing with them.

A sharded state has the structure that optax gives it, with a `Slot` in place of every tensor that
has the size of a parameter. All tensors of a kind, such as the first moments of all parameters,
share a row of arrays, one array per bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ftmesh.execute.types import PyTree
from ftmesh.layout.owned_buckets import OwnedLayout, OwnedRows, ShardedState, Slot
from ftmesh.optim.elementwise.evaluate import GraphEvaluator, SumOverRanks
from ftmesh.optim.elementwise.graph import Constant, Kind, OpGraph, Value
from ftmesh.optim.elementwise.trace import GraphBuilder, NotShardableError


@dataclass(frozen=True, eq=False)
class StateForm:
    """The structure of a sharded state.

    Attributes:
        tree: The tree of the state as optax builds it.
        leaves: For each of its leaves a `Slot`, or the type of a leaf that is not sharded.
        dtypes: The dtype of each row.
        types: The types of all leaves, before sharding.
    """

    tree: Any
    leaves: tuple[Slot | Any, ...]
    dtypes: tuple[Any, ...]
    types: tuple[Any, ...]

    def buckets(self, layout: OwnedLayout, row: int) -> tuple[bool, ...]:
        """Return which buckets contain a slot of `row`."""
        leaves = {leaf.leaf for leaf in self.leaves if isinstance(leaf, Slot) and leaf.row == row}
        return tuple(not leaves.isdisjoint(bucket.members) for bucket in layout.buckets)


def state_form(
    init: Callable[[Any], Any], layout: OwnedLayout, types: Sequence[Any], tree: Any
) -> StateForm:
    """Find which leaves of the state that `init` returns belong to which parameter.

    `init` is traced with a length for each parameter that no other has, so a leaf of the state
    shows by its length which parameter it belongs to.

    Raises:
        NotShardableError: The state depends on the shapes of parameters in another way.
    """
    marked = [
        jax.ShapeDtypeStruct((*(1 for _ in t.shape[1:]), _FIRST_LENGTH + i), t.dtype)
        if i in layout.location
        else t
        for i, t in enumerate(types)
    ]
    leaves, state_tree = jax.tree.flatten(jax.eval_shape(init, tree.unflatten(types)))
    marked_leaves, marked_tree = jax.tree.flatten(jax.eval_shape(init, tree.unflatten(marked)))
    if state_tree != marked_tree:
        raise NotShardableError(
            "this optimizer cannot be sharded: the structure of its state depends on the size of "
            "a tensor. Give masks as pytrees of booleans, or as functions of names or of the "
            "number of dimensions"
        )
    param_of = {marked[i].shape: i for i in layout.location}
    rows: dict[tuple[int, Any], int] = {}
    counts: dict[tuple[int, Any], int] = {}
    slots: list[Any] = []
    for leaf, mark in zip(leaves, marked_leaves, strict=True):
        param = param_of.get(mark.shape)
        expected = leaf.shape if param is None else types[param].shape
        if leaf.shape != expected or (param is None and mark.shape != leaf.shape):
            raise NotShardableError(
                f"this optimizer cannot be sharded: it keeps a state of shape {leaf.shape}, which "
                "depends on the shape of a tensor and is not that shape"
            )
        if param is None:
            slots.append(leaf)
            continue
        kind = (param, leaf.dtype)
        counts[kind] = counts.get(kind, -1) + 1
        slots.append(Slot(rows.setdefault((counts[kind], leaf.dtype), len(rows)), param))
    return StateForm(state_tree, tuple(slots), tuple(dtype for _, dtype in rows), tuple(leaves))


_FIRST_LENGTH = 1_000_003  # longer than the dimensions that an optimizer names itself


def dense_rows(state: ShardedState, layout: OwnedLayout) -> list[list[jax.Array]]:
    """Return the arrays of every row, with zeros for the buckets that have none."""
    return [
        [
            jnp.zeros(bucket.shape, _row_dtype(row)) if array is None else array
            for array, bucket in zip(row, layout.buckets, strict=True)
        ]
        for row in state.rows
    ]


def _row_dtype(row: Sequence[jax.Array | None]) -> Any:
    return next(array.dtype for array in row if array is not None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OwnedTree:
    """What a rank has of a pytree.

    Attributes:
        rows: Its rows of every bucket.
        replicated: The leaves that are in no bucket, by their position.
    """

    rows: list[jax.Array]
    replicated: dict[int, Any]

    def dtypes(self, layout: OwnedLayout) -> dict[int, Any]:
        """Return the dtype of every leaf."""
        dtypes = {i: x.dtype for i, x in self.replicated.items()}
        for bucket, row in zip(layout.buckets, self.rows, strict=True):
            dtypes |= dict.fromkeys(bucket.members, row.dtype)
        return dtypes


class ShardEvaluator:
    """Runs traced functions of pytrees on what one rank has of them.

    Args:
        layout: Where the leaves of the parameters are stored.
        types: The types of full parameters.
        rows: This rank's rows of every bucket.
        sum_over_ranks: Sums a list of small vectors over all ranks.
    """

    def __init__(
        self,
        layout: OwnedLayout,
        types: Sequence[Any],
        rows: Sequence[OwnedRows],
        sum_over_ranks: SumOverRanks,
    ) -> None:
        self.layout = layout
        self.types = types
        self._graph = OpGraph()
        self._evaluator = GraphEvaluator(layout, rows, sum_over_ranks)

    def input_tree(self, name: Hashable, tree: OwnedTree) -> list[Value]:
        """Return the leaves of a pytree like the parameters as values."""
        elements = self._graph.node(Constant(name, tree.rows), kind=Kind.PER_ELEMENT)
        return [
            Value(elements, type_.shape, leaf)
            if leaf in self.layout.location
            else self._input((name, leaf), tree.replicated[leaf])
            for leaf, type_ in enumerate(self.types)
        ]

    def input_state(self, state: ShardedState, form: StateForm) -> list[Value]:
        """Return the leaves of a state as values."""
        rows = [
            self._graph.node(Constant(("row", i), arrays), kind=Kind.PER_ELEMENT)
            for i, arrays in enumerate(dense_rows(state, self.layout))
        ]
        replicated = iter(jax.tree.leaves(state.inner))
        return [
            Value(rows[leaf.row], self.types[leaf.leaf].shape, leaf.leaf)
            if isinstance(leaf, Slot)
            else self._input(("state", i), next(replicated))
            for i, leaf in enumerate(form.leaves)
        ]

    def _input(self, name: Hashable, value: Any) -> Value:
        value = jnp.asarray(value)
        node = self._graph.node(Constant(name, value))
        return Value(node, value.shape, is_uniform=not value.shape)

    def run(self, jaxpr: Any, inputs: Sequence[Value]) -> list[Value]:
        """Compute a traced function.

        Raises:
            NotShardableError: It cannot be computed on shards; see `elementwise.trace`.
        """
        values = GraphBuilder(self._graph).add(jaxpr, inputs)
        self._evaluator.compute([value.node for value in values])
        return values

    def output_tree(self, values: Sequence[Value], dtypes: Sequence[Any]) -> OwnedTree:
        """Return a pytree like the parameters, given a value for each leaf."""
        rows = []
        for i, bucket in enumerate(self.layout.buckets):
            for leaf in bucket.members:
                _check_leaf(values[leaf], leaf)
            dtype = jnp.result_type(*(dtypes[leaf] for leaf in bucket.members))
            rows.append(self._evaluator.bucket(i, [values[m] for m in bucket.members], dtype))
        return OwnedTree(rows, {i: self._array(values[i]) for i in self.layout.replicated})

    def output_state(self, form: StateForm, values: Sequence[Value]) -> ShardedState:
        """Return a state of that form, given a value for each leaf."""
        members: list[dict[int, Value]] = [{} for _ in form.dtypes]
        inner: list[Any] = []
        for leaf, value in zip(form.leaves, values, strict=True):
            if isinstance(leaf, Slot):
                _check_leaf(value, leaf.leaf)
                members[leaf.row][leaf.leaf] = value
                inner.append(leaf)
            else:
                inner.append(self._array(value))
        zero = self._graph.constant(0.0, jax.typeof(jnp.float32(0)))
        self._evaluator.compute([zero.node])
        rows = tuple(
            tuple(
                self._evaluator.bucket(i, [row.get(m, zero) for m in bucket.members], dtype)
                if not row.keys().isdisjoint(bucket.members)
                else None
                for i, bucket in enumerate(self.layout.buckets)
            )
            for row, dtype in zip(members, form.dtypes, strict=True)
        )
        return ShardedState(form.tree.unflatten(inner), rows, self.layout.fingerprint)

    def _array(self, value: Value) -> PyTree:
        node = self._graph.as_array(value)
        self._evaluator.compute([node])
        return jnp.asarray(self._evaluator.value(node))


def _check_leaf(value: Value, leaf: int) -> None:
    if value.leaf != leaf and not (value.leaf is None and value.is_uniform):
        raise NotShardableError(
            "this optimizer cannot be sharded: its result for one tensor is computed from another "
            "tensor, or from none"
        )
