"""The structure of a sharded optimizer state, and one rank's rows of a pytree.

A sharded state has the structure that optax gives it, with a `Slot` in place of every tensor that
has the size of a parameter. All tensors of a kind, such as the first moments of all parameters,
share a row of arrays, one array per bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ftmesh.layout.owned_buckets import OwnedLayout, ShardedState, Slot
from ftmesh.optim.op_graph import NotShardableError


@dataclass(frozen=True, eq=False)
class StateForm:
    """The structure of a sharded state."""

    tree: Any  # as optax builds it
    leaves: tuple[Slot | Any, ...]  # slots, and the types of leaves that are not sharded
    dtypes: tuple[Any, ...]  # of the rows
    types: tuple[Any, ...]  # of all leaves, before sharding

    def buckets(self, layout: OwnedLayout, row: int) -> tuple[bool, ...]:
        """Return which buckets contain a slot of `row`."""
        leaves = {leaf.leaf for leaf in self.leaves if isinstance(leaf, Slot) and leaf.row == row}
        return tuple(not leaves.isdisjoint(bucket.members) for bucket in layout.buckets)


def state_form(
    init: Callable[[Any], Any], layout: OwnedLayout, types: Sequence[Any], tree: Any
) -> StateForm:
    """Find which leaves of the state that `init` returns belong to which parameter.

    `init` is traced with a length for each parameter that no other has, so a leaf of the state
    shows by its length which parameter it belongs to. A state that depends on the shapes of
    parameters in another way raises NotShardableError.
    """
    marked = [
        jax.ShapeDtypeStruct((*(1 for _ in t.shape[1:]), _FIRST_LENGTH + i), t.dtype)
        if i in layout.location
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
    param_of = {marked[i].shape: i for i in layout.location}
    rows: dict[tuple[int, Any], int] = {}
    counts: dict[tuple[int, Any], int] = {}
    slots: list[Any] = []
    for leaf, mark in zip(leaves, marked_leaves, strict=True):
        param = param_of.get(mark.shape)
        expected = leaf.shape if param is None else types[param].shape
        if leaf.shape != expected or (param is None and mark.shape != leaf.shape):
            raise NotShardableError(
                f"this optimizer cannot be sharded: it keeps a state of shape {leaf.shape}, which "
                "depends on the shape of a tensor and is not that shape"
            )
        if param is None:
            slots.append(leaf)
            continue
        kind = (param, leaf.dtype)
        counts[kind] = counts.get(kind, -1) + 1
        slots.append(Slot(rows.setdefault((counts[kind], leaf.dtype), len(rows)), param))
    return StateForm(state_tree, tuple(slots), tuple(dtype for _, dtype in rows), tuple(leaves))


_FIRST_LENGTH = 1_000_003  # longer than the dimensions that an optimizer names itself


def dense_rows(state: ShardedState, layout: OwnedLayout) -> list[list[jax.Array]]:
    """Return the arrays of every row, with zeros for the buckets that have none."""
    return [
        [
            jnp.zeros(bucket.shape, dtype) if array is None else array
            for array, bucket in zip(row, layout.buckets, strict=True)
        ]
        for row in state.rows
        for dtype in [next(array.dtype for array in row if array is not None)]
    ]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OwnedTree:
    """What a rank has of a pytree."""

    rows: list[jax.Array]  # of every bucket
    replicated: dict[int, Any]  # the leaves that are in no bucket, by their position

    def dtypes(self, layout: OwnedLayout) -> dict[int, Any]:
        """Return the dtype of every leaf."""
        dtypes = {i: x.dtype for i, x in self.replicated.items()}
        for bucket, row in zip(layout.buckets, self.rows, strict=True):
            dtypes |= dict.fromkeys(bucket.members, row.dtype)
        return dtypes
