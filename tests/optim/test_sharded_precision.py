"""A step of a sharded optimizer on hundreds of ranks, with 16-bit gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ftmesh.optim import ShardedOptimizer
from ftmesh.testing import on_one_device
from tests.support.roundings import (
    HALF_PRECISION,
    LARGE,
    assert_accurate,
    exact_means,
    large_plan,
    lax_means,
    sample_inputs,
)

SGD = optax.sgd(0.5)


def apply_sgd(means, dtype):
    """Return weights of one after a step of plain SGD with these gradients."""
    weights = jax.tree.map(lambda mean: jnp.ones(mean.shape, dtype), means)
    grads = jax.tree.map(lambda mean: jnp.asarray(mean, dtype), means)
    updates, _ = SGD.update(grads, SGD.init(weights), weights)
    return jax.device_get(optax.apply_updates(weights, updates))


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "failed", "algorithm"), LARGE[:2])
def test_a_step_of_sgd(shape, failed, algorithm):
    plan = large_plan(shape, failed, algorithm)
    ranks = plan.program.num_ranks
    narrow = {name: sample_inputs(ranks, dtype) for name, dtype in HALF_PRECISION.items()}
    wide = sample_inputs(ranks, np.float32)

    def step(grads, **options):
        optimizer = ShardedOptimizer(SGD, plan, "data", **options)
        weights = jax.tree.map(jnp.ones_like, grads)
        updates, _ = optimizer.update(grads, optimizer.init(weights), weights)
        return optax.apply_updates(weights, updates)

    @on_one_device
    def steps(narrow, wide):
        return step(narrow), {
            name: step(wide, wire_dtype=HALF_PRECISION[name]) for name in HALF_PRECISION
        }

    results = jax.device_get(steps(narrow, wide))
    assert all((leaf == leaf[:1]).all() for leaf in jax.tree.leaves(results)), "ranks differ"
    from_narrow, narrow_wire = jax.tree.map(lambda leaf: leaf[0], results)
    for name, dtype in HALF_PRECISION.items():
        assert (from_narrow[name]["ones"] == 0.5).all()
        assert (narrow_wire[name]["ones"] == 0.5).all()
        for got, given, kind in (
            (from_narrow[name], narrow[name], dtype),
            (narrow_wire[name], wide, np.dtype(np.float32)),
        ):
            exact = {key: 1 - mean / 2 for key, mean in exact_means(given).items()}
            assert got["ones"].dtype == kind
            assert_accurate(got, exact, apply_sgd(lax_means(given, dtype), kind))


def test_accumulate_dtype_bfloat16():
    plan = large_plan("16x32", "4x2@6,14", "ring")
    optimizer = ShardedOptimizer(SGD, plan, "data", accumulate_dtype=jnp.bfloat16)
    weight = jnp.ones(1, jnp.bfloat16)
    run = on_one_device(lambda g: optimizer.update(g, optimizer.init(weight), weight)[0])
    new = 1 + run(np.ones((504, 1), jnp.bfloat16))
    assert float(new[0, 0]) == pytest.approx(0.746, abs=0.01)
