"""Names the tensors of a state, the same whether the optimizer is sharded or replicated.

A name is the path to a tensor in the tree that optax builds: ``optimizer/0/mu/layer_1/bias``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ftmesh.errors import ArgumentError
from ftmesh.layout.owned_buckets import OwnedLayout, ShardedState, Slot

Path = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class ShardedPart:
    """A sharded state inside another state: its path there, and its layout."""

    path: Path
    state: ShardedState
    layout: OwnedLayout

    @staticmethod
    def find(path: Path, state: ShardedState, layouts: Sequence[OwnedLayout]) -> ShardedPart:
        """Return the part with the layout that `state` was sharded for."""
        for layout in layouts:
            if layout.fingerprint == state.owners:
                return ShardedPart(path, state, layout)
        raise ArgumentError(
            f"no layout is given for {path_name(path) or 'this state'}, which is sharded: give "
            "layouts=[optimizer.layout(params)]"
        )

    @property
    def leaves(self) -> list[tuple[str, Slot | Any]]:
        """Its slots and replicated arrays, by name."""
        leaves = jax.tree_util.tree_leaves_with_path(self.state.inner, is_leaf=is_slot)
        return [(path_name((*self.path, *path)), leaf) for path, leaf in leaves]

    def type_of(self, leaf: Slot | Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return shape and dtype of the tensor in a slot, or of a replicated array."""
        if not isinstance(leaf, Slot):
            return shape_and_dtype(leaf)
        bucket, _ = self.layout.location[leaf.leaf]
        array = self.state.rows[leaf.row][bucket]
        if array is None:
            raise ArgumentError(
                f"row {leaf.row} of a sharded state has no array for bucket {bucket}"
            )
        return self.layout.types[leaf.leaf].shape, np.dtype(array.dtype)


def split_state(state: Any, layouts: Sequence[OwnedLayout]) -> list[ShardedPart | tuple[str, Any]]:
    """Return the sharded states in a state, and its other leaves by name."""
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_sharded)
    return [
        ShardedPart.find(path, leaf, layouts) if is_sharded(leaf) else (path_name(path), leaf)
        for path, leaf in leaves
    ]


def describe_tensors(state: Any, layouts: Sequence[OwnedLayout] = ()) -> dict[str, str]:
    """Return dtype and shape of every tensor as text, as `Manifest.describe_tensors` does."""
    types: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
    for part in split_state(state, layouts):
        if isinstance(part, ShardedPart):
            types |= {name: part.type_of(leaf) for name, leaf in part.leaves}
        else:
            types[part[0]] = shape_and_dtype(part[1])
    return {name: f"{dtype}{list(shape)}" for name, (shape, dtype) in types.items()}


def shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype of an array or a number; for a random key, those of its bits."""
    if is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return np.shape(leaf), np.dtype(leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf))


def check_unique(names: Iterable[str]) -> None:
    """Raise ArgumentError if two tensors have the same name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ArgumentError(f"two tensors of the state are called {name}: rename one of them")
        seen.add(name)


def path_name(path: Path) -> str:
    name: str = jax.tree_util.keystr(path, simple=True, separator="/")
    return name


def is_sharded(leaf: Any) -> bool:
    return isinstance(leaf, ShardedState)


def is_slot(leaf: Any) -> bool:
    return isinstance(leaf, Slot)


def is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
