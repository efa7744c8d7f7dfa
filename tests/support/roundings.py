"""16-bit numbers at the scale where sums lose precision, and the allowed error of their mean."""

import jax.numpy as jnp
import numpy as np
import pytest

import ftmesh
from ftmesh import Topology
from tests.support.more import more

HALF_PRECISION = {"bfloat16": jnp.dtype(jnp.bfloat16), "float16": jnp.dtype(np.float16)}
LARGE = [
    ("16x32", "4x2@6,14", "ring"),
    pytest.param("16x32", "4x2@6,14", "row_pair", marks=pytest.mark.slow),
    pytest.param("32x32", "4x2@14,14", "ring", marks=(pytest.mark.slow, more)),
]


def large_plan(shape, failed, algorithm):
    return ftmesh.plan(Topology.grid(shape, failed=failed), algorithm)


def sample_inputs(num_ranks, dtype):
    """Ones, positive numbers, and gradients whose mean is a twentieth of their spread."""
    rng = np.random.default_rng(0)
    return {
        "ones": np.ones((num_ranks, 5)).astype(dtype),
        "positive": rng.uniform(0, 2, (num_ranks, 40)).astype(dtype),
        "gradients": rng.normal(0.05, 1, (num_ranks, 400)).astype(dtype),
    }


def exact_means(inputs):
    return {name: x.astype(np.float64).mean(axis=0) for name, x in inputs.items()}


def lax_means(inputs, dtype):
    """The means by XLA's all-reduce on a CPU: a sum in float32, rounded, then divided.

    It promotes sums of 16 bits to float32. Under vmap, where a sum is no all-reduce, it rounds some
    of the partial sums too, which would be an easier reference.
    """
    sums = {name: x.astype(np.float32).sum(axis=0).astype(dtype) for name, x in inputs.items()}
    return {name: total / np.asarray(len(inputs[name]), dtype) for name, total in sums.items()}


def assert_accurate(got, exact, reference):
    """Within 1 % for numbers of one sign; as accurate as lax for those of both."""
    for name in ("ones", "positive"):
        np.testing.assert_allclose(got[name].astype(np.float64), exact[name], rtol=0.01)
    ours, theirs = (
        np.sqrt(np.mean((x["gradients"].astype(np.float64) - exact["gradients"]) ** 2))
        for x in (got, reference)
    )
    assert ours <= 1.5 * theirs
