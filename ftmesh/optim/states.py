"""States: which tensors of an optimizer's state are sharded, and in which arrays they lie.

A state has the structure that optax gives it, with a `Slot` in place of every tensor that is as
large as a leaf of the parameters. What belongs there is in an array for each bucket; all tensors of
a kind, such as the first moments of all leaves, share one such row of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from ftmesh.layout.owned_buckets import Owned
from ftmesh.optim.leafwise import NotShardableError

_NO_SIZE = 1_000_003  # nothing is so long


@jax.tree_util.register_static
@dataclass(frozen=True)
class Slot:
    """In place of a tensor: the one of leaf `leaf` in row `row` of arrays."""

    row: int
    leaf: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShardedState:
    """A state as optax makes it, with slots, and for each row of them an array per bucket.

    A bucket in which a row has no slot has none. `owners` is a mark of who owns what.
    """

    inner: Any
    rows: tuple[tuple[jax.Array | None, ...], ...]
    owners: str = field(metadata={"static": True})


@dataclass(frozen=True, eq=False)
class StateForm:
    """The form of a state: its tree, and for each of its leaves a slot or the type."""

    tree: Any
    leaves: tuple[Slot | Any, ...]
    dtypes: tuple[Any, ...]  # of each row
    types: tuple[Any, ...]  # of whole leaves

    def buckets(self, layout: Owned, row: int) -> tuple[bool, ...]:
        """In which buckets a row has slots."""
        found = {leaf.leaf for leaf in self.leaves if isinstance(leaf, Slot) and leaf.row == row}
        return tuple(not found.isdisjoint(bucket.members) for bucket in layout.buckets)


def form_of(
    init: Callable[[Any], Any], layout: Owned, types: Sequence[Any], tree: Any
) -> StateForm:
    """The form of the state that `init` makes for parameters of such `types` that lie so.

    Tensors tell by their length which leaf they belong to, if every leaf has one of its own.
    """
    marked = [
        jax.ShapeDtypeStruct((*(1 for _ in t.shape[1:]), _NO_SIZE + i), t.dtype)
        if i in layout.home
        else t
        for i, t in enumerate(types)
    ]
    whole, state_tree = jax.tree.flatten(jax.eval_shape(init, tree.unflatten(types)))
    told, other_tree = jax.tree.flatten(jax.eval_shape(init, tree.unflatten(marked)))
    if state_tree != other_tree:
        raise NotShardableError(
            "this optimizer cannot be sharded: the form of its state depends on the size of a "
            "tensor. Give masks as pytrees of booleans, or as functions of names or of the number "
            "of dimensions"
        )
    leaf_of = {marked[i].shape: i for i in layout.home}
    rows: dict[tuple[int, Any], int] = {}
    counts: dict[tuple[int, Any], int] = {}
    leaves: list[Any] = []
    for found, mark in zip(whole, told, strict=True):
        leaf = leaf_of.get(mark.shape)
        expected = found.shape if leaf is None else types[leaf].shape
        if found.shape != expected or (leaf is None and mark.shape != found.shape):
            raise NotShardableError(
                f"this optimizer cannot be sharded: it keeps a state of shape {found.shape}, which "
                "is not that of a tensor, and depends on one"
            )
        if leaf is None:
            leaves.append(found)
            continue
        kind = (leaf, found.dtype)
        counts[kind] = counts.get(kind, -1) + 1
        leaves.append(Slot(rows.setdefault((counts[kind], found.dtype), len(rows)), leaf))
    return StateForm(state_tree, tuple(leaves), tuple(dtype for _, dtype in rows), tuple(whole))


def rows_of(state: ShardedState, layout: Owned) -> list[list[jax.Array]]:
    """The arrays of every row, with zeros for buckets in which it has no slot."""
    return [
        [
            jnp.zeros(bucket.shape, _dtype(row)) if array is None else array
            for array, bucket in zip(row, layout.buckets, strict=True)
        ]
        for row in state.rows
    ]


def _dtype(row: Sequence[jax.Array | None]) -> Any:
    return next(array.dtype for array in row if array is not None)
