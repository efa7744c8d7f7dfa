"""The optimizer that keeps its whole state at every rank, behind the door of the sharded one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax
from jax.sharding import PartitionSpec

from ftmesh.train.gradients import backward_order


@dataclass(frozen=True)
class PlainOptimizer:
    """An optax transformation as it is; `mean` makes the mean over all ranks, `num_ranks` of them.

    With `marks`, which is `with_mean_gradients` with all arguments but the parameters and `order`,
    the means are made during the backward pass of `value_and_grad`. The methods are those of
    `ftmesh.train.ShardedOptimizer`.
    """

    transformation: optax.GradientTransformation
    mean: Callable[[Any], Any]
    num_ranks: int
    marks: Callable[..., Any] | None = None

    def init(self, params: Any) -> Any:
        """The first state."""
        return self.transformation.init(params)

    def value_and_grad(self, loss: Callable[[Any], Any], *, has_aux: bool = False) -> Any:
        """As `jax.value_and_grad`: the value of a rank, and gradients for `update`."""
        marks = self.marks
        if marks is None:
            return jax.value_and_grad(loss, has_aux=has_aux)

        def run(params: Any) -> Any:
            order = backward_order(loss, params, has_aux=has_aux)
            marked = lambda params: loss(marks(params, order=order))  # noqa: E731
            return jax.value_and_grad(marked, has_aux=has_aux)(params)

        return run

    def update(
        self,
        grads: Any,
        state: Any,
        params: Any,
        *,
        reduce: Literal["mean", "sum", "none"] | None = None,
        **extra: Any,
    ) -> tuple[Any, Any]:
        """The new parameters and the new state, from the gradients that `value_and_grad` makes.

        For those of any other origin `reduce` says what is made of them.
        """
        if reduce is None:
            reduce = "none" if self.marks else "mean"
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
