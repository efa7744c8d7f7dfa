"""LARS, LAMB and clipping as plain optax transformations; an optimizer with a replicated state.

LARS and LAMB are as their papers define them. They need norms of full tensors; a `ShardedOptimizer`
computes those of all tensors in one small all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from ftmesh.collectives.gradients import ReducedGradients, local_value_and_grad
from ftmesh.errors import ArgumentError
from ftmesh.execute.types import AxisName, PyTree

Mask: TypeAlias = Any  # a pytree of booleans, or a function from parameters to one
LearningRate: TypeAlias = float | Callable[[Any], Any]


def lars(
    learning_rate: LearningRate,
    *,
    weight_decay: float = 0.0,
    weight_decay_mask: Mask = True,
    trust_coefficient: float = 0.001,
    trust_ratio_mask: Mask = None,
    momentum: float = 0.9,
    nesterov: bool = False,
    eps: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Return LARS as defined by You, Gitman and Ginsburg (2017).

    A tensor w with gradient g moves by ``v = momentum * v + rate * ratio * (g + decay * w)`` where
    ``ratio = trust_coefficient * |w| / (|g| + decay * |w| + eps)``, or 1 where a norm is zero.
    (`optax.lars` divides by ``|g + decay * w|`` instead.)

    Args:
        learning_rate: A number, or a learning-rate schedule.
        weight_decay: The factor ``decay``.
        weight_decay_mask: Which tensors to decay, as in optax: booleans in a pytree like the
            parameters or a prefix of it, or a function from parameters to that. `matrix_mask`
            leaves out biases and the scales of norms.
        trust_coefficient: The factor of the ratio.
        trust_ratio_mask: Which tensors to scale by their ratio; the default is `weight_decay_mask`.
        momentum: The factor of the momentum.
        nesterov: Whether to use Nesterov momentum.
        eps: Added to the divisor of the ratio.
    """

    def ratio(grad_norm: Any, norm: Any, decay: float) -> Any:
        return trust_coefficient * norm / (grad_norm + decay * norm + eps)

    return optax.chain(
        _scale_by_ratio(
            ratio, weight_decay, weight_decay_mask, trust_ratio_mask, decay_first=False
        ),
        optax.scale_by_learning_rate(learning_rate),
        optax.trace(decay=momentum, nesterov=nesterov),
    )


def lamb(
    learning_rate: LearningRate,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    weight_decay_mask: Mask = True,
    trust_ratio_mask: Mask = None,
) -> optax.GradientTransformationExtraArgs:
    """Return LAMB as defined by You and others (2020): Adam's update, scaled layer by layer.

    A tensor w with Adam's update u moves by ``rate * ratio * (u + decay * w)``, with
    ``ratio = |w| / |u + decay * w|``, or 1 where either norm is zero.

    Args:
        learning_rate: A number, or a learning-rate schedule.
        b1, b2, eps: As for Adam.
        weight_decay, weight_decay_mask, trust_ratio_mask: As for `lars`.
    """
    return optax.chain(
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
        _scale_by_ratio(
            lambda update_norm, norm, decay: norm / update_norm,
            weight_decay,
            weight_decay_mask,
            trust_ratio_mask,
            decay_first=True,
        ),
        optax.scale_by_learning_rate(learning_rate),
    )


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that scales updates down to a global norm of `max_norm`."""

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> Any:
        norm = jnp.sqrt(jnp.sum(jnp.stack([_square_sum(u) for u in jax.tree.leaves(updates)])))
        scale = jnp.where(norm > max_norm, max_norm / norm, 1.0)
        return jax.tree.map(lambda u: u * scale.astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def matrix_mask(params: PyTree) -> PyTree:
    """Return True for tensors of two or more dimensions: all but biases and scales of norms."""
    return jax.tree.map(lambda x: jnp.ndim(x) > 1, params)


def _square_sum(x: Any) -> jax.Array:
    """Return the squared norm of an array, in float32 or wider."""
    magnitude = jnp.abs(x)
    dtype = jnp.promote_types(magnitude.dtype, jnp.float32)
    return jnp.sum(jnp.square(magnitude.astype(dtype)))


def _scale_by_ratio(
    ratio: Callable[[Any, Any, float], Any],
    weight_decay: float,
    weight_decay_mask: Mask,
    trust_ratio_mask: Mask,
    *,
    decay_first: bool,
) -> optax.GradientTransformationExtraArgs:
    """Add weight decay, and scale each update by `ratio` of its norm and the tensor's own.

    With `decay_first` the norm is that of the update with its decay, otherwise without.
    """
    if trust_ratio_mask is None:
        trust_ratio_mask = weight_decay_mask

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> Any:
        if params is None:
            raise ValueError("layerwise rates need the parameters: update(grads, state, params)")
        decays, adapts = (_full_mask(m, params) for m in (weight_decay_mask, trust_ratio_mask))

        def scale(u: Any, w: Any, decays: bool, adapts: bool) -> Any:
            decayed = u + weight_decay * w if decays else u
            if not adapts:
                return decayed
            update_norm = jnp.sqrt(_square_sum(decayed if decay_first else u))
            norm = jnp.sqrt(_square_sum(w))
            factor = ratio(update_norm, norm, weight_decay if decays else 0.0)
            is_known = (update_norm > 0) & (norm > 0)
            return decayed * jnp.where(is_known, factor, 1).astype(decayed.dtype)

        return jax.tree.map(scale, updates, params, decays, adapts), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _full_mask(mask: Mask, params: PyTree) -> PyTree:
    mask = mask(params) if callable(mask) else mask
    return jax.tree.map(lambda on, part: jax.tree.map(lambda _: bool(on), part), mask, params)


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
