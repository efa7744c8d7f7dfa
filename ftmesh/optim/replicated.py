"""Whole: the optimizer that keeps its whole state at every rank, behind the sharded one's door."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from ftmesh.collectives.gradients import Means, value_and_own_grad
from ftmesh.errors import ArgumentError


@dataclass(frozen=True)
class WholeOptimizer:
    """An optax transformation as it is; `mean` makes the mean of gradients over all ranks.

    With `mark`, which is `with_mean_gradients` with all arguments but the parameters, that is done
    during the backward pass of `value_and_grad`. The methods are those of
    `ftmesh.optim.ShardedOptimizer`.
    """

    transformation: optax.GradientTransformation
    mean: Callable[[Any], Any]
    axis_name: Any
    mark: Callable[[Any], Any] | None = None

    def init(self, params: Any) -> Any:
        """The first state."""
        return self.transformation.init(params)

    def value_and_grad(self, loss: Callable[..., Any], *, has_aux: bool = False) -> Any:
        """As `jax.value_and_grad`: the value of a rank, and gradients for `update`.

        With `mark` those are `Means`; else they are the rank's own.
        """
        mark = self.mark
        if mark is None:
            return value_and_own_grad(loss, self.axis_name, has_aux=has_aux)

        def run(params: Any, *args: Any) -> Any:
            value, tree = jax.value_and_grad(
                lambda params: loss(mark(params), *args), has_aux=has_aux
            )(params)
            return value, Means(tree)

        return run

    def update(self, grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        """Updates and the new state, from the gradients of every rank."""
        if isinstance(grads, Means):
            if grads.owners:
                raise ArgumentError("these gradients are sharded, and this optimizer's are whole")
            grads = grads.tree
        else:
            grads = self.mean(grads)
        transform = optax.with_extra_args_support(self.transformation).update
        updates, state = transform(grads, state, params, **extra)
        return updates, state

    def specs(self, params: Any) -> Any:
        """How the state lies on a mesh: whole, everywhere."""
        return jax.tree.map(lambda _: PartitionSpec(), jax.eval_shape(self.init, params))
