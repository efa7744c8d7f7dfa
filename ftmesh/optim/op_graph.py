"""The operations of an optimizer as a graph in which all leaves of a pytree share nodes.

A node stands for one operation on every leaf that it applies to: the first moments of all tensors
are a single node if all tensors are treated alike.

The graph can be evaluated on shards of tensors if the optimizer treats every element of a tensor
alike and needs of a whole tensor nothing but sums over all of its elements, as norms do. The traced
function decides, not its name: a sort, or a random number per element, is found wherever it is
called. Tracing uses the shapes of full tensors, so that what depends on shapes is right on shards
too.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from ftmesh.errors import ArgumentError
from ftmesh.layout.buckets import Shape

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


class Kind(IntEnum):
    """What a node has a value for. An operation has the largest kind of its operands."""

    GLOBAL = 0  # one value, which belongs to no leaf
    PER_LEAF = 1  # one number for each leaf
    PER_ELEMENT = 2  # one number for each element of each leaf


@dataclass(frozen=True, eq=False)
class Node:
    """An operation on other nodes."""

    op: Any
    operands: tuple[Node, ...]
    kind: Kind
    level: int  # sums over tensors on the way to this node; those of one level can run together
    region: int  # the branch of a conditional that contains the node, 0 outside all of them
    index: int  # position in the graph, larger than that of every operand
    mixes_leaves: bool  # True for a global node that is computed from numbers of leaves
    leaves: set[int] = field(default_factory=set)  # that need this node


@dataclass(frozen=True)
class Value:
    """A variable of the traced function: a node, the leaf it is taken for, and its shape."""

    node: Node
    shape: Shape
    leaf: int | None = None
    is_uniform: bool = False  # True if it has the same number at every position


@dataclass(frozen=True)
class Constant:
    """An input or a constant; equal names are one node."""

    name: Hashable
    value: Any = field(compare=False, repr=False)


@dataclass(frozen=True)
class Apply:
    """A JAX primitive; `key` identifies it and its parameters."""

    key: Hashable
    primitive: Any = field(compare=False)
    params: dict[str, Any] = field(compare=False, repr=False)


@dataclass(frozen=True)
class TupleElement:
    """One of several results of an operation."""

    index: int


@dataclass(frozen=True)
class Broadcast:
    """A scalar, as an array of `shape`."""

    shape: Shape


@dataclass(frozen=True)
class LeafSum:
    """The sum over the elements of each leaf, for the leaves of one dtype."""

    dtype: Any


@dataclass(frozen=True)
class TakeLeaves:
    """The numbers of some leaves, as an array of `shape`."""

    leaves: tuple[int, ...]
    shape: Shape


@dataclass(frozen=True)
class BranchResult:
    """One result of a conditional: its node in every branch."""

    nodes: tuple[Node, ...]
    kind: Kind
    dtype: Any


@dataclass(frozen=True, eq=False)
class Conditional:
    """A conditional. `leaves` has the leaves that need each of its results."""

    results: tuple[BranchResult, ...]
    leaves: tuple[frozenset[int], ...]


class OpGraph:
    """Nodes, with common subexpressions merged."""

    def __init__(self) -> None:
        self._by_key: dict[Any, Node] = {}
        self._region = self._num_regions = 0

    def node(
        self,
        op: Any,
        operands: Iterable[Node] = (),
        kind: Kind = Kind.GLOBAL,
        leaf: int | None = None,
    ) -> Node:
        """Return the node of an operation, and note that `leaf` needs it."""
        operands = tuple(operands)
        key = (op, operands, kind, self._region)
        if key not in self._by_key:
            level = max((x.level for x in operands), default=0) + isinstance(op, LeafSum)
            mixes_leaves = isinstance(op, TakeLeaves) or any(x.mixes_leaves for x in operands)
            index = len(self._by_key)
            node = Node(op, operands, kind, level, self._region, index, mixes_leaves)
            self._by_key[key] = node
        if leaf is not None:
            self._by_key[key].leaves.add(leaf)
        return self._by_key[key]

    def constant(self, value: Any, aval: Any) -> Value:
        """Return a constant of the traced function; equal scalars share a node."""
        name: Hashable = ("id", id(value))
        is_key = jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended)
        if not aval.shape and not is_key and not isinstance(value, jax.core.Tracer):
            value = np.asarray(value, aval.dtype)
            name = (str(aval), value.tobytes())
        return Value(self.node(Constant(name, value)), aval.shape, is_uniform=not aval.shape)

    def as_array(self, value: Value) -> Node:
        """Return the global node that has a value as a plain array."""
        if value.leaf is not None:
            return self.node(TakeLeaves((value.leaf,), value.shape), [value.node])
        if value.is_uniform and value.shape:
            return self.node(Broadcast(value.shape), [value.node])
        return value.node

    def add(self, closed_jaxpr: Any, inputs: Sequence[Value]) -> list[Value]:
        """Add a traced function; raise NotShardableError if it cannot run on shards."""
        jaxpr = getattr(closed_jaxpr, "jaxpr", closed_jaxpr)
        values: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, getattr(closed_jaxpr, "consts", ()), strict=True):
            values[var] = self.constant(const, var.aval)

        def read(var: Any) -> Value:
            return self.constant(var.val, var.aval) if isinstance(var, Literal) else values[var]

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
            node = self.node(op, [x.node], Kind.PER_LEAF, x.leaf)
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
            return Value(self.node(op, map(self.as_array, inputs)), shape)
        if any(x.leaf is None and not x.is_uniform for x in inputs):
            raise NotShardableError(
                f"this optimizer cannot be sharded: its {name!r} takes an array that varies from "
                "element to element, such as random numbers, and is not sharded like the tensors"
            )
        leaf = next(iter(leaves), None)
        node = self.node(op, [x.node for x in inputs], kind, leaf)
        return Value(node, shape, leaf, is_uniform)

    def _detach_other_leaves(self, name: str, inputs: list[Value]) -> list[Value]:
        """Turn numbers of other leaves into global scalars, as in a running sum of all norms."""
        main = {x.leaf for x in inputs if x.node.kind == Kind.PER_ELEMENT}
        is_sum = name == "add" and any(x.leaf is None and x.node.mixes_leaves for x in inputs)
        if not main and not is_sum and len({x.leaf for x in inputs} - {None}) < 2:
            return inputs
        return [
            Value(self.node(TakeLeaves((x.leaf,), ()), [x.node]), x.shape, is_uniform=True)
            if x.node.kind == Kind.PER_LEAF and x.leaf is not None and x.leaf not in main
            else x
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
            node = self.node(TakeLeaves(leaves, shapes[0]), [inputs[0].node])
            return [Value(node, shapes[0])]
        op = Apply(("id", id(eqn)), eqn.primitive, eqn.params)
        node = self.node(op, map(self.as_array, inputs))
        nodes = [node]
        if eqn.primitive.multiple_results:
            nodes = [self.node(TupleElement(i), [node]) for i in range(len(shapes))]
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
        branches: list[tuple[int, list[Value]]] = []
        for jaxpr in eqn.params["branches"]:
            self._num_regions += 1
            region = self._num_regions
            with self._in_region(region):
                branches.append((region, self.add(jaxpr, operands)))
        outputs = [self._branch_result(branches, i, v.aval) for i, v in enumerate(eqn.outvars)]
        leaves: dict[BranchResult, set[int]] = {}  # equal results of several leaves are merged
        for result, value in outputs:
            leaves.setdefault(result, set()).update(() if value.leaf is None else {value.leaf})
        nodes = [index.node]
        for i, (region, _) in enumerate(branches):
            nodes += dependencies([result.nodes[i] for result in leaves], region)[1]
        node = self.node(Conditional(tuple(leaves), tuple(map(frozenset, leaves.values()))), nodes)
        elements = {result: TupleElement(i) for i, result in enumerate(leaves)}
        return [
            replace(value, node=self.node(elements[result], [node], result.kind, value.leaf))
            for result, value in outputs
        ]

    def _branch_result(
        self, branches: list[tuple[int, list[Value]]], index: int, aval: Any
    ) -> tuple[BranchResult, Value]:
        """Return a result of a conditional, and its value in one of the branches."""
        values = [outputs[index] for _, outputs in branches]
        leaves = {x.leaf for x in values} - {None}
        kind = max(x.node.kind for x in values)
        is_uniform = all(x.is_uniform for x in values)
        nodes = [x.node for x in values]
        if kind == Kind.GLOBAL and not is_uniform:
            for i, (region, outputs) in enumerate(branches):
                with self._in_region(region):
                    nodes[i] = self.as_array(outputs[index])
        elif len(leaves) > 1 or any(x.leaf is None and not x.is_uniform for x in values):
            raise NotShardableError(
                "this optimizer cannot be sharded: the branches of one of its conditionals return "
                "different tensors"
            )
        result = BranchResult(tuple(nodes), kind, aval.dtype)
        return result, Value(nodes[0], aval.shape, next(iter(leaves), None), is_uniform)

    @contextmanager
    def _in_region(self, region: int) -> Iterator[None]:
        before, self._region = self._region, region
        try:
            yield
        finally:
            self._region = before


def _is_one_number_per_leaf(inputs: list[Value]) -> bool:
    return len({x.node for x in inputs}) == 1 and all(
        x.node.kind == Kind.PER_LEAF and math.prod(x.shape) == 1 for x in inputs
    )


def dependencies(outputs: Iterable[Node], region: int) -> tuple[list[Node], list[Node]]:
    """Return the nodes of `region` that `outputs` depend on, and what those use from outside."""
    inside: dict[Node, None] = {}
    outside: dict[Node, None] = {}
    pending = list(outputs)
    while pending:
        node = pending.pop()
        if node.region != region:
            outside[node] = None
        elif node not in inside:
            inside[node] = None
            pending += node.operands
    return sorted(inside, key=lambda node: node.index), list(outside)
