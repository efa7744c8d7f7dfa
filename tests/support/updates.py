"""Parameters, optimizers and gradients to update them with, and what that must come to."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ftmesh.optim import clip_by_global_norm, lamb, lars, matrices
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
FEW = PARAMS["dense"]
RATE = optax.linear_schedule(0.1, 0.02, 5)
OPTIMIZERS = {
    "sgd": optax.sgd(RATE, momentum=0.9, nesterov=True),
    "adam": optax.adamw(RATE, weight_decay=0.1, mask=matrices),
    "lars": lars(RATE, weight_decay=0.1, weight_decay_mask=matrices),
    "lamb": optax.chain(
        clip_by_global_norm(1.0), lamb(RATE, weight_decay=0.1, weight_decay_mask=matrices)
    ),
}
STEPS = 2


def gradients(params, num_ranks, step):
    """A gradient for every rank, as if from a batch of its own; their sums are exact."""
    rng = np.random.default_rng(step + 1)

    def one(leaf):
        return rng.integers(-50, 50, (num_ranks, *np.shape(leaf))).astype(np.float32) / 16

    return jax.tree.map(one, params)


def unsharded(transformation, params, num_ranks, steps=STEPS):
    state = transformation.init(params)
    for step in range(steps):
        grads = gradients(params, num_ranks, step)
        mean = jax.tree.map(lambda g: jnp.asarray(g.sum(axis=0) / num_ranks), grads)
        updates, state = transformation.update(mean, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_close(got, want, *, rtol=1e-5):
    """A few roundings of float32: of norms in another order, and of fused operations."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), got, want)


def at(rank, params):
    return jax.tree.map(lambda leaf: leaf[rank], params)


def stepped(optimizer, grads, params=None, state=None):
    """New weights and the new state of a rank."""
    params = FEW if params is None else params
    state = optimizer.init(params) if state is None else state
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def one_step(optimizer, num_ranks):
    """The weights that rank 7 has after a step."""
    run = on_one_device(lambda grads: stepped(optimizer, grads)[0])
    return at(7, run(gradients(FEW, num_ranks, 0)))


def linear(grads):
    """A loss that has these gradients."""
    return lambda params: sum(
        jnp.vdot(g, p) for g, p in zip(*map(jax.tree.leaves, (grads, params)), strict=True)
    )
