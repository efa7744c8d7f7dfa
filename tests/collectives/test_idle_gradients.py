"""Derivatives where some devices are idle: they bring nothing, and their results count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh.testing import cpu_grid

X = np.arange(1.0, 17.0, dtype=np.float32)


@pytest.fixture(scope="module", params=[pytest.param("ring", marks=pytest.mark.slow), "row_pair"])
def plan(request):
    return ftmesh.plan(cpu_grid("4x4", failed="2x2@0,0"), request.param, with_idle=True)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("divisor", [1, 12])
def test_gradient_of_a_replicated_loss(plan, check_vma, divisor):
    """By the parameters that all devices have, and by each device's own numbers."""
    total = plan.psum if divisor == 1 else plan.pmean
    loss = jax.shard_map(
        lambda w, x: total(jnp.sum(w * x), "data"),
        mesh=plan.jax_mesh("data"),
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    by_weight, by_number = jax.jit(jax.grad(loss, argnums=(0, 1)))(jnp.float32(3), X)
    live = plan.program.live
    assert float(by_weight) == pytest.approx(X[live].sum() / divisor, rel=1e-6)
    expected = np.zeros(16)
    expected[live] = 3 / divisor
    np.testing.assert_allclose(by_number, expected, rtol=1e-6)


def test_result_used_only_on_an_idle_device(plan):
    """What comes back from there goes to all who brought something."""
    run = jax.shard_map(
        lambda x: plan.psum(x, "data"),
        mesh=plan.jax_mesh("data"),
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,
    )
    _, back = jax.vjp(run, X)
    (result,) = back(jnp.zeros(16).at[0].set(5.0))
    expected = np.zeros(16)
    expected[plan.program.live] = 5
    np.testing.assert_array_equal(result, expected)
