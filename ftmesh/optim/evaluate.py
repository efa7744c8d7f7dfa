"""Runs functions of full tensors on one rank's rows of them.

A sharded state has the structure that optax gives it, with a `Slot` in place of every tensor that
has the size of a parameter. All tensors of a kind, such as the first moments of all parameters,
share a row of arrays, one array per bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.execute import _compat
from ftmesh.layout.owned_buckets import OwnedLayout, OwnedRows, ShardedState, Slot
from ftmesh.optim.op_graph import (
    Apply,
    BranchResult,
    Broadcast,
    Conditional,
    Constant,
    Kind,
    LeafSum,
    Node,
    NotShardableError,
    OpGraph,
    TakeLeaves,
    TupleElement,
    Value,
    dependencies,
)

_FIRST_LENGTH = 1_000_003  # longer than the dimensions that an optimizer names itself


@dataclass(frozen=True, eq=False)
class StateForm:
    """The structure of a sharded state."""

    tree: Any  # as optax builds it
    leaves: tuple[Slot | Any, ...]  # slots, and the types of leaves that are not sharded
    dtypes: tuple[Any, ...]  # of the rows
    types: tuple[Any, ...]  # of all leaves, before sharding

    def buckets(self, layout: OwnedLayout, row: int) -> tuple[bool, ...]:
        """Return which buckets contain a slot of `row`."""
        leaves = {leaf.leaf for leaf in self.leaves if isinstance(leaf, Slot) and leaf.row == row}
        return tuple(not leaves.isdisjoint(bucket.members) for bucket in layout.buckets)


def state_form(
    init: Callable[[Any], Any], layout: OwnedLayout, types: Sequence[Any], tree: Any
) -> StateForm:
    """Find which leaves of the state that `init` returns belong to which parameter.

    `init` is traced with a length for each parameter that no other has, so a leaf of the state
    shows by its length which parameter it belongs to. A state that depends on the shapes of
    parameters in another way raises NotShardableError.
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


def dense_rows(state: ShardedState, layout: OwnedLayout) -> list[list[jax.Array]]:
    """Return the arrays of every row, with zeros for the buckets that have none."""
    return [
        [
            jnp.zeros(bucket.shape, dtype) if array is None else array
            for array, bucket in zip(row, layout.buckets, strict=True)
        ]
        for row in state.rows
        for dtype in [next(array.dtype for array in row if array is not None)]
    ]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OwnedTree:
    """What a rank has of a pytree."""

    rows: list[jax.Array]  # of every bucket
    replicated: dict[int, Any]  # the leaves that are in no bucket, by their position

    def dtypes(self, layout: OwnedLayout) -> dict[int, Any]:
        """Return the dtype of every leaf."""
        dtypes = {i: x.dtype for i, x in self.replicated.items()}
        for bucket, row in zip(layout.buckets, self.rows, strict=True):
            dtypes |= dict.fromkeys(bucket.members, row.dtype)
        return dtypes


@dataclass(frozen=True, eq=False)
class ShardEvaluator:
    """Runs traced functions of pytrees on what one rank has of them.

    The value of a per-element node is a list with one array per bucket, or None where the bucket
    has no leaf that needs it. That of a per-leaf node is a vector. Small vectors are summed over
    all ranks by `sum_over_ranks`, which is called once for all sums of a level.
    """

    layout: OwnedLayout
    types: Sequence[Any]  # of full parameters
    rows: Sequence[OwnedRows]  # of this rank, for every bucket
    sum_over_ranks: Callable[[list[jax.Array]], list[jax.Array]]
    _graph: OpGraph = field(default_factory=OpGraph)
    _values: dict[Node, Any] = field(default_factory=dict)

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
        """Compute a traced function; raise NotShardableError if it cannot run on shards."""
        values = self._graph.add(jaxpr, inputs)
        self._compute([value.node for value in values])
        return values

    def output_tree(self, values: Sequence[Value], dtypes: Sequence[Any]) -> OwnedTree:
        """Return a pytree like the parameters, given a value for each leaf."""
        rows = []
        for i, bucket in enumerate(self.layout.buckets):
            for leaf in bucket.members:
                _check_leaf(values[leaf], leaf)
            dtype = jnp.result_type(*(dtypes[leaf] for leaf in bucket.members))
            rows.append(self._bucket(i, [values[m] for m in bucket.members], dtype))
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
        self._compute([zero.node])
        rows = tuple(
            tuple(
                self._bucket(i, [row.get(m, zero) for m in bucket.members], dtype)
                if not row.keys().isdisjoint(bucket.members)
                else None
                for i, bucket in enumerate(self.layout.buckets)
            )
            for row, dtype in zip(members, form.dtypes, strict=True)
        )
        return ShardedState(form.tree.unflatten(inner), rows, self.layout.fingerprint)

    def _array(self, value: Value) -> jax.Array:
        node = self._graph.as_array(value)
        self._compute([node])
        return jnp.asarray(self._values[node])

    def _compute(self, outputs: Sequence[Node], region: int = 0) -> None:
        """Compute `outputs`, which are nodes of one region, and what they depend on there."""
        nodes, _ = dependencies(outputs, region)
        for _, group in groupby(sorted(nodes, key=lambda n: n.level), key=lambda n: n.level):
            level = [node for node in group if node not in self._values]
            leaf_sums = [node for node in level if isinstance(node.op, LeafSum)]
            if leaf_sums:
                sums = self.sum_over_ranks([self._local_sums(node) for node in leaf_sums])
                self._values.update(zip(leaf_sums, sums, strict=True))
            for node in level:
                if node not in self._values:
                    self._values[node] = self._value(node)

    def _bucket(self, index: int, values: Sequence[Value], dtype: Any) -> jax.Array:
        """Return the rows of a bucket, given the value of each of its members."""
        members: dict[Node, list[int]] = {}
        for member, value in enumerate(values):
            members.setdefault(value.node, []).append(member)
        (node, _), *others = members.items()
        array = self._elements(node, index).astype(dtype)
        for node, own in others:
            x = self._elements(node, index).astype(dtype)
            is_member = jnp.zeros(len(values), bool).at[np.array(own)].set(True)
            array = jnp.where(is_member[self.rows[index].member][:, None], x, array)
        return array

    def _value(self, node: Node) -> Any:
        op, operands = node.op, [self._values[x] for x in node.operands]
        if isinstance(op, Constant):
            return op.value
        if isinstance(op, TupleElement):
            return operands[0][op.index]
        if isinstance(op, Broadcast):
            return jnp.broadcast_to(operands[0], op.shape)
        if isinstance(op, TakeLeaves):
            taken = operands[0][np.array(op.leaves)]
            if len(op.leaves) == 1:
                return jnp.broadcast_to(taken.reshape(()), op.shape)
            return taken.reshape(op.shape)
        if isinstance(op, Conditional):
            return self._switch(op, operands[0])
        assert isinstance(op, Apply)
        if node.kind == Kind.GLOBAL:
            return _apply(op, operands)
        if node.kind == Kind.PER_LEAF:
            shape = (len(self.layout.types),)
            return _apply(op, [jnp.broadcast_to(x, shape) for x in operands])
        return [
            _apply(op, [self._elements(x, i) for x in node.operands])
            if not node.leaves.isdisjoint(bucket.members)
            else None
            for i, bucket in enumerate(self.layout.buckets)
        ]

    def _elements(self, node: Node, bucket: int) -> Any:
        """Return the value of a node at every element of a bucket."""
        x = self._values[node]
        if node.kind == Kind.PER_ELEMENT:
            return x[bucket]
        if node.kind == Kind.PER_LEAF:
            return self.rows[bucket].spread(x[np.array(self.layout.buckets[bucket].members)])
        return jnp.broadcast_to(x, self.layout.buckets[bucket].shape)

    def _local_sums(self, node: Node) -> jax.Array:
        """Sum this rank's elements of each leaf of the node's dtype; other leaves get 0."""
        elements, dtype = self._values[node.operands[0]], node.op.dtype
        totals = jnp.zeros(len(self.layout.types), dtype)
        for bucket, rows, x in zip(self.layout.buckets, self.rows, elements, strict=True):
            if x is not None and x.dtype == dtype:
                sums = rows.sums(x)
                totals = _compat.varying_like(totals, sums).at[np.array(bucket.members)].set(sums)
        return totals

    def _switch(self, op: Conditional, index: jax.Array) -> Any:
        def branch(number: int) -> Callable[[], Any]:
            def run() -> Any:
                inner = replace(self, _values=dict(self._values))
                nodes = [result.nodes[number] for result in op.results]
                missing = [node for node in nodes if node not in inner._values]
                if missing:
                    inner._compute(missing, missing[0].region)
                return [
                    inner._branch_value(node, result, leaves)
                    for node, result, leaves in zip(nodes, op.results, op.leaves, strict=True)
                ]

            return run

        return lax.switch(index, [branch(i) for i in range(len(op.results[0].nodes))])

    def _branch_value(self, node: Node, result: BranchResult, leaves: frozenset[int]) -> Any:
        """Convert a branch's result to the form that all branches return."""
        if result.kind == Kind.PER_ELEMENT:
            return [
                self._elements(node, i).astype(result.dtype)
                if not leaves.isdisjoint(bucket.members)
                else None
                for i, bucket in enumerate(self.layout.buckets)
            ]
        x = jnp.asarray(self._values[node], result.dtype)
        return x if result.kind == Kind.GLOBAL else jnp.broadcast_to(x, len(self.layout.types))


def _apply(op: Apply, operands: list[Any]) -> Any:
    """Run a primitive on operands that may vary over different axes."""
    operands = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in operands]
    for other in list(operands):
        operands = [_compat.varying_like(x, other) for x in operands]
    params = op.params if "sharding" not in op.params else {**op.params, "sharding": None}
    return op.primitive.bind(*operands, **params)


def _check_leaf(value: Value, leaf: int) -> None:
    if value.leaf != leaf and not (value.leaf is None and value.is_uniform):
        raise NotShardableError(
            "this optimizer cannot be sharded: its result for one tensor is computed from another "
            "tensor, or from none"
        )
