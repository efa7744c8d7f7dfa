"""Flax's batch norms leave out the padding of a batch by its mask."""

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import ftmesh


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_batch_norms_take_the_mask(kind):
    x = np.random.default_rng(0).normal(3, 2, (46, 5)).astype(np.float32)

    def normed(x, mask):
        if kind == "nnx":
            norm = nnx.BatchNorm(5, rngs=nnx.Rngs(0))
            return norm(x, mask=mask), norm.mean[...], norm.var[...]
        norm = nn.BatchNorm(use_running_average=False)
        variables = norm.init(jax.random.key(0), x)
        y, new = norm.apply(variables, x, mask=mask, mutable=["batch_stats"])
        return y, new["batch_stats"]["mean"], new["batch_stats"]["var"]

    padded, mask = ftmesh.pad_batch(x, 12)
    (y, *stats), (expected, *others) = normed(padded, mask[:, None]), normed(x, None)
    np.testing.assert_allclose(y[:46], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(stats, others, rtol=1e-5)
    counted = normed(padded, None)[1]
    assert abs(counted - others[0]).max() > 1e-4, (
        "padding must matter for the test to mean something"
    )
