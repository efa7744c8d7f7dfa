"""The operations of an optimizer as a graph in which all leaves of a pytree share nodes.

A node stands for one operation on every leaf that it applies to: the first moments of all tensors
are a single node if all tensors are treated alike.

Operations on every element alike, and sums over all elements of a tensor, as norms are, run on
shards. Any other operation, such as a sort, a product of matrices or a random number per element,
runs at every chip on full tensors: `GatherLeaf` gathers its operands, and `TakePart` cuts its
result where that meets shards. The traced function decides, not its name. Tracing uses the shapes
of full tensors, so that what depends on shapes is right on shards too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
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
    """An optimizer cannot give the same updates on shards of tensors."""


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
    level: int  # sums and gathers on the way to this node; those of one level can run together
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
    full: Any = field(default=None, compare=False, repr=False)  # full tensors of leaves, if known


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
    """A scalar, or an array with dimensions of one, as an array of `shape`."""

    shape: Shape


@dataclass(frozen=True)
class LeafSum:
    """The sum over the elements of each leaf, for the leaves of one dtype."""

    dtype: Any


@dataclass(frozen=True)
class GatherLeaf:
    """All elements of one leaf, as an array of `shape`."""

    leaf: int
    shape: Shape


@dataclass(frozen=True)
class TakePart:
    """The part of this rank, of an array that has the elements of one leaf."""

    leaf: int


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
        self._jaxprs: list[Any] = []  # equations are told apart by id

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
            level = max((x.level for x in operands), default=0) + isinstance(
                op, (LeafSum, GatherLeaf)
            )
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
        if value.leaf is not None and value.node.kind == Kind.PER_ELEMENT:
            return self.node(GatherLeaf(value.leaf, value.shape), [value.node])
        if value.leaf is not None:
            return self.node(TakeLeaves((value.leaf,), value.shape), [value.node])
        if value.is_uniform and value.shape:
            return self.node(Broadcast(value.shape), [value.node])
        return value.node

    def take_part(self, value: Value, shape: Shape, leaf: int) -> Value:
        """Return the part of an array, broadcast to `shape`, for this rank's part of a leaf."""
        array = self.as_array(value)
        if value.shape != shape:
            array = self.node(Broadcast(shape), [array])
        return Value(self.node(TakePart(leaf), [array], Kind.PER_ELEMENT, leaf), shape, leaf)

    def _as_global(self, value: Value) -> Value:
        """Return a value that belongs to no leaf."""
        if value.node.kind == Kind.PER_LEAF and value.leaf is not None:
            number = self.node(TakeLeaves((value.leaf,), ()), [value.node])
            return Value(number, value.shape, is_uniform=True)
        return Value(self.as_array(value), value.shape, is_uniform=not value.shape)

    def add(self, closed_jaxpr: Any, inputs: Sequence[Value]) -> list[Value]:
        """Add a traced function."""
        self._jaxprs.append(closed_jaxpr)
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
        if name in _ELEMENTWISE:
            return [self._elementwise(eqn, inputs, shape)]
        if name in _SHAPE_ONLY and x is not None and x.is_uniform:
            return [Value(x.node, shape, x.leaf, is_uniform=True)]
        if x is not None and x.node.kind == Kind.PER_ELEMENT:
            size = math.prod(shape)
            if name in _SHAPE_ONLY and size == math.prod(x.shape) and not params.get("dimensions"):
                return [Value(x.node, shape, x.leaf)]  # parts are cut from elements in this order
            if name == "reduce_sum" and size == 1:
                op = LeafSum(eqn.invars[0].aval.dtype)
                node = self.node(op, [x.node], Kind.PER_LEAF, x.leaf)
                return [Value(node, shape, x.leaf, is_uniform=True)]
            if size == 1 and (as_sum := _as_sum(eqn, inputs)):
                return self.add(jax.make_jaxpr(as_sum)(*(var.aval for var in eqn.invars)), inputs)
        if name == "cond" and any(x.leaf is not None for x in inputs):
            return self._cond(eqn, inputs)
        return self._global(eqn, inputs)

    def _elementwise(self, eqn: Any, inputs: list[Value], shape: Shape) -> Value:
        name, params = eqn.primitive.name, eqn.params
        inputs = self._detach_other_leaves(name, inputs)
        leaves = {x.leaf for x in inputs} - {None}
        is_mixed, kind = any(map(_is_array, inputs)), max(x.node.kind for x in inputs)
        is_broadcast = any(x.node.kind == Kind.PER_ELEMENT and x.shape != shape for x in inputs)
        if len(leaves) > 1 or is_broadcast or (is_mixed and kind == Kind.PER_LEAF):
            inputs, leaves, kind = list(map(self._as_global, inputs)), set(), Kind.GLOBAL
        leaf = next(iter(leaves), None)
        if is_mixed and leaf is not None:
            inputs = [self.take_part(x, shape, leaf) if _is_array(x) else x for x in inputs]
        key = str(sorted((item for item in params.items() if item[0] != "sharding"), key=str))
        op = Apply((name, key), eqn.primitive, params)
        is_uniform = all(x.is_uniform for x in inputs)
        if kind == Kind.GLOBAL and not is_uniform:
            return Value(self.node(op, map(self.as_array, inputs)), shape)
        node = self.node(op, [x.node for x in inputs], kind, leaf)
        return Value(node, shape, leaf, is_uniform)

    def _detach_other_leaves(self, name: str, inputs: list[Value]) -> list[Value]:
        """Turn numbers of other leaves into scalars, as in a running sum of all norms."""
        main = {x.leaf for x in inputs if x.node.kind == Kind.PER_ELEMENT}
        is_sum = name == "add" and any(x.leaf is None and x.node.mixes_leaves for x in inputs)
        if not main and not is_sum and len({x.leaf for x in inputs} - {None}) < 2:
            return inputs
        main.add(None)
        is_other = [x.node.kind == Kind.PER_LEAF and x.leaf not in main for x in inputs]
        return [self._as_global(x) if y else x for x, y in zip(inputs, is_other, strict=True)]

    def _global(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        """Add any other operation, on full tensors and on numbers."""
        shapes = [var.aval.shape for var in eqn.outvars]
        if eqn.primitive.name == "concatenate" and _is_one_number_per_leaf(inputs):
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
        index, operands = self._as_global(inputs[0]), inputs[1:]
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
        if len(leaves) > 1 or any(map(_is_array, values)):
            for i, (region, outputs) in enumerate(branches):
                with self._in_region(region):
                    nodes[i] = self.as_array(outputs[index])
            kind, leaves, is_uniform = Kind.GLOBAL, set(), not aval.shape
        result = BranchResult(tuple(nodes), kind, aval.dtype)
        return result, Value(nodes[0], aval.shape, next(iter(leaves), None), is_uniform)

    @contextmanager
    def _in_region(self, region: int) -> Iterator[None]:
        before, self._region = self._region, region
        try:
            yield
        finally:
            self._region = before


def _as_sum(eqn: Any, inputs: list[Value]) -> Callable[..., Any] | None:
    """Return a function that computes a reduction of tensors to a number as a sum, if there is."""
    out = eqn.outvars[0].aval
    name = eqn.primitive.name
    if name in ("reduce_and", "reduce_or"):
        decides = name == "reduce_or"  # one element of this value gives the result
        return lambda x: ((jnp.sum(x == decides, dtype=np.int32) > 0) == decides).reshape(out.shape)
    if name == "dot_general" and inputs[0].leaf == inputs[1].leaf:
        x, y = (var.aval for var in eqn.invars)
        every = tuple(range(x.ndim))
        (left, right), _ = eqn.params["dimension_numbers"]
        if tuple(left) == tuple(right) == every and y.ndim == x.ndim:
            is_inexact = jnp.issubdtype(out.dtype, np.inexact)
            wide = jnp.promote_types(out.dtype, np.float32) if is_inexact else out.dtype
            return lambda x, y: jnp.sum(x.astype(wide) * y.astype(wide)).astype(out.dtype)
    return None


def _is_array(value: Value) -> bool:
    return value.leaf is None and not value.is_uniform


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
