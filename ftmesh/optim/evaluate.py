"""Runs functions of full tensors on one rank's parts of them; the structure of a sharded state.

A state has the tree that optax gives it. In place of a tensor of the shape of a parameter it has
the array in which `ftmesh.layout.flat_shards` stores that tensor.
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

from ftmesh.errors import ArgumentError
from ftmesh.execute import _compat
from ftmesh.execute.types import PyTree
from ftmesh.layout.flat_shards import LeafLayout, TreeLayout, flatten_tensor, unflatten_tensor
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
    """The structure of a state, and how its tensors are stored."""

    tree: Any  # as optax builds it
    params: tuple[int | None, ...]  # for each leaf, the parameter whose shape it has, if one
    types: tuple[Any, ...]  # of all leaves, before sharding
    layout: TreeLayout  # of the parameters

    def stored(self, index: int) -> LeafLayout | None:
        """Return how leaf `index` is stored, if it is flat."""
        param = self.params[index]
        leaf = None if param is None else self.layout.leaves[param]
        return leaf if leaf is not None and leaf.kind == "flat" else None

    def leaves(self, state: Any) -> list[Any]:
        """Return the leaves of a state; raise ArgumentError if it has another tree."""
        tree = jax.tree.structure(state)
        if tree != self.tree:
            raise ArgumentError(
                "this state is that of another transformation or of other parameters: its tree is "
                f"{tree}, and this optimizer's is {self.tree}"
            )
        leaves: list[Any] = jax.tree.leaves(state)
        return leaves

    def check(self, state: Any, *, is_global: bool) -> None:
        """Raise ArgumentError unless the arrays of a state have the shapes that are stored.

        `is_global`: they are those of all ranks, not of one.
        """
        for i, leaf in enumerate(self.leaves(state)):
            stored, param, expected = self.stored(i), self.params[i], self.types[i].shape
            if stored is not None and is_global:
                expected = stored.global_shape
            elif param is not None and not is_global:
                expected = self.layout.leaves[param].stored_shape
            if np.shape(leaf) != expected:
                raise ArgumentError(
                    f"this state has an array of shape {np.shape(leaf)} where this optimizer "
                    f"stores {expected}: it is not sharded, or for another number of chips, other "
                    "specs or other parameters. Bring it into the parameters' shapes with "
                    "gather_state, if it is sharded, and then call shard_state of this optimizer"
                )

    def full_tensor(self, array: Any, index: int) -> Any:
        """Return flat leaf `index`, a global array of any number of ranks, in its full shape."""
        return unflatten_tensor(array, self.types[index].shape)

    def stored_array(self, tensor: Any, index: int) -> Any:
        """Return the inverse of `full_tensor`, for the number of ranks of the layout."""
        stored = self.stored(index)
        assert stored is not None
        return flatten_tensor(tensor, stored.global_shape)


def state_form(
    init: Callable[[Any], Any], layout: TreeLayout, types: Sequence[Any], tree: Any
) -> StateForm:
    """Find which leaves of the state that `init` returns belong to which parameter.

    `init` is traced with a length for each parameter that no other has, so a leaf of the state
    shows by its length which parameter it belongs to. A state that depends on the shapes of
    parameters in another way raises NotShardableError.
    """
    marked = [
        jax.ShapeDtypeStruct((*(1 for _ in t.shape[1:]), _FIRST_LENGTH + i), t.dtype)
        if i in layout.cut
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
    param_of = {marked[i].shape: i for i in layout.cut}
    params: list[int | None] = []
    for leaf, mark in zip(leaves, marked_leaves, strict=True):
        param = param_of.get(mark.shape)
        expected = leaf.shape if param is None else types[param].shape
        if leaf.shape != expected or (param is None and mark.shape != leaf.shape):
            raise NotShardableError(
                f"this optimizer cannot be sharded: it keeps a state of shape {leaf.shape}, which "
                "depends on the shape of a tensor and is not that shape"
            )
        params.append(param)
    return StateForm(state_tree, tuple(params), tuple(leaves), layout)


@dataclass(frozen=True, eq=False)
class ShardEvaluator:
    """Runs traced functions of pytrees on what one rank has of them.

    The value of a per-element node is a dictionary with an array for each leaf that needs it. That
    of a per-leaf node is a vector. Small vectors are summed over all ranks by `sum_over_ranks`,
    which is called once for all sums of a level.
    """

    layout: TreeLayout
    types: Sequence[Any]  # of full parameters
    rank: Any
    sum_over_ranks: Callable[[list[jax.Array]], list[jax.Array]]
    _graph: OpGraph = field(default_factory=OpGraph)
    _values: dict[Node, Any] = field(default_factory=dict)

    def input_tree(self, name: Hashable, own: Sequence[jax.Array]) -> list[Value]:
        """Return as values what this rank has of a pytree like the parameters."""
        arrays = {i: own[i] for i in self.layout.cut}
        elements = self._graph.node(Constant(name, arrays), kind=Kind.PER_ELEMENT)
        return [
            Value(elements, type_.shape, leaf)
            if leaf in self.layout.cut
            else self._input((name, leaf), own[leaf])
            for leaf, type_ in enumerate(self.types)
        ]

    def input_state(self, state: PyTree, form: StateForm) -> list[Value]:
        """Return the leaves of a state as values."""
        rows: list[dict[int, jax.Array]] = []  # one tensor of each parameter, to be one node
        places: list[tuple[int, int] | None] = []
        for array, param in zip(jax.tree.leaves(state), form.params, strict=True):
            if param is None:
                places.append(None)
                continue
            row = next((i for i, x in enumerate(rows) if param not in x), len(rows))
            if row == len(rows):
                rows.append({})
            rows[row][param] = jnp.reshape(array, self.layout.leaves[param].own_shape)
            places.append((row, param))
        nodes = [
            self._graph.node(Constant(("row", i), arrays), kind=Kind.PER_ELEMENT)
            for i, arrays in enumerate(rows)
        ]
        return [
            self._input(("state", i), array)
            if place is None
            else Value(nodes[place[0]], self.types[place[1]].shape, place[1])
            for i, (array, place) in enumerate(zip(jax.tree.leaves(state), places, strict=True))
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

    def output_tree(self, values: Sequence[Value], dtypes: Sequence[Any]) -> list[jax.Array]:
        """Return what this rank has of a pytree like the parameters, given its leaves."""
        return [
            self._own(value, leaf, dtype) if leaf in self.layout.cut else self._array(value)
            for leaf, (value, dtype) in enumerate(zip(values, dtypes, strict=True))
        ]

    def output_state(self, form: StateForm, values: Sequence[Value]) -> PyTree:
        """Return a state of that form, given a value for each leaf."""
        return form.tree.unflatten(
            self._array(value)
            if param is None
            else self._own(value, param, type_.dtype).reshape(
                self.layout.leaves[param].stored_shape
            )
            for value, param, type_ in zip(values, form.params, form.types, strict=True)
        )

    def _own(self, value: Value, leaf: int, dtype: Any) -> jax.Array:
        if value.leaf != leaf and not (value.leaf is None and value.is_uniform):
            raise NotShardableError(
                "this optimizer cannot be sharded: its result for one tensor is computed from "
                "another tensor, or from none"
            )
        own: jax.Array = self._elements(value.node, leaf).astype(dtype)
        return own

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
            shape = (len(self.layout.leaves),)
            return _apply(op, [jnp.broadcast_to(x, shape) for x in operands])
        return {
            leaf: _apply(op, [self._elements(x, leaf) for x in node.operands])
            for leaf in sorted(node.leaves)
        }

    def _elements(self, node: Node, leaf: int) -> Any:
        """Return the value of a node at every element that this rank has of a leaf."""
        x = self._values[node]
        if node.kind == Kind.PER_ELEMENT:
            return x[leaf]
        number = x[leaf] if node.kind == Kind.PER_LEAF else x
        return jnp.broadcast_to(number, self.layout.leaves[leaf].own_shape)

    def _local_sums(self, node: Node) -> jax.Array:
        """Sum this rank's elements of each leaf of the node's dtype; other leaves get 0."""
        elements, dtype = self._values[node.operands[0]], node.op.dtype
        sums = [
            self._sum(elements[i], i)
            if i in node.leaves and elements[i].dtype == dtype
            else jnp.zeros((), dtype)
            for i in range(len(self.layout.leaves))
        ]
        like = jnp.zeros((), dtype)
        for x in sums:
            like = _compat.varying_like(like, x)
        return jnp.stack([_compat.varying_like(x, like) for x in sums])

    def _sum(self, x: jax.Array, leaf: int) -> jax.Array:
        """Sum this rank's elements of a leaf, without padding."""
        layout = self.layout.leaves[leaf]
        if layout.kind == "flat" and layout.type.size % layout.num_ranks:
            is_real = lax.iota(np.int32, x.size) < layout.num_real(self.rank)
            x = jnp.where(is_real, x, jnp.zeros((), x.dtype))
        return jnp.sum(x)

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
            return {i: self._elements(node, i).astype(result.dtype) for i in sorted(leaves)}
        x = jnp.asarray(self._values[node], result.dtype)
        return x if result.kind == Kind.GLOBAL else jnp.broadcast_to(x, len(self.layout.leaves))


def _apply(op: Apply, operands: list[Any]) -> Any:
    """Run a primitive on operands that may vary over different axes."""
    operands = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in operands]
    for other in list(operands):
        operands = [_compat.varying_like(x, other) for x in operands]
    params = op.params if "sharding" not in op.params else {**op.params, "sharding": None}
    return op.primitive.bind(*operands, **params)
