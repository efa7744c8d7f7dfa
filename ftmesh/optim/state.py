"""The state of a sharded optimizer.

It has the tree that optax gives it. In place of a tensor of the shape of a parameter it has the
array in which `ftmesh.layout.flat_shards` stores that tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ftmesh.errors import ArgumentError
from ftmesh.layout.flat_shards import LeafLayout, TreeLayout, flatten_tensor, unflatten_tensor
from ftmesh.optim.op_graph import NotShardableError

_FIRST_LENGTH = 1_000_003  # longer than the dimensions that an optimizer names itself


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
    """Find which leaves of the state that `init` returns belong to which parameter.

    `init` is traced with a length for each parameter that no other has, so a leaf of the state
    shows by its length which parameter it belongs to. A state that depends on the shapes of
    parameters in another way raises NotShardableError.
    """
    marked = [
        jax.ShapeDtypeStruct((*(1 for _ in t.shape[1:]), _FIRST_LENGTH + i), t.dtype)
        if i in layout.cut
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
    param_of = {marked[i].shape: i for i in layout.cut}
    params: list[int | None] = []
    for leaf, mark in zip(leaves, marked_leaves, strict=True):
        param = param_of.get(mark.shape)
        expected = leaf.shape if param is None else types[param].shape
        if leaf.shape != expected or (param is None and mark.shape != leaf.shape):
            raise NotShardableError(
                f"this optimizer cannot be sharded: it keeps a state of shape {leaf.shape}, which "
                "depends on the shape of a tensor and is not that shape"
            )
        params.append(param)
    return StateForm(state_tree, tuple(params), tuple(leaves), layout)
