"""An optimizer state whose large tensors are sharded over the owners of a plan's chunks.

`ftmesh.optim` computes with these states and `ftmesh.checkpoint` saves them; neither optax nor
Flax is needed to hold one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax


@jax.tree_util.register_static
@dataclass(frozen=True)
class Slot:
    """Stands in a state's tree for the tensor of parameter `leaf`, stored in `rows[row]`."""

    row: int
    leaf: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShardedState:
    """An optax state with its large tensors replaced by slots.

    Attributes:
        inner: The state's tree as optax builds it, with a `Slot` for every sharded tensor.
        rows: One tuple per kind of tensor, such as the first moments of all parameters. It has one
            array per bucket, or None where the bucket holds no tensor of that kind.
        owners: The fingerprint of the layout, which identifies who owns what.
    """

    inner: Any
    rows: tuple[tuple[jax.Array | None, ...], ...]
    owners: str = field(metadata={"static": True})
