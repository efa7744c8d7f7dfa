"""An optimizer with a replicated state, with the methods of `ShardedOptimizer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from ftmesh.collectives.gradients import ReducedGradients, local_value_and_grad
from ftmesh.errors import ArgumentError
from ftmesh.execute.types import AxisName, PyTree


@dataclass(frozen=True)
class ReplicatedOptimizer:
    """An optax transformation that every rank runs on the mean of all gradients.

    Attributes:
        transformation: The optax transformation.
        mean: Averages gradients over all ranks.
        axis_name: The mesh axis of the ranks.
        mark: `ftmesh.collectives.with_mean_gradients` with all arguments but the parameters. If
            given, gradients are averaged during the backward pass of `value_and_grad`.
    """

    transformation: optax.GradientTransformation
    mean: Callable[[PyTree], PyTree]
    axis_name: AxisName
    mark: Callable[[PyTree], PyTree] | None = None

    def init(self, params: PyTree) -> PyTree:
        """Return the first state."""
        return self.transformation.init(params)

    def value_and_grad(
        self, loss: Callable[..., Any], *, has_aux: bool = False
    ) -> Callable[..., Any]:
        """Differentiate `loss` at this rank, as `jax.value_and_grad` does.

        Returns:
            A function that returns the loss of this rank and gradients for `update`: with `mark`
            `ReducedGradients`, otherwise the gradients of this rank alone.
        """
        mark = self.mark
        if mark is None:
            local: Callable[..., Any] = local_value_and_grad(loss, self.axis_name, has_aux=has_aux)
            return local

        def run(params: PyTree, *args: Any) -> Any:
            value, grads = jax.value_and_grad(
                lambda params: loss(mark(params), *args), has_aux=has_aux
            )(params)
            return value, ReducedGradients(grads)

        return run

    def update(
        self, grads: PyTree, state: PyTree, params: PyTree, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        """Return the updates and the new state."""
        if isinstance(grads, ReducedGradients):
            if grads.is_sharded:
                raise ArgumentError(
                    "these gradients are sharded, and this optimizer takes replicated ones: call "
                    "value_and_grad and update of the same optimizer"
                )
            grads = grads.tree
        else:
            grads = self.mean(grads)
        transform = optax.with_extra_args_support(self.transformation).update
        updates, state = transform(grads, state, params, **extra_args)
        return updates, state

    def apply(
        self, grads: PyTree, state: PyTree, params: PyTree, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        """Return the new parameters and the new state."""
        updates, state = self.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    def specs(self, params: PyTree) -> PyTree:
        """Return the `PartitionSpec` of every leaf of the state: all are replicated."""
        return jax.tree.map(lambda _: PartitionSpec(), jax.eval_shape(self.init, params))
