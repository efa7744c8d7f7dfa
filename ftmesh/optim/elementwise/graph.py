"""Values: what a function of whole tensors computes, as a graph in which all leaves share nodes.

A node stands for the same operation on whatever leaf of a pytree: one node for the moments of all
tensors, if all of them are treated alike. Nodes are of three kinds: the `ELEMENTS` of each leaf, a
`NUMBER` for each leaf, and `PLAIN` values that belong to no leaf.
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
    """What a node stands for; of several operands the greatest decides."""

    PLAIN = 0
    NUMBER = 1
    ELEMENTS = 2


@dataclass(frozen=True, eq=False)
class Node:
    """An operation on other nodes.

    `level` counts the sums over tensors on the way to it: sums of one level can be made at once.
    `region` is the branch of a conditional that it stands in, 0 outside of all. A plain node that
    `is_mixed` is made of numbers of leaves. `leaves` are those that it is there for.
    """

    op: Any
    inputs: tuple[Node, ...]
    kind: Kind
    level: int
    region: int
    place: int  # after that of its inputs
    is_mixed: bool
    leaves: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Value:
    """A node as a function has it: for one leaf, if it belongs to leaves, and in some shape.

    If it `is_uniform`, the node is one number, and the value an array with that at every place.
    """

    node: Node
    shape: Shape
    leaf: int | None = None
    is_uniform: bool = False


# Operations -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """A value that is there before anything is computed."""

    name: Hashable
    value: Any = field(compare=False, repr=False)


@dataclass(frozen=True)
class Bind:
    """An operation of JAX: what `about` says, which tells it from others."""

    about: Hashable
    primitive: Any = field(compare=False)
    params: dict[str, Any] = field(compare=False, repr=False)


@dataclass(frozen=True)
class Part:
    """One of several results of an operation."""

    place: int


@dataclass(frozen=True)
class Spread:
    """One number, in an array of it."""

    shape: Shape


@dataclass(frozen=True)
class Total:
    """The sum of the elements of each leaf, for those of one dtype."""

    dtype: Any


@dataclass(frozen=True)
class Pick:
    """The numbers of some leaves, in an array."""

    leaves: tuple[int, ...]
    shape: Shape


@dataclass(frozen=True)
class Result:
    """What the branches of a conditional have for one of its results."""

    nodes: tuple[Node, ...]
    kind: Kind
    dtype: Any


@dataclass(frozen=True, eq=False)
class Choice:
    """A conditional; `leaves` are those that each of its results is there for."""

    results: tuple[Result, ...]
    leaves: tuple[frozenset[int], ...]


class Graph:
    """Nodes; the same operation on the same nodes is one."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.region = 0
        self._regions = 0
        self._known: dict[Any, Node] = {}

    def node(
        self,
        op: Any,
        inputs: Iterable[Node] = (),
        kind: Kind = Kind.PLAIN,
        leaf: int | None = None,
    ) -> Node:
        """The node of an operation on others, for a leaf if it belongs to leaves."""
        inputs = tuple(inputs)
        key = (op, inputs, kind, self.region)
        if key not in self._known:
            level = max((each.level for each in inputs), default=0) + isinstance(op, Total)
            is_mixed = isinstance(op, Pick) or any(each.is_mixed for each in inputs)
            made = Node(op, inputs, kind, level, self.region, len(self.nodes), is_mixed)
            self.nodes.append(made)
            self._known[key] = made
        if leaf is not None:
            self._known[key].leaves.add(leaf)
        return self._known[key]

    def constant(self, value: Any, aval: Any) -> Value:
        """A value that is written into a function; equal numbers are one."""
        name: Hashable = ("at", id(value))
        is_key = jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended)
        if not aval.shape and not is_key and not isinstance(value, jax.core.Tracer):
            value = np.asarray(value, aval.dtype)
            name = (str(aval), value.tobytes())
        return Value(self.node(Given(name, value)), aval.shape, is_uniform=not aval.shape)

    @contextmanager
    def in_region(self, region: int) -> Iterator[None]:
        """Nodes that are made meanwhile stand in `region`."""
        before, self.region = self.region, region
        try:
            yield
        finally:
            self.region = before

    @contextmanager
    def another_region(self) -> Iterator[int]:
        """The same for a new one, whose number it gives."""
        self._regions += 1
        region = self._regions
        with self.in_region(region):
            yield region

    def whole(self, value: Value) -> Node:
        """The plain array that a value is."""
        if value.leaf is not None:
            return self.node(Pick((value.leaf,), value.shape), [value.node])
        if value.is_uniform and value.shape:
            return self.node(Spread(value.shape), [value.node])
        return value.node


def needed(outputs: Iterable[Node], region: int) -> tuple[list[Node], list[Node]]:
    """The nodes of a region that `outputs` are made of, and those of other regions they take."""
    inside: dict[Node, None] = {}
    outside: dict[Node, None] = {}
    waiting = list(outputs)
    while waiting:
        node = waiting.pop()
        if node.region != region:
            outside[node] = None
        elif node not in inside:
            inside[node] = None
            waiting += node.inputs
    return sorted(inside, key=lambda node: node.place), list(outside)
