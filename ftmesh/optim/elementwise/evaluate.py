"""On shards: the values of a graph's nodes, computed by a rank on its rows of every bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.execute import _compat
from ftmesh.layout.owned_buckets import Owned, Rows
from ftmesh.optim.elementwise.graph import (
    Bind,
    Choice,
    Given,
    Kind,
    Node,
    Part,
    Pick,
    Result,
    Spread,
    Total,
    Value,
    needed,
)

Sum = Callable[[list[jax.Array]], list[jax.Array]]  # over all ranks


class OnShards:
    """What nodes come to at one rank.

    Elements are a list of arrays, one for each bucket with a leaf that they are there for, and None
    for the others; the numbers of leaves are a vector of them.
    Sums over tensors are made by `total`, all of one level at once.
    """

    def __init__(self, layout: Owned, rows: Sequence[Rows], total: Sum) -> None:
        self.layout, self.rows, self.total = layout, rows, total
        self._known: dict[Node, Any] = {}

    def compute(self, outputs: Sequence[Node], region: int = 0) -> None:
        """Everything that `outputs` are made of, in one region."""
        nodes, _ = needed(outputs, region)
        for _, level in groupby(sorted(nodes, key=lambda n: n.level), key=lambda n: n.level):
            here = list(level)
            totals = [n for n in here if isinstance(n.op, Total) and n not in self._known]
            if totals:
                sums = self.total(
                    [self._sums(self._known[node.inputs[0]], node.op.dtype) for node in totals]
                )
                self._known.update(zip(totals, sums, strict=True))
            for node in here:
                if node not in self._known:
                    self._known[node] = self._value(node)

    def _value(self, node: Node) -> Any:
        op, inputs = node.op, [self._known[each] for each in node.inputs]
        if isinstance(op, Given):
            return op.value
        if isinstance(op, Part):
            return inputs[0][op.place]
        if isinstance(op, Spread):
            return jnp.broadcast_to(inputs[0], op.shape)
        if isinstance(op, Pick):
            return _picked(inputs[0], op)
        if isinstance(op, Choice):
            return self._chosen(op, inputs[0])
        assert isinstance(op, Bind)
        if node.kind == Kind.PLAIN:
            return _bound(op, inputs)
        kinds = [each.kind for each in node.inputs]
        if node.kind == Kind.NUMBER:
            shape = (len(self.layout.types),)
            return _bound(op, [jnp.broadcast_to(x, shape) for x in inputs])
        return [
            _bound(op, [self.elements(x, kind, at) for x, kind in zip(inputs, kinds, strict=True)])
            if not node.leaves.isdisjoint(bucket.members)
            else None
            for at, bucket in enumerate(self.layout.buckets)
        ]

    def elements(self, x: Any, kind: Kind, at: int) -> jax.Array:
        """A value at every place of a bucket."""
        if kind == Kind.ELEMENTS:
            made: jax.Array = x[at]
            return made
        if kind == Kind.NUMBER:
            return self.rows[at].spread(x[np.array(self.layout.buckets[at].members)])
        return jnp.broadcast_to(x, self.layout.buckets[at].shape)

    def _sums(self, elements: list[jax.Array | None], dtype: Any) -> jax.Array:
        """The sum of each leaf's elements that this rank has; zero for others."""
        every = jnp.zeros(len(self.layout.types), dtype)
        for bucket, rows, x in zip(self.layout.buckets, self.rows, elements, strict=True):
            if x is not None and x.dtype == dtype:
                sums = rows.sums(x)
                every = _compat.varying_as(every, sums).at[np.array(bucket.members)].set(sums)
        return every

    def _chosen(self, choice: Choice, index: jax.Array) -> Any:
        """The results of a conditional, from the branch that is taken."""

        def branch(at: int) -> Callable[[], Any]:
            def run() -> Any:
                inside = OnShards(self.layout, self.rows, self.total)
                inside._known = dict(self._known)
                nodes = [result.nodes[at] for result in choice.results]
                own = [node for node in nodes if node not in inside._known]
                if own:
                    inside.compute(own, own[0].region)
                return [
                    inside._as(node, result, leaves)
                    for node, result, leaves in zip(
                        nodes, choice.results, choice.leaves, strict=True
                    )
                ]

            return run

        return lax.switch(index, [branch(at) for at in range(len(choice.results[0].nodes))])

    def _as(self, node: Node, result: Result, leaves: frozenset[int]) -> Any:
        """What a node comes to, as the other branches of a conditional have it."""
        x = self._known[node]
        if result.kind == Kind.ELEMENTS:
            return [
                self.elements(x, node.kind, at).astype(result.dtype)
                if not leaves.isdisjoint(bucket.members)
                else None
                for at, bucket in enumerate(self.layout.buckets)
            ]
        x = jnp.asarray(x, result.dtype)
        return x if result.kind == Kind.PLAIN else jnp.broadcast_to(x, len(self.layout.types))

    # What comes out ---------------------------------------------------------------------------

    def plain(self, node: Node) -> Any:
        """A plain value that has been computed."""
        return self._known[node]

    def bucket(self, at: int, values: Sequence[Value], dtype: Any) -> jax.Array:
        """One bucket of elements, from the value that each of its members has there."""
        rows = self.rows[at]
        places: dict[Node, list[int]] = {}
        for place, value in enumerate(values):
            places.setdefault(value.node, []).append(place)
        made = None
        for node, members in places.items():
            x = self.elements(self._known[node], node.kind, at).astype(dtype)
            if made is None:
                made = x
                continue
            is_of = jnp.zeros(len(values), bool).at[np.array(members)].set(True)[rows.member]
            made = jnp.where(is_of[:, None], x, made)
        assert made is not None
        return made


def _picked(numbers: jax.Array, op: Pick) -> jax.Array:
    picked = numbers[np.array(op.leaves)]
    if len(op.leaves) == 1:
        return jnp.broadcast_to(picked.reshape(()), op.shape)
    return picked.reshape(op.shape)


def _bound(op: Bind, inputs: list[Any]) -> Any:
    """An operation on values that may vary over different axes."""
    inputs = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in inputs]
    for other in list(inputs):
        inputs = [_compat.varying_as(x, other) for x in inputs]
    params = op.params if "sharding" not in op.params else {**op.params, "sharding": None}
    return op.primitive.bind(*inputs, **params)
