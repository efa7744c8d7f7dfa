"""Names the tensors of a state, the same whether the optimizer is sharded or replicated.

A name is the path to a tensor in the tree that optax builds: ``optimizer/0/mu/layer_1/bias``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from ftmesh.errors import ArgumentError

Path = tuple[Any, ...]


class NamedLeaf(NamedTuple):
    """A leaf of a state, and the shape of the tensor that it stores."""

    name: str
    leaf: Any
    shape: tuple[int, ...]

    @property
    def is_flat(self) -> bool:
        """True if the tensor is stored flat: see `ftmesh.layout.flat_shards`."""
        return shape_and_dtype(self.leaf)[0] != self.shape


def named_leaves(state: Any, full_types: Any = None) -> list[NamedLeaf]:
    """Return the leaves of a state, with the shapes in `full_types` where those are given."""
    full = {
        path_name(path): np.shape(type_)
        for path, type_ in jax.tree_util.tree_leaves_with_path(full_types)
    }
    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = path_name(path)
        leaves.append(NamedLeaf(name, leaf, full.get(name, shape_and_dtype(leaf)[0])))
    check_unique(name for name, _, _ in leaves)
    if unknown := full.keys() - {name for name, _, _ in leaves}:
        raise ArgumentError(f"full_types have {min(unknown)}, and the state has not")
    return leaves


def describe_tensors(state: Any, full_types: Any = None) -> dict[str, str]:
    """Return dtype and shape of every tensor as text, as `Manifest.describe_tensors` does."""
    return {
        name: f"{shape_and_dtype(leaf)[1]}{list(shape)}"
        for name, leaf, shape in named_leaves(state, full_types)
    }


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


def is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
