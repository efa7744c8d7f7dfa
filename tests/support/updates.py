"""Parameters, optimizers and gradients, and the weights that they must give."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ftmesh.optim import clip_by_global_norm, lamb, lars, matrix_mask
from ftmesh.testing import on_one_device

RNG = np.random.default_rng(0)
PARAMS = {
    "stem": RNG.normal(size=(3, 3, 16, 128)).astype(np.float32),
    "dense": {
        "kernel": RNG.normal(size=(45, 31)).astype(np.float32),
        "bias": RNG.normal(size=31).astype(np.float32),
    },
    "gain": np.float32(2),
    "empty": np.zeros((0, 3), np.float32),
}
SMALL_PARAMS = PARAMS["dense"]
LR_SCHEDULE = optax.linear_schedule(0.1, 0.02, 5)
OPTIMIZERS = {
    "sgd": optax.sgd(LR_SCHEDULE, momentum=0.9, nesterov=True),
    "adam": optax.adamw(LR_SCHEDULE, weight_decay=0.1, mask=matrix_mask),
    "lars": lars(LR_SCHEDULE, weight_decay=0.1, weight_decay_mask=matrix_mask),
    "lamb": optax.chain(
        clip_by_global_norm(1.0), lamb(LR_SCHEDULE, weight_decay=0.1, weight_decay_mask=matrix_mask)
    ),
}
STEPS = 2


def gradients(params, num_ranks, step):
    """Return a gradient for every rank; their sums are exact in float32."""
    rng = np.random.default_rng(step + 1)

    def random(leaf):
        return rng.integers(-50, 50, (num_ranks, *np.shape(leaf))).astype(np.float32) / 16

    return jax.tree.map(random, params)


def train_unsharded(transformation, params, num_ranks, steps=STEPS):
    state = transformation.init(params)
    for step in range(steps):
        grads = gradients(params, num_ranks, step)
        mean = jax.tree.map(lambda g: jnp.asarray(g.sum(axis=0) / num_ranks), grads)
        updates, state = transformation.update(mean, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_close(got, want, *, rtol=1e-5):
    """Assert equality up to a few roundings of float32."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), got, want)


def take_rank(rank, tree):
    return jax.tree.map(lambda leaf: leaf[rank], tree)


def apply_update(optimizer, grads, params=None, state=None):
    """Return the new weights and the new state of a rank."""
    params = SMALL_PARAMS if params is None else params
    state = optimizer.init(params) if state is None else state
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def params_after_step(optimizer, num_ranks):
    """Return the weights of rank 7 after a step."""
    run = on_one_device(lambda grads: apply_update(optimizer, grads)[0])
    return take_rank(7, run(gradients(SMALL_PARAMS, num_ranks, 0)))


def loss_with_gradients(grads):
    """Return a loss that has these gradients."""
    return lambda params: sum(
        jnp.vdot(g, p) for g, p in zip(*map(jax.tree.leaves, (grads, params)), strict=True)
    )
