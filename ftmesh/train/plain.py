"""The optimizer that keeps its whole state at every rank, behind the door of the sharded one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax
from jax.sharding import PartitionSpec


@dataclass(frozen=True)
class PlainOptimizer:
    """An optax transformation as it is; `mean` makes the mean over all ranks, `num_ranks` of them.

    The methods are those of `ftmesh.train.ShardedOptimizer`.
    """

    transformation: optax.GradientTransformation
    mean: Callable[[Any], Any]
    num_ranks: int

    def init(self, params: Any) -> Any:
        """The first state."""
        return self.transformation.init(params)

    def update(
        self,
        grads: Any,
        state: Any,
        params: Any,
        *,
        reduce: Literal["mean", "sum", "none"] = "mean",
        **extra: Any,
    ) -> tuple[Any, Any]:
        """The new parameters and the new state, from the gradients of every rank."""
        if reduce != "none":
            grads = self.mean(grads)
        if reduce == "sum":
            grads = jax.tree.map(lambda g: g * self.num_ranks, grads)
        transform = optax.with_extra_args_support(self.transformation).update
        updates, state = transform(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    def specs(self, params: Any) -> Any:
        """How the state lies on a mesh: whole, everywhere."""
        return jax.tree.map(lambda _: PartitionSpec(), jax.eval_shape(self.init, params))

    def gather_state(self, state: Any, params: Any) -> Any:
        """The state, which is whole already."""
        return state

    def shard_state(self, state: Any, params: Any) -> Any:
        """The inverse of that."""
        return state
