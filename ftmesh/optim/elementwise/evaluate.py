"""Evaluates the nodes of a graph on one rank's rows of every bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.execute import _compat
from ftmesh.layout.owned_buckets import OwnedLayout, OwnedRows
from ftmesh.optim.elementwise.graph import (
    Apply,
    BranchResult,
    Broadcast,
    Conditional,
    Constant,
    Kind,
    LeafSum,
    Node,
    TakeLeaves,
    TupleElement,
    Value,
    dependencies,
)

SumOverRanks = Callable[[list[jax.Array]], list[jax.Array]]


class GraphEvaluator:
    """The values of nodes at one rank.

    A per-element node is a list with one array per bucket, or None where the bucket has no leaf
    that needs it. A per-leaf node is a vector. Sums over tensors call `sum_over_ranks`, once for
    all sums of a level.
    """

    def __init__(
        self, layout: OwnedLayout, rows: Sequence[OwnedRows], sum_over_ranks: SumOverRanks
    ) -> None:
        self.layout, self.rows, self.sum_over_ranks = layout, rows, sum_over_ranks
        self._values: dict[Node, Any] = {}

    def compute(self, outputs: Sequence[Node], region: int = 0) -> None:
        """Compute `outputs`, which are nodes of one region, and what they depend on there."""
        nodes, _ = dependencies(outputs, region)
        for _, group in groupby(sorted(nodes, key=lambda n: n.level), key=lambda n: n.level):
            level = [node for node in group if node not in self._values]
            leaf_sums = [node for node in level if isinstance(node.op, LeafSum)]
            if leaf_sums:
                sums = self.sum_over_ranks(
                    [
                        self._local_sums(self._values[node.operands[0]], node.op.dtype)
                        for node in leaf_sums
                    ]
                )
                self._values.update(zip(leaf_sums, sums, strict=True))
            for node in level:
                if node not in self._values:
                    self._values[node] = self._value(node)

    def value(self, node: Node) -> Any:
        """Return the value of a node that has been computed."""
        return self._values[node]

    def bucket(self, index: int, values: Sequence[Value], dtype: Any) -> jax.Array:
        """Return the rows of a bucket, given the value of each of its members."""
        rows = self.rows[index]
        members: dict[Node, list[int]] = {}
        for member, value in enumerate(values):
            members.setdefault(value.node, []).append(member)
        array = None
        for node, own in members.items():
            x = self._elements(self._values[node], node.kind, index).astype(dtype)
            if array is None:
                array = x
                continue
            is_own = jnp.zeros(len(values), bool).at[np.array(own)].set(True)[rows.member]
            array = jnp.where(is_own[:, None], x, array)
        assert array is not None
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
            return _take_leaves(operands[0], op)
        if isinstance(op, Conditional):
            return self._switch(op, operands[0])
        assert isinstance(op, Apply)
        if node.kind == Kind.GLOBAL:
            return _apply(op, operands)
        if node.kind == Kind.PER_LEAF:
            shape = (len(self.layout.types),)
            return _apply(op, [jnp.broadcast_to(x, shape) for x in operands])
        kinds = [x.kind for x in node.operands]
        return [
            _apply(
                op, [self._elements(x, kind, i) for x, kind in zip(operands, kinds, strict=True)]
            )
            if not node.leaves.isdisjoint(bucket.members)
            else None
            for i, bucket in enumerate(self.layout.buckets)
        ]

    def _elements(self, x: Any, kind: Kind, bucket: int) -> jax.Array:
        """Broadcast a value to every element of a bucket."""
        if kind == Kind.PER_ELEMENT:
            array: jax.Array = x[bucket]
            return array
        if kind == Kind.PER_LEAF:
            return self.rows[bucket].spread(x[np.array(self.layout.buckets[bucket].members)])
        return jnp.broadcast_to(x, self.layout.buckets[bucket].shape)

    def _local_sums(self, elements: list[jax.Array | None], dtype: Any) -> jax.Array:
        """Sum this rank's elements of each leaf of `dtype`; other leaves get 0."""
        totals = jnp.zeros(len(self.layout.types), dtype)
        for bucket, rows, x in zip(self.layout.buckets, self.rows, elements, strict=True):
            if x is not None and x.dtype == dtype:
                sums = rows.sums(x)
                totals = _compat.varying_like(totals, sums).at[np.array(bucket.members)].set(sums)
        return totals

    def _switch(self, op: Conditional, index: jax.Array) -> Any:
        def branch(number: int) -> Callable[[], Any]:
            def run() -> Any:
                inner = GraphEvaluator(self.layout, self.rows, self.sum_over_ranks)
                inner._values = dict(self._values)
                nodes = [result.nodes[number] for result in op.results]
                missing = [node for node in nodes if node not in inner._values]
                if missing:
                    inner.compute(missing, missing[0].region)
                return [
                    inner._branch_value(node, result, leaves)
                    for node, result, leaves in zip(nodes, op.results, op.leaves, strict=True)
                ]

            return run

        return lax.switch(index, [branch(i) for i in range(len(op.results[0].nodes))])

    def _branch_value(self, node: Node, result: BranchResult, leaves: frozenset[int]) -> Any:
        """Convert a branch's result to the form that all branches return."""
        x = self._values[node]
        if result.kind == Kind.PER_ELEMENT:
            return [
                self._elements(x, node.kind, i).astype(result.dtype)
                if not leaves.isdisjoint(bucket.members)
                else None
                for i, bucket in enumerate(self.layout.buckets)
            ]
        x = jnp.asarray(x, result.dtype)
        return x if result.kind == Kind.GLOBAL else jnp.broadcast_to(x, len(self.layout.types))


def _take_leaves(numbers: jax.Array, op: TakeLeaves) -> jax.Array:
    taken = numbers[np.array(op.leaves)]
    if len(op.leaves) == 1:
        return jnp.broadcast_to(taken.reshape(()), op.shape)
    return taken.reshape(op.shape)


def _apply(op: Apply, operands: list[Any]) -> Any:
    """Run a primitive on operands that may vary over different axes."""
    operands = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in operands]
    for other in list(operands):
        operands = [_compat.varying_like(x, other) for x in operands]
    params = op.params if "sharding" not in op.params else {**op.params, "sharding": None}
    return op.primitive.bind(*operands, **params)
