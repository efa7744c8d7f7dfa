"""Runs functions of full tensors on one rank's parts of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.execute import _compat
from ftmesh.execute.types import PyTree
from ftmesh.layout.flat_shards import LeafLayout, StateForm, TreeLayout
from ftmesh.optim.op_graph import (
    Apply,
    BranchResult,
    Broadcast,
    Conditional,
    Constant,
    GatherLeaf,
    Kind,
    LeafSum,
    Node,
    NotShardableError,
    OpGraph,
    TakeLeaves,
    TakePart,
    TupleElement,
    Value,
    dependencies,
)


@dataclass(frozen=True, eq=False)
class ShardEvaluator:
    """Runs traced functions of pytrees on what one rank has of them.

    The value of a per-element node is a dictionary with an array for each leaf that needs it. That
    of a per-leaf node is a vector. Small vectors are summed over all ranks by `sum_over_ranks`,
    which is called once for all sums of a level. `gather` returns full tensors of given leaves from
    what ranks have of them, and `take_part` is its inverse for one leaf.
    """

    layout: TreeLayout
    types: Sequence[Any]  # of full parameters
    rank: Any
    sum_over_ranks: Callable[[list[jax.Array]], list[jax.Array]]
    gather: Callable[[list[jax.Array], list[LeafLayout]], list[jax.Array]]
    take_part: Callable[[jax.Array, LeafLayout], jax.Array]
    _graph: OpGraph = field(default_factory=OpGraph)
    _values: dict[Node, Any] = field(default_factory=dict)

    def input_tree(
        self, name: Hashable, own: Sequence[jax.Array], full: Sequence[Any] | None = None
    ) -> list[Value]:
        """Return as values what this rank has of a pytree like the parameters.

        `full` has the full tensors, if all ranks have them.
        """
        arrays = {i: own[i] for i in self.layout.cut}
        constant = Constant(name, arrays, full)
        elements = self._graph.node(constant, kind=Kind.PER_ELEMENT)
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
        is_uniform = value.size == 1
        node = self._graph.node(Constant(name, value.reshape(()) if is_uniform else value))
        return Value(node, value.shape, is_uniform=is_uniform)

    def run(self, jaxpr: Any, inputs: Sequence[Value]) -> list[Value]:
        """Compute a traced function."""
        values = self._graph.add(jaxpr, inputs)
        self._compute([value.node for value in values])
        return values

    def check_outputs(self, tree: Any, form: StateForm, updates: PyTree, state: PyTree) -> None:
        """Raise NotShardableError if types of updates or of a new state are not as they must be."""
        shapes = [type_.shape for type_ in self.types]
        if _tree_and_shapes(updates) != (tree, shapes):
            raise NotShardableError(
                "this optimizer cannot be sharded: its updates have another structure or other "
                "shapes than the parameters"
            )
        if _tree_and_shapes(state) != (form.tree, [x.shape for x in form.types]):
            raise NotShardableError(
                "this optimizer cannot be sharded: its update returns a state of another structure "
                "than its init. If it only observes updates, as optax.monitor, put it outside: "
                "optax.chain(plan.shard(...), optax.monitor(...))"
            )

    def output_tree(self, values: Sequence[Value], dtypes: Sequence[Any]) -> list[jax.Array]:
        """Return what this rank has of a pytree like the parameters, given its leaves."""
        return [
            self._own(value, leaf, dtype) if leaf in self.layout.cut else self._array(value)
            for leaf, (value, dtype) in enumerate(zip(values, dtypes, strict=True))
        ]

    def output_state(self, form: StateForm, values: Sequence[Value]) -> PyTree:
        """Return a state of that form, given a value for each leaf."""
        return form.tree.unflatten(
            lax.convert_element_type(self._array(value), type_.dtype)
            if param is None
            else self._own(value, param, type_.dtype).reshape(
                self.layout.leaves[param].stored_shape
            )
            for value, param, type_ in zip(values, form.params, form.types, strict=True)
        )

    def _own(self, value: Value, leaf: int, dtype: Any) -> jax.Array:
        if value.leaf != leaf and not (value.leaf is None and value.is_uniform):
            value = self._graph.take_part(value, value.shape, leaf)
            self._compute([value.node])
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
            self._gather_leaves([node for node in level if isinstance(node.op, GatherLeaf)])
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
            if len(op.leaves) == 1:
                number = lax.index_in_dim(operands[0], op.leaves[0], keepdims=False)
                return jnp.broadcast_to(number, op.shape)
            return operands[0][np.array(op.leaves)].reshape(op.shape)
        if isinstance(op, TakePart):
            layout = self._layout_of(op.leaf)
            return {op.leaf: self.take_part(operands[0].reshape(layout.type.shape), layout)}
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

    def _gather_leaves(self, nodes: Sequence[Node]) -> None:
        """Compute what needs full tensors, from tensors that all ranks have where that does."""
        gathered = {}
        for node in nodes:
            full = self._full_tensor(node.operands[0], node.op.leaf)
            if full is None:
                gathered[node] = self._elements(node.operands[0], node.op.leaf)
            else:
                self._values[node] = full.reshape(node.op.shape)
        layouts = [self._layout_of(node.op.leaf) for node in gathered]
        tensors = self.gather(list(gathered.values()), layouts) if gathered else []
        for node, tensor in zip(gathered, tensors, strict=True):
            self._values[node] = tensor.reshape(node.op.shape)

    def _full_tensor(self, node: Node, leaf: int) -> Any:
        """Return the full tensor of a leaf if it is computed from tensors that all ranks have."""
        op = node.op
        if node.kind != Kind.PER_ELEMENT:
            return self._values[node] if node.kind == Kind.GLOBAL else self._values[node][leaf]
        if isinstance(op, Constant):
            return None if op.full is None else jnp.asarray(op.full[leaf])
        if not isinstance(op, Apply):
            return None
        operands = [self._full_tensor(x, leaf) for x in node.operands]
        if any(x is None for x in operands):
            return None
        shape = self._layout_of(leaf).type.shape
        return _apply(op, [jnp.broadcast_to(x, shape) for x in operands])

    def _layout_of(self, leaf: int) -> LeafLayout:
        """Return the layout of a leaf that is gathered; raise NotShardableError if it cannot be."""
        layout = self.layout.leaves[leaf]
        if layout.kind == "local" or layout.is_split:
            raise NotShardableError(
                f"this optimizer needs full tensors, and one of shape {self.types[leaf].shape} is "
                "sharded itself (specs=): use an optimizer of elements and norms for it, with "
                "optax.multi_transform, or replicate the parameter"
            )
        return layout

    def _elements(self, node: Node, leaf: int) -> Any:
        """Return the value of a node at every element that this rank has of a leaf."""
        x = self._values[node]
        if node.kind == Kind.PER_ELEMENT:
            return x[leaf]
        number = lax.index_in_dim(x, leaf, keepdims=False) if node.kind == Kind.PER_LEAF else x
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
        if layout.kind == "flat" and layout.num_ranks * layout.part_size > layout.type.size:
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

        branches = [branch(i) for i in range(len(op.results[0].nodes))]
        return lax.switch(index, _varying_alike(branches) if _compat.checks_vma() else branches)

    def _branch_value(self, node: Node, result: BranchResult, leaves: frozenset[int]) -> Any:
        """Convert a branch's result to the form that all branches return."""
        if result.kind == Kind.PER_ELEMENT:
            return {i: self._elements(node, i).astype(result.dtype) for i in sorted(leaves)}
        x = jnp.asarray(self._values[node], result.dtype)
        return x if result.kind == Kind.GLOBAL else jnp.broadcast_to(x, len(self.layout.leaves))


def _varying_alike(branches: list[Callable[[], Any]]) -> list[Callable[[], Any]]:
    """Return branches whose results vary over all axes over which those of any vary."""
    types = [jax.tree.leaves(jax.eval_shape(run)) for run in branches]

    def alike(run: Callable[[], Any]) -> Any:
        leaves, tree = jax.tree.flatten(run())
        for others in types:
            leaves = [_compat.varying_like(x, y) for x, y in zip(leaves, others, strict=True)]
        return tree.unflatten(leaves)

    return [partial(alike, run) for run in branches]


def _apply(op: Apply, operands: list[Any]) -> Any:
    """Run a primitive on operands that may vary over different axes."""
    operands = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in operands]
    for other in list(operands):
        operands = [_compat.varying_like(x, other) for x in operands]
    params = op.params if "sharding" not in op.params else {**op.params, "sharding": None}
    return op.primitive.bind(*operands, **params)


def _tree_and_shapes(x: PyTree) -> tuple[Any, list[Any]]:
    leaves, tree = jax.tree.flatten(x)
    return tree, [leaf.shape for leaf in leaves]


def unusable(name: str) -> Callable[..., Any]:
    """Return a function in place of an extra argument that a sharded update cannot call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotShardableError(
            f"this optimizer calls its extra argument {name!r}, a function of the parameters, and "
            "a sharded update cannot run a loss: shard what computes the direction alone, as in "
            "optax.chain(plan.shard(optax.scale_by_lbfgs()), optax.scale_by_zoom_linesearch(15))"
        )

    return call
