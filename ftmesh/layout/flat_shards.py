"""Tensors that are stored flat: in their natural order, cut equally along one mesh axis.

On N ranks a tensor is stored as a vector of N equal parts: its own elements, row by row,
then padding. Rank r has the r-th of N equal parts. A tensor that other mesh axes shard is stored in
an array ``[*number of shards along each dimension, length]``: each shard by itself, as above. So
what is stored depends on the number of ranks by padding at the end alone, and not on the plan.

The state of an optimizer has the tree that optax gives it. In place of a tensor of the shape of a
parameter it has the array that stores that tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.errors import ArgumentError
from ftmesh.layout.buckets import Shape, make_buckets

# FLAT: cut as above. LOCAL: the parameter itself is cut along the axis, and a rank stores tensors
# of the shape of its piece. REPLICATED: every rank stores the tensor.
Kind = Literal["flat", "local", "replicated"]

LANES = 128  # elements of a row of a TPU's tiles
_FIRST_LENGTH = 1_000_003  # longer than the dimensions that an optimizer names itself
SMALL_TENSOR = 65_536  # elements; of such tensors parts are cut from a copy, in fewer operations
MAX_PADDING = 1.25  # times the size of a tensor, for whole rows


@dataclass(frozen=True)
class LeafLayout:
    """How tensors of the shape of one parameter are stored.

    Attributes:
        type: The parameter's type, as one rank has it.
        kind: See `Kind`.
        num_ranks: Of the axis.
        counts: How many shards other axes make of the parameter, along each dimension.
    """

    type: jax.ShapeDtypeStruct
    kind: Kind
    num_ranks: int
    counts: Shape = ()

    @property
    def part_size(self) -> int:
        """How many elements each rank has of a flat tensor."""
        return math.prod(self.row_shape) or -(-int(self.type.size) // self.num_ranks)

    @property
    def row_shape(self) -> Shape:
        """The part of a rank as whole rows of the tensor, if that takes little padding; or zeros.

        On a TPU rows of 128 elements are read and gathered in place, and parts of rows are not.
        """
        size, width = int(self.type.size), (self.type.shape or (1,))[-1]
        if width % LANES or not size:
            return 0, 0
        num_rows = -(-size // (width * self.num_ranks))
        is_near = num_rows * width * self.num_ranks <= MAX_PADDING * size
        return (num_rows, width) if is_near else (0, 0)

    def num_real(self, rank: Any) -> Any:
        """Return how many elements of the part of `rank` are not padding."""
        num_full, rest = divmod(self.type.size, self.part_size)
        return jnp.where(rank < num_full, self.part_size, jnp.where(rank == num_full, rest, 0))

    @property
    def is_split(self) -> bool:
        """True if other axes shard the parameter."""
        return math.prod(self.counts) > 1

    @property
    def own_shape(self) -> Shape:
        """The shape in which a rank computes with the tensor."""
        return (self.part_size,) if self.kind == "flat" else tuple(self.type.shape)

    @property
    def stored_shape(self) -> Shape:
        """The shape of the stored array on one rank."""
        if self.kind != "flat":
            return tuple(self.type.shape)
        return (*(1 for _ in self.counts if self.is_split), self.part_size)

    @property
    def global_shape(self) -> Shape:
        """The shape of the stored array on all ranks, for a flat tensor."""
        return (*(self.counts if self.is_split else ()), self.num_ranks * self.part_size)

    def take_part(self, x: Any, rank: Any) -> jax.Array:
        """Return the part of `rank` of a flat tensor that all ranks have."""
        size = self.part_size
        if self.num_ranks == 1:
            return jnp.reshape(x, -1)
        if 0 < self.type.size <= SMALL_TENSOR:
            return lax.dynamic_index_in_dim(self.to_rows(x), rank, keepdims=False)
        width = x.shape[-1]  # whole rows are read: flattening all of `x` may take a copy of it
        matrix = jnp.reshape(x, (-1, width))
        if (part := self.row_shape[0]) and part <= len(matrix):
            first = np.minimum(np.arange(self.num_ranks) * part, len(matrix) - part)
            shift = np.minimum(np.arange(self.num_ranks) * part - first, part)
            row, offset = (jnp.asarray(table.astype(np.int32))[rank] for table in (first, shift))
            window = lax.dynamic_slice_in_dim(matrix, row, part)
            window = jnp.concatenate([window, jnp.zeros_like(window)])
            return lax.dynamic_slice_in_dim(window, offset, part).reshape(-1)
        num_rows = min(len(matrix), -(-(size + width - 1) // width))
        per_part, rest = divmod(size, width)
        row = rank * per_part + rank * rest // width  # of rank * size, which may not fit in int32
        first = jnp.minimum(row, len(matrix) - num_rows)
        offset = rank * rest % width + (row - first) * width
        window = lax.dynamic_slice_in_dim(matrix, first, num_rows).reshape(-1)
        window = jnp.concatenate([window, jnp.zeros_like(window, shape=size)])
        return lax.dynamic_slice_in_dim(window, jnp.minimum(offset, num_rows * width), size)

    def to_rows(self, x: Any) -> jax.Array:
        """Return the parts of all ranks of a flat tensor, one row for each."""
        length = self.num_ranks * self.part_size
        return jnp.pad(jnp.reshape(x, -1), (0, length - x.size)).reshape(self.num_ranks, -1)

    def from_gathered_rows(self, matrix: Any) -> jax.Array:
        """Return the tensor from the whole rows of all ranks, one below the other."""
        width = self.row_shape[1]
        return matrix[: int(self.type.size) // width].reshape(self.type.shape)

    def from_rows(self, rows: Any) -> jax.Array:
        """Return the tensor from the parts of all ranks."""
        return rows.reshape(-1)[: self.type.size].reshape(self.type.shape)


@dataclass(frozen=True)
class TreeLayout:
    """How all leaves of a pytree are stored; flat ones are communicated in buckets."""

    leaves: tuple[LeafLayout, ...]
    buckets: tuple[tuple[int, ...], ...]  # the indices of flat leaves

    @staticmethod
    def build(
        leaves: Sequence[LeafLayout], bucket_bytes: int, order: Sequence[int] | None = None
    ) -> TreeLayout:
        """Fill buckets of up to `bucket_bytes` with the flat leaves, in the given order."""
        order = range(len(leaves)) if order is None else order
        flat = [i for i in order if leaves[i].kind == "flat"]
        types = [leaves[i].type for i in flat]
        buckets = make_buckets(types, [type_.dtype for type_ in types], bucket_bytes)
        buckets.sort(key=lambda bucket: max(bucket.members))  # the first to be complete first
        members = (tuple(flat[i] for i in bucket.members) for bucket in buckets)
        return TreeLayout(tuple(leaves), tuple(members))

    @cached_property
    def cut(self) -> frozenset[int]:
        """The leaves of which each rank has a part of its own."""
        return frozenset(i for i, leaf in enumerate(self.leaves) if leaf.kind != "replicated")

    @cached_property
    def replicated(self) -> tuple[int, ...]:
        """The leaves that all ranks have."""
        return tuple(i for i in range(len(self.leaves)) if i not in self.cut)


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
    """Find which leaves of the state that `init` returns belong to which parameter."""
    mesh = jax.sharding.get_abstract_mesh()  # under which `init` is traced
    find = _state_form if isinstance(init, Hashable) else _state_form.__wrapped__
    return find(init, layout, tuple(types), tree, mesh)


@lru_cache(maxsize=32)  # each update asks several times, and tracing takes long
def _state_form(
    init: Callable[[Any], Any], layout: TreeLayout, types: tuple[Any, ...], tree: Any, mesh: Any
) -> StateForm:
    """As `state_form`.

    `init` is traced with a unique length for each parameter, which tells the parameter of a state
    leaf. If that changes the tree, because masks depend on sizes, leaves are matched by path. A
    leaf of another shape than its parameter's belongs to none, and is replicated.
    """
    marked = [
        jax.ShapeDtypeStruct((*(1 for _ in t.shape[1:]), _FIRST_LENGTH + i), t.dtype)
        if i in layout.cut
        else t
        for i, t in enumerate(types)
    ]
    leaves, state_tree = jax.tree.flatten(jax.eval_shape(init, tree.unflatten(types)))
    marked_leaves, marked_tree = jax.tree.flatten(jax.eval_shape(init, tree.unflatten(marked)))
    if state_tree == marked_tree:
        by_mark = {marked[i].shape: i for i in layout.cut}
        params = [by_mark.get(mark.shape) for mark in marked_leaves]
    else:
        paths, _ = jax.tree.flatten_with_path(tree.unflatten(range(len(types))))
        by_path = {tuple(path): i for path, i in paths if i in layout.cut}
        state_paths, _ = jax.tree.flatten_with_path(state_tree.unflatten(leaves))
        ends = [[tuple(path[k:]) for k in range(len(path) + 1)] for path, _ in state_paths]
        params = [next((by_path[end] for end in e if end in by_path), None) for e in ends]
    params = [
        param if param is not None and leaf.shape == types[param].shape else None
        for leaf, param in zip(leaves, params, strict=True)
    ]
    return StateForm(state_tree, tuple(params), tuple(leaves), layout)


def flatten_tensor(x: Any, stored_shape: Shape) -> Any:
    """Return a full tensor, of NumPy or JAX, as the stored array of that global shape."""
    local = _shard_shape(x.shape, stored_shape)
    *counts, length = stored_shape
    xp = jnp if isinstance(x, jax.Array) else np
    if counts:
        split = [n for pair in zip(counts, local, strict=True) for n in pair]
        x = x.reshape(split).transpose(*range(0, len(split), 2), *range(1, len(split), 2))
    flat = x.reshape(*counts, math.prod(local))
    return xp.pad(flat, [*((0, 0) for _ in counts), (0, length - flat.shape[-1])])


def unflatten_tensor(stored: Any, shape: Shape) -> Any:
    """Return the full tensor of a given shape from a stored array, for any number of ranks."""
    local = _shard_shape(shape, stored.shape)
    *counts, _ = stored.shape
    flat = stored[..., : math.prod(local)]
    if not counts:
        return flat.reshape(shape)
    number = len(counts)
    order = [i for pair in zip(range(number), range(number, 2 * number), strict=True) for i in pair]
    return flat.reshape(*counts, *local).transpose(order).reshape(shape)


def _shard_shape(shape: Shape, stored_shape: Shape) -> Shape:
    """Return the shape of each shard; raise ArgumentError if a tensor is not stored so."""
    *counts, length = stored_shape or (0,)
    known = counts or [1 for _ in shape]
    if len(known) == len(shape) and all(
        n % count == 0 for n, count in zip(shape, known, strict=True) if count
    ):
        local = tuple(n // max(1, count) for n, count in zip(shape, known, strict=True))
        if stored_shape and length >= math.prod(local):
            return local
    raise ArgumentError(
        f"an array of shape {tuple(stored_shape)} does not store a tensor of shape {tuple(shape)}: "
        "the state is of other parameters, or these are sharded in another way"
    )
