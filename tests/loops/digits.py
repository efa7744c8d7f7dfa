"""Images of ten noisy prototypes, a network that classifies them, and its loss."""

import jax
import numpy as np
import optax
from flax import linen as nn


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


def batches(size, steps):
    rng = np.random.default_rng(0)
    prototypes = rng.normal(size=(10, 8, 8)).astype(np.float32)
    for _ in range(steps):
        labels = rng.integers(0, 10, size)
        noise = rng.normal(size=(size, 8, 8)).astype(np.float32)
        yield prototypes[labels] + noise, labels


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 10))
