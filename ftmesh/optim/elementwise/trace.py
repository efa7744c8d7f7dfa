"""Builds the graph of a traced optimizer, or raises if it cannot run on shards of tensors.

It can if it treats every element of a tensor alike and needs of a whole tensor nothing but sums
over all of its elements, as norms do. The traced function decides, not its name: a sort, or a
random number per element, is found wherever it is called. Tracing uses the shapes of full tensors,
so that what depends on shapes is right on shards too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from ftmesh.errors import ArgumentError
from ftmesh.layout.element_order import Shape
from ftmesh.optim.elementwise.graph import (
    Apply,
    BranchResult,
    Conditional,
    Kind,
    LeafSum,
    Node,
    OpGraph,
    TakeLeaves,
    TupleElement,
    Value,
    dependencies,
)

# Primitives whose result at a position depends on the operands at that position alone.
_NAMES = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp complex conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor
    ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter
    not or pow real reduce_precision rem round rsqrt select_n sign sin sinh sqrt square
    stop_gradient sub tan tanh xor
"""
_ELEMENTWISE = frozenset(_NAMES.split())
_SHAPE_ONLY = {"broadcast_in_dim", "reshape", "squeeze"}
_IDENTITIES = {"optimization_barrier", "reshard", "sharding_constraint"}
_CALLS = {"checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit"}


class NotShardableError(ArgumentError):
    """An optimizer needs more of a tensor than a shard of it can give."""


class GraphBuilder:
    """Adds the equations of jaxprs to a graph."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph

    def add(self, closed_jaxpr: Any, inputs: Sequence[Value]) -> list[Value]:
        """Add a traced function and return its results.

        Raises:
            NotShardableError: The function cannot be computed on shards.
        """
        jaxpr = getattr(closed_jaxpr, "jaxpr", closed_jaxpr)
        values: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, getattr(closed_jaxpr, "consts", ()), strict=True):
            values[var] = self.graph.constant(const, var.aval)

        def read(var: Any) -> Value:
            return (
                self.graph.constant(var.val, var.aval) if isinstance(var, Literal) else values[var]
            )

        for eqn in jaxpr.eqns:
            outputs = self._equation(eqn, [read(var) for var in eqn.invars])
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _equation(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        name, params = eqn.primitive.name, eqn.params
        if name in _CALLS:
            inner = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
            return self.add(inner, inputs)
        if name in _IDENTITIES:
            return inputs
        shape = eqn.outvars[0].aval.shape if eqn.outvars else ()
        x = inputs[0] if inputs else None
        if name in _SHAPE_ONLY and x is not None and x.is_uniform:
            return [Value(x.node, shape, x.leaf, is_uniform=True)]
        if name in _ELEMENTWISE:
            return [self._elementwise(eqn, inputs, shape)]
        if x is not None and name == "reduce_sum" and x.node.kind == Kind.PER_ELEMENT and not shape:
            op = LeafSum(eqn.invars[0].aval.dtype)
            node = self.graph.node(op, [x.node], Kind.PER_LEAF, x.leaf)
            return [Value(node, (), x.leaf, is_uniform=True)]
        if name == "cond" and any(x.leaf is not None for x in inputs):
            return self._cond(eqn, inputs)
        return self._global(eqn, inputs)

    def _elementwise(self, eqn: Any, inputs: list[Value], shape: Shape) -> Value:
        name = eqn.primitive.name
        inputs = self._detach_other_leaves(name, inputs)
        leaves = {x.leaf for x in inputs} - {None}
        kind = max(x.node.kind for x in inputs)
        if len(leaves) > 1:
            raise NotShardableError(
                f"this optimizer cannot be sharded: its {name!r} combines elements of several "
                "tensors, and a chip owns different parts of each"
            )
        params = {key: value for key, value in eqn.params.items() if key != "sharding"}
        op = Apply((name, str(sorted(params.items(), key=str))), eqn.primitive, eqn.params)
        is_uniform = all(x.is_uniform for x in inputs)
        if kind == Kind.GLOBAL and not is_uniform:
            return Value(self.graph.node(op, map(self.graph.as_array, inputs)), shape)
        if any(x.leaf is None and not x.is_uniform for x in inputs):
            raise NotShardableError(
                f"this optimizer cannot be sharded: its {name!r} takes an array that varies from "
                "element to element, such as random numbers, and is not sharded like the tensors"
            )
        leaf = next(iter(leaves), None)
        node = self.graph.node(op, [x.node for x in inputs], kind, leaf)
        return Value(node, shape, leaf, is_uniform)

    def _detach_other_leaves(self, name: str, inputs: list[Value]) -> list[Value]:
        """Turn numbers of other leaves into global scalars where several leaves meet.

        This happens in a running sum over the norms of all leaves.
        """
        main = {x.leaf for x in inputs if x.node.kind == Kind.PER_ELEMENT}
        is_sum = name == "add" and any(x.leaf is None and x.node.mixes_leaves for x in inputs)
        if not main and not is_sum and len({x.leaf for x in inputs} - {None}) < 2:
            return inputs
        return [
            _detach(self.graph, x) if x.node.kind == Kind.PER_LEAF and x.leaf not in main else x
            for x in inputs
        ]

    def _global(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        """Add any other operation, on values that belong to no leaf or on one number per leaf."""
        name = eqn.primitive.name
        if any(x.node.kind == Kind.PER_ELEMENT for x in inputs):
            raise NotShardableError(
                f"this optimizer cannot be sharded: its {name!r} needs more of a tensor than one "
                "element or the sum of all, and a chip has only its shard of the tensor; use it "
                "without Plan.shard"
            )
        shapes = [var.aval.shape for var in eqn.outvars]
        if name == "concatenate" and _is_one_number_per_leaf(inputs):
            leaves = tuple(x.leaf for x in inputs if x.leaf is not None)
            node = self.graph.node(TakeLeaves(leaves, shapes[0]), [inputs[0].node])
            return [Value(node, shapes[0])]
        op = Apply(("id", id(eqn)), eqn.primitive, eqn.params)
        node = self.graph.node(op, map(self.graph.as_array, inputs))
        nodes = [node]
        if eqn.primitive.multiple_results:
            nodes = [self.graph.node(TupleElement(i), [node]) for i in range(len(shapes))]
        return [
            Value(node, shape, is_uniform=not shape)
            for node, shape in zip(nodes, shapes, strict=True)
        ]

    def _cond(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        index, *operands = inputs
        if index.leaf is not None:
            raise NotShardableError(
                "this optimizer cannot be sharded: one of its conditions depends on the values of "
                "one tensor"
            )
        branches = []
        for jaxpr in eqn.params["branches"]:
            with self.graph.new_region() as region:
                branches.append((region, self.add(jaxpr, operands)))
        results: list[BranchResult] = []
        outputs: list[tuple[Shape, int | None, bool]] = []
        for i, var in enumerate(eqn.outvars):
            values = [values[i] for _, values in branches]
            kind = max(x.node.kind for x in values)
            is_uniform = all(x.is_uniform for x in values)
            if kind == Kind.GLOBAL and not is_uniform:
                nodes = tuple(self._array_in(region, values[i]) for region, values in branches)
            else:
                _check_branches(values)
                nodes = tuple(x.node for x in values)
            leaf = next((x.leaf for x in values if x.leaf is not None), None)
            results.append(BranchResult(nodes, kind, var.aval.dtype))
            outputs.append((var.aval.shape, leaf, is_uniform))
        return self._conditional(index, [region for region, _ in branches], results, outputs)

    def _conditional(
        self,
        index: Value,
        regions: list[int],
        results: list[BranchResult],
        outputs: list[tuple[Shape, int | None, bool]],
    ) -> list[Value]:
        """Add the node of a conditional, with equal results of several leaves merged."""
        leaves: dict[BranchResult, set[int]] = {result: set() for result in results}
        for result, (_, leaf, _) in zip(results, outputs, strict=True):
            leaves[result] |= set() if leaf is None else {leaf}
        operands = [index.node]
        for i, region in enumerate(regions):
            operands += dependencies([result.nodes[i] for result in leaves], region)[1]
        op = Conditional(tuple(leaves), tuple(map(frozenset, leaves.values())))
        node = self.graph.node(op, operands)
        positions = {result: i for i, result in enumerate(leaves)}
        values = []
        for result, (shape, leaf, is_uniform) in zip(results, outputs, strict=True):
            element = TupleElement(positions[result])
            output = self.graph.node(element, [node], result.kind, leaf)
            values.append(Value(output, shape, leaf, is_uniform))
        return values

    def _array_in(self, region: int, value: Value) -> Node:
        with self.graph.in_region(region):
            return self.graph.as_array(value)


def _check_branches(values: list[Value]) -> None:
    if len({x.leaf for x in values} - {None}) > 1 or any(
        x.leaf is None and not x.is_uniform for x in values
    ):
        raise NotShardableError(
            "this optimizer cannot be sharded: the branches of one of its conditionals return "
            "different tensors"
        )


def _detach(graph: OpGraph, x: Value) -> Value:
    if x.leaf is None:
        return x
    return Value(graph.node(TakeLeaves((x.leaf,), ()), [x.node]), x.shape, is_uniform=True)


def _is_one_number_per_leaf(inputs: list[Value]) -> bool:
    return len({x.node for x in inputs}) == 1 and all(
        x.node.kind == Kind.PER_LEAF and math.prod(x.shape) == 1 for x in inputs
    )
