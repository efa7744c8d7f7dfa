"""Losses that need other examples than a rank's own, with the operation that does.

They are called as those of ``losses.py``.
"""

# ruff: noqa: E501

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.support.loss_models import EXPERTS, WIDTH, gates, predict, squares

REJECTED = {
    "contrastive over all pairs": (lambda p, b, k: cross_entropy_of_pairs(b.x @ p["w"], b.x2), "a @ b.T"),
    "similarities within the batch": (lambda p, b, k: kernel_matrix(b.x @ p["w"]).mean(), "x[:, None] - x"),
    "mixup by a roll": (lambda p, b, k: mixup(p, b), "jnp.roll(b.x, 1, axis=0)"),
    "mixup by a permutation": (lambda p, b, k: permuted(p, b, k), "b.x[jax.random.permutation(k, len(b.x))]"),
    "reversed batch": (lambda p, b, k: (predict(p, b) * b.y[::-1]).mean(), "b.y[::-1]"),
    "differences of neighbours": (lambda p, b, k: jnp.square(jnp.diff(predict(p, b))).mean(), "jnp.diff(predict(p, b))"),
    "hardest examples": (lambda p, b, k: hardest(squares(p, b)), "lax.top_k(each, 4)"),
    "median of errors": (lambda p, b, k: jnp.median(squares(p, b)), "jnp.median(squares(p, b))"),
    "sorted errors": (lambda p, b, k: (jnp.sort(squares(p, b)) * jnp.arange(len(b.x))).mean(), "jnp.sort(squares(p, b))"),
    "bits of any example": (lambda p, b, k: squares(p, b).mean() * jnp.bitwise_or.reduce(b.label), "jnp.bitwise_or.reduce(b.label)"),
    "one example": (lambda p, b, k: squares(p, b)[0], "squares(p, b)[0]"),
    "half of the batch": (lambda p, b, k: squares(p, b)[: len(b.x) // 2].mean(), "squares(p, b)[: len(b.x) // 2]"),
    "product of all": (lambda p, b, k: jnp.prod(1 + squares(p, b) / 50), "jnp.prod(1 + squares(p, b) / 50)"),
    "optax, contrastive": (lambda p, b, k: optax.losses.ntxent(b.x @ p["w"], b.label), "optax.losses.ntxent"),
    "every other example": (lambda p, b, k: squares(p, b)[::2].mean(), "squares(p, b)[::2]"),
    "cumulative over the batch": (lambda p, b, k: jnp.cumsum(squares(p, b)).mean(), "jnp.cumsum(squares(p, b))"),
    "example with the largest error": (lambda p, b, k: predict(p, b)[squares(p, b).argmax()], "squares(p, b).argmax()"),
    "capacity of experts": (lambda p, b, k: within_capacity(p, b), "jnp.cumsum(chosen, axis=0)"),
    "inverse of a Gram matrix": (lambda p, b, k: jnp.linalg.slogdet(jnp.eye(len(b.x)) + gram(b.x @ p["w"]))[1], "x @ x.T"),
    "one example after the other": (lambda p, b, k: lax.scan(lambda h, x: (jnp.tanh(h + x @ p["w"]), None), jnp.zeros(WIDTH), b.x)[0].sum(), "lax.scan"),
    "neighbours in the batch": (lambda p, b, k: jnp.square(jnp.convolve(predict(p, b), jnp.ones(3))).mean(), "jnp.convolve"),
    "a callback": (lambda p, b, k: jax.pure_callback(np.abs, jax.ShapeDtypeStruct(b.y.shape, b.y.dtype), b.y).mean(), "jax.pure_callback"),
    "aux that needs all examples": (lambda p, b, k: squares(p, b).mean() + 0 * lax.stop_gradient(ranks_of(b.y)), "jnp.argsort(y)"),
    "gamma of each example from one key": (lambda p, b, k: (jax.random.gamma(k, jnp.abs(b.x)) @ p["u"]).mean(), "jax.random.gamma"),
    "Dirichlet of each example from one key": (lambda p, b, k: (jax.random.dirichlet(k, jnp.exp(b.x)) @ p["u"]).mean(), "jax.random.dirichlet"),
}  # fmt: skip


def cross_entropy_of_pairs(a, b):
    scores = a @ b.T
    return optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(len(a))).mean()


def kernel_matrix(x):
    return jnp.exp(-jnp.square(x[:, None] - x).sum(-1))


def mixup(p, b):
    mixed = 0.7 * b.x + 0.3 * jnp.roll(b.x, 1, axis=0)
    return jnp.square(mixed @ p["u"] - b.y).mean()


def permuted(p, b, k):
    mixed = b.x + b.x[jax.random.permutation(k, len(b.x))]
    return jnp.square(mixed @ p["u"] - b.y).mean()


def hardest(each):
    worst, _ = lax.top_k(each, 4)
    return worst.mean()


def within_capacity(p, b):
    chosen = jax.nn.one_hot(gates(p, b).argmax(-1), EXPERTS)
    place = jnp.cumsum(chosen, axis=0)
    return (chosen * gates(p, b) * (place < 3)).mean()


def gram(x):
    return x @ x.T


def ranks_of(y):
    return jnp.argsort(y).mean()
