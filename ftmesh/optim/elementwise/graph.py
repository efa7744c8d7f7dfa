"""The operations of an optimizer as a graph in which all leaves of a pytree share nodes.

A node stands for one operation on every leaf that it applies to: the first moments of all tensors
are a single node if all tensors are treated alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import jax
import numpy as np

from ftmesh.layout.element_order import Shape


class Kind(IntEnum):
    """What a node has a value for. An operation has the largest kind of its operands."""

    GLOBAL = 0  # one value, which belongs to no leaf
    PER_LEAF = 1  # one number for each leaf
    PER_ELEMENT = 2  # one number for each element of each leaf


@dataclass(frozen=True, eq=False)
class Node:
    """An operation on other nodes.

    Attributes:
        level: Sums over tensors on the way to this node. Sums of one level can run together.
        region: The branch of a conditional that contains the node, 0 outside all of them.
        index: Position in the graph, larger than that of every operand.
        mixes_leaves: True for a global node that is computed from numbers of leaves.
        leaves: The leaves that need this node.
    """

    op: Any
    operands: tuple[Node, ...]
    kind: Kind
    level: int
    region: int
    index: int
    mixes_leaves: bool
    leaves: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Value:
    """A variable of the traced function: a node, the leaf it is taken for, and its shape.

    A value that `is_uniform` has the same number at every position.
    """

    node: Node
    shape: Shape
    leaf: int | None = None
    is_uniform: bool = False


# Operations -------------------------------------------------------------------------------------


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
        self.nodes: list[Node] = []
        self.region = 0
        self._num_regions = 0
        self._by_key: dict[Any, Node] = {}

    def node(
        self,
        op: Any,
        operands: Iterable[Node] = (),
        kind: Kind = Kind.GLOBAL,
        leaf: int | None = None,
    ) -> Node:
        """Return the node of an operation, and note that `leaf` needs it."""
        operands = tuple(operands)
        key = (op, operands, kind, self.region)
        if key not in self._by_key:
            level = max((x.level for x in operands), default=0) + isinstance(op, LeafSum)
            mixes_leaves = isinstance(op, TakeLeaves) or any(x.mixes_leaves for x in operands)
            index = len(self.nodes)
            node = Node(op, operands, kind, level, self.region, index, mixes_leaves)
            self.nodes.append(node)
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

    @contextmanager
    def in_region(self, region: int) -> Iterator[None]:
        """Add new nodes to `region`."""
        before, self.region = self.region, region
        try:
            yield
        finally:
            self.region = before

    @contextmanager
    def new_region(self) -> Iterator[int]:
        """Add new nodes to a new region, whose number is yielded."""
        self._num_regions += 1
        region = self._num_regions
        with self.in_region(region):
            yield region

    def as_array(self, value: Value) -> Node:
        """Return the global node that has a value as a plain array."""
        if value.leaf is not None:
            return self.node(TakeLeaves((value.leaf,), value.shape), [value.node])
        if value.is_uniform and value.shape:
            return self.node(Broadcast(value.shape), [value.node])
        return value.node


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
