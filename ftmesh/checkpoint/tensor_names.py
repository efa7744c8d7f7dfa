"""Naming: the tensors of a state by name, the same whether the optimizer is sharded or whole.

A name is the way to a tensor in the state's tree, as optax has it: ``optimizer/0/mu/layer_1/bias``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ftmesh.errors import ArgumentError
from ftmesh.layout.owned_buckets import Owned
from ftmesh.optim.state import ShardedState, Slot

Path = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Sharded:
    """A sharded state that is part of another, where it is in that, and how it lies."""

    path: Path
    state: ShardedState
    layout: Owned

    @staticmethod
    def of(path: Path, state: ShardedState, layouts: Sequence[Owned]) -> Sharded:
        """With the one of the layouts that the state is for."""
        for layout in layouts:
            if layout.fingerprint == state.owners:
                return Sharded(path, state, layout)
        raise ArgumentError(
            f"{named(path) or 'this state'} is sharded for owners of which no layout is given: "
            "give layouts=[optimizer.layout(params)]"
        )

    @property
    def leaves(self) -> list[tuple[str, Slot | Any]]:
        """What it holds by name: slots, and arrays that are in none."""
        found = jax.tree_util.tree_leaves_with_path(self.state.inner, is_leaf=is_slot)
        return [(named((*self.path, *path)), leaf) for path, leaf in found]

    def type_in(self, slot: Slot) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and dtype of the tensor in a slot."""
        at, _ = self.layout.home[slot.leaf]
        array = self.state.rows[slot.row][at]
        if array is None:
            raise ArgumentError(f"row {slot.row} of a sharded state has no array for bucket {at}")
        return self.layout.types[slot.leaf].shape, np.dtype(array.dtype)


def parts_of(state: Any, layouts: Sequence[Owned]) -> list[Sharded | tuple[str, Any]]:
    """The sharded states in a state, and its other leaves by name."""
    found = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_sharded)
    return [
        Sharded.of(path, leaf, layouts) if is_sharded(leaf) else (named(path), leaf)
        for path, leaf in found
    ]


def about(state: Any, layouts: Sequence[Owned] = ()) -> dict[str, str]:
    """The tensors of a state in words, by name; as `Index.about` has those of a checkpoint."""
    told: dict[str, str] = {}
    for part in parts_of(state, layouts):
        for name, leaf in part.leaves if isinstance(part, Sharded) else [part]:
            if isinstance(leaf, Slot) and isinstance(part, Sharded):
                shape, dtype = part.type_in(leaf)
            else:
                shape, dtype = type_of(leaf)
            told[name] = f"{dtype}{list(shape)}"
    return told


def type_of(leaf: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of an array or a number; those of its bits, for a random key."""
    if is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return np.shape(leaf), np.dtype(leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf))


def check_names(names: Iterable[str]) -> None:
    """Refuses two tensors of one name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ArgumentError(f"two tensors of the state are called {name}: rename one of them")
        seen.add(name)


def named(path: Path) -> str:
    """A way through a tree as a name."""
    name: str = jax.tree_util.keystr(path, simple=True, separator="/")
    return name


def is_sharded(leaf: Any) -> bool:
    """Whether this is a whole sharded state."""
    return isinstance(leaf, ShardedState)


def is_slot(leaf: Any) -> bool:
    """Whether this stands for a tensor of a sharded state."""
    return isinstance(leaf, Slot)


def is_key(leaf: Any) -> bool:
    """Whether this is a random key."""
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
