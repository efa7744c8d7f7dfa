"""Leafwise: whether, and how, a function of whole tensors can be computed on shards of them.

It can be if it does the same to every element of a tensor, whatever the element's place, and takes
of a whole tensor nothing else but sums over all of it, as norms do. That is read from the traced
function, not from its name: a sort or a random number for each element is found wherever it hides.
It is traced on the shapes of whole tensors, so that what depends on those is right for shards too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from ftmesh.errors import ArgumentError
from ftmesh.layout.element_order import Shape
from ftmesh.optim.elementwise.graph import (
    Bind,
    Choice,
    Graph,
    Kind,
    Node,
    Part,
    Pick,
    Result,
    Total,
    Value,
    needed,
)

# Operations that give an element from elements at the same place.
_NAMES = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp complex conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor
    ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter
    not or pow real reduce_precision rem round rsqrt select_n sign sin sinh sqrt square
    stop_gradient sub tan tanh xor
"""
_ELEMENTWISE = frozenset(_NAMES.split())
_SPREADING = {"broadcast_in_dim", "reshape", "squeeze"}  # one number, at every place
_IDENTITIES = {"optimization_barrier", "reshard", "sharding_constraint"}
_CALLS = {"checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit"}


class NotShardableError(ArgumentError):
    """A function of tensors cannot be given shards of them."""


class Leafwise:
    """What traced functions do to the elements of leaves, as nodes of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def results(self, closed: Any, inputs: Sequence[Value]) -> list[Value]:
        """What a traced function makes of values; refuses one that cannot be given shards."""
        jaxpr = getattr(closed, "jaxpr", closed)
        known: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True):
            known[var] = self.graph.constant(const, var.aval)

        def read(var: Any) -> Value:
            return (
                self.graph.constant(var.val, var.aval) if isinstance(var, Literal) else known[var]
            )

        for step in jaxpr.eqns:
            made = self._step(step, [read(var) for var in step.invars])
            known.update(zip(step.outvars, made, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _step(self, step: Any, inputs: list[Value]) -> list[Value]:
        name, params = step.primitive.name, step.params
        if name in _CALLS:
            inner = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
            return self.results(inner, inputs)
        if name in _IDENTITIES:
            return inputs
        shape = step.outvars[0].aval.shape if step.outvars else ()
        x = inputs[0] if inputs else None
        if name in _SPREADING and x is not None and x.is_uniform:
            return [Value(x.node, shape, x.leaf, is_uniform=True)]
        if name in _ELEMENTWISE:
            return [self._elementwise(step, inputs, shape)]
        if x is not None and name == "reduce_sum" and x.node.kind == Kind.ELEMENTS and not shape:
            op = Total(step.invars[0].aval.dtype)
            total = self.graph.node(op, [x.node], Kind.NUMBER, x.leaf)
            return [Value(total, (), x.leaf, is_uniform=True)]
        if name == "cond" and any(x.leaf is not None for x in inputs):
            return self._cond(step, inputs)
        return self._plain(step, inputs)

    def _elementwise(self, step: Any, inputs: list[Value], shape: Shape) -> Value:
        """An operation that works place by place, done once for all leaves that it is done to."""
        name = step.primitive.name
        inputs = self._of_one_leaf(name, inputs)
        leaves = {x.leaf for x in inputs} - {None}
        kind = max(x.node.kind for x in inputs)
        if len(leaves) > 1:
            raise NotShardableError(
                f"this optimizer cannot be sharded: its {name!r} takes elements of several "
                "tensors, and a chip has other shards of one than of another"
            )
        params = {key: value for key, value in step.params.items() if key != "sharding"}
        op = Bind((name, str(sorted(params.items(), key=str))), step.primitive, step.params)
        is_uniform = all(x.is_uniform for x in inputs)
        if kind == Kind.PLAIN and not is_uniform:
            return Value(self.graph.node(op, map(self.graph.whole, inputs)), shape)
        if any(x.leaf is None and not x.is_uniform for x in inputs):
            raise NotShardableError(
                f"this optimizer cannot be sharded: its {name!r} takes an array that differs from "
                "place to place, such as random numbers, and is not sharded as the tensors are"
            )
        leaf = next(iter(leaves), None)
        node = self.graph.node(op, [x.node for x in inputs], kind, leaf)
        return Value(node, shape, leaf, is_uniform)

    def _of_one_leaf(self, name: str, inputs: list[Value]) -> list[Value]:
        """The same values, where several leaves meet with numbers that belong to none any more.

        So they do in a sum of numbers of all leaves, which goes on from leaf to leaf.
        """
        main = {x.leaf for x in inputs if x.node.kind == Kind.ELEMENTS}
        is_sum = name == "add" and any(x.leaf is None and x.node.is_mixed for x in inputs)
        if not main and not is_sum and len({x.leaf for x in inputs} - {None}) < 2:
            return inputs
        return [
            _one_number(self.graph, x) if x.node.kind == Kind.NUMBER and x.leaf not in main else x
            for x in inputs
        ]

    def _plain(self, step: Any, inputs: list[Value]) -> list[Value]:
        """Any other operation, on values that belong to no leaf, or on a number of each."""
        name = step.primitive.name
        if any(x.node.kind == Kind.ELEMENTS for x in inputs):
            raise NotShardableError(
                f"this optimizer cannot be sharded: its {name!r} takes more of a tensor than one "
                "element, or the sum of all, and a chip has only its shard of the tensor; do not "
                "shard this optimizer"
            )
        shapes = [var.aval.shape for var in step.outvars]
        if name == "concatenate" and _is_one_for_each(inputs):
            leaves = tuple(x.leaf for x in inputs if x.leaf is not None)
            return [Value(self.graph.node(Pick(leaves, shapes[0]), [inputs[0].node]), shapes[0])]
        op = Bind(("at", id(step)), step.primitive, step.params)
        made = self.graph.node(op, map(self.graph.whole, inputs))
        nodes = [made]
        if step.primitive.multiple_results:
            nodes = [self.graph.node(Part(i), [made]) for i in range(len(shapes))]
        return [
            Value(node, shape, is_uniform=not shape)
            for node, shape in zip(nodes, shapes, strict=True)
        ]

    def _cond(self, step: Any, inputs: list[Value]) -> list[Value]:
        """A conditional between branches that work on leaves."""
        index, *operands = inputs
        if index.leaf is not None:
            raise NotShardableError(
                "this optimizer cannot be sharded: what it does depends on a number of one tensor"
            )
        ends = []
        for branch in step.params["branches"]:
            with self.graph.another_region() as region:
                ends.append((region, self.results(branch, operands)))
        results, made = [], []
        for at, var in enumerate(step.outvars):
            values = [values[at] for _, values in ends]
            kind = max(x.node.kind for x in values)
            is_uniform = all(x.is_uniform for x in values)
            if kind == Kind.PLAIN and not is_uniform:
                nodes = tuple(self._whole_in(region, values[at]) for region, values in ends)
            else:
                _check_branches(values)
                nodes = tuple(x.node for x in values)
            leaf = next((x.leaf for x in values if x.leaf is not None), None)
            results.append(Result(nodes, kind, var.aval.dtype))
            made.append((var.aval.shape, leaf, is_uniform))
        return self._chosen(index, [region for region, _ in ends], results, made)

    def _chosen(
        self,
        index: Value,
        regions: list[int],
        results: list[Result],
        made: list[tuple[Shape, int | None, bool]],
    ) -> list[Value]:
        """The results of a conditional: those that are the same for several leaves are one."""
        leaves: dict[Result, set[int]] = {result: set() for result in results}
        for result, (_, leaf, _) in zip(results, made, strict=True):
            leaves[result] |= set() if leaf is None else {leaf}
        taken = [index.node]
        for at, region in enumerate(regions):
            taken += needed([result.nodes[at] for result in leaves], region)[1]
        choice = Choice(tuple(leaves), tuple(map(frozenset, leaves.values())))
        whole = self.graph.node(choice, taken)
        places = {result: at for at, result in enumerate(leaves)}
        values = []
        for result, (shape, leaf, is_uniform) in zip(results, made, strict=True):
            part = self.graph.node(Part(places[result]), [whole], result.kind, leaf)
            values.append(Value(part, shape, leaf, is_uniform))
        return values

    def _whole_in(self, region: int, value: Value) -> Node:
        with self.graph.in_region(region):
            return self.graph.whole(value)


def _check_branches(values: list[Value]) -> None:
    """Refuses a conditional that gives elements of one leaf or of another."""
    if len({x.leaf for x in values} - {None}) > 1 or any(
        x.leaf is None and not x.is_uniform for x in values
    ):
        raise NotShardableError(
            "this optimizer cannot be sharded: branches of a conditional in it give different "
            "tensors"
        )


def _one_number(graph: Graph, x: Value) -> Value:
    """The number of one leaf, that belongs to no leaf any more."""
    if x.leaf is None:
        return x
    return Value(graph.node(Pick((x.leaf,), ()), [x.node]), x.shape, is_uniform=True)


def _is_one_for_each(inputs: list[Value]) -> bool:
    """Whether these are the same number of several leaves."""
    return len({x.node for x in inputs}) == 1 and all(
        x.node.kind == Kind.NUMBER and math.prod(x.shape) == 1 for x in inputs
    )
