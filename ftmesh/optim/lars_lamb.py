"""Layerwise: LARS and LAMB as their papers have them, and clipping by global norm.

These need norms of whole tensors. They are optax transformations like any other; where a
`ShardedOptimizer` runs them, sums over tensors are made over all ranks, those of all tensors in one
small sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def lars(
    learning_rate: Any,
    *,
    weight_decay: float = 0.0,
    weight_decay_mask: Any = True,
    trust_coefficient: float = 0.001,
    trust_ratio_mask: Any = None,
    momentum: float = 0.9,
    nesterov: bool = False,
    eps: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """LARS, as You, Gitman and Ginsburg (2017) have it.

    A tensor w with gradient g moves by ``v = momentum * v + rate * ratio * (g + decay * w)`` where
    ``ratio = trust_coefficient * |w| / (|g| + decay * |w| + eps)``, or 1 where a norm is zero.
    (`optax.lars` has ``|g + decay * w|`` in its place.)

    Masks are as in optax: booleans in a pytree like the parameters, or a prefix of it, or a
    function from parameters to that. Tensors out of `weight_decay_mask` are not decayed, those out
    of `trust_ratio_mask` have ratio 1; where the latter is not given, it is the former.
    `learning_rate` is a number or an lr_schedule.
    """

    def ratio(grad_norm: Any, norm: Any, decay: float) -> Any:
        return trust_coefficient * norm / (grad_norm + decay * norm + eps)

    return optax.chain(
        _scaled(ratio, weight_decay, weight_decay_mask, trust_ratio_mask, decay_first=False),
        optax.scale_by_learning_rate(learning_rate),
        optax.trace(decay=momentum, nesterov=nesterov),
    )


def lamb(
    learning_rate: Any,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    weight_decay_mask: Any = True,
    trust_ratio_mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """LAMB, as You and others (2020) have it: Adam's update u, decayed, and scaled layer by layer.

    A tensor w moves by ``rate * ratio * (u + decay * w)``, ``ratio = |w| / |u + decay * w|``, or 1
    where either is zero. Masks are as for `lars`.
    """

    def ratio(update_norm: Any, norm: Any, decay: float) -> Any:
        return norm / update_norm

    return optax.chain(
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
        _scaled(ratio, weight_decay, weight_decay_mask, trust_ratio_mask, decay_first=True),
        optax.scale_by_learning_rate(learning_rate),
    )


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Scales updates down to a norm of `max_norm`, taken over all tensors, where it is larger."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        norm = jnp.sqrt(jnp.sum(jnp.stack([square_sum(u) for u in jax.tree.leaves(updates)])))
        scale = jnp.where(norm > max_norm, max_norm / norm, 1.0)
        return jax.tree.map(lambda u: u * scale.astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def matrices(params: Any) -> Any:
    """A mask: whether a tensor has two dimensions or more, as biases and norm scales have not."""
    return jax.tree.map(lambda x: jnp.ndim(x) > 1, params)


def square_sum(x: Any) -> jax.Array:
    """The square of an array's norm, in float32 or wider."""
    wide = jnp.abs(x)
    return jnp.sum(jnp.square(wide.astype(jnp.promote_types(wide.dtype, jnp.float32))))


def _scaled(
    ratio: Callable[[Any, Any, float], Any],
    weight_decay: float,
    weight_decay_mask: Any,
    trust_ratio_mask: Any,
    *,
    decay_first: bool,
) -> optax.GradientTransformationExtraArgs:
    """Weight decay, and each tensor's update scaled by a ratio of its norm and the tensor's own.

    With `decay_first` that norm is of the update as it is decayed, otherwise as it comes in.
    """
    if trust_ratio_mask is None:
        trust_ratio_mask = weight_decay_mask

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("layerwise rates need the parameters: update(grads, state, params)")
        decays, adapts = (_mask(m, params) for m in (weight_decay_mask, trust_ratio_mask))

        def one(u: Any, w: Any, decays: bool, adapts: bool) -> Any:
            decayed = u + weight_decay * w if decays else u
            if not adapts:
                return decayed
            update_norm = jnp.sqrt(square_sum(decayed if decay_first else u))
            norm = jnp.sqrt(square_sum(w))
            scale = ratio(update_norm, norm, weight_decay if decays else 0.0)
            is_known = (update_norm > 0) & (norm > 0)
            return decayed * jnp.where(is_known, scale, 1).astype(decayed.dtype)

        return jax.tree.map(one, updates, params, decays, adapts), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _mask(mask: Any, params: Any) -> Any:
    """A boolean for each parameter."""
    mask = mask(params) if callable(mask) else mask
    return jax.tree.map(lambda on, part: jax.tree.map(lambda _: bool(on), part), mask, params)
