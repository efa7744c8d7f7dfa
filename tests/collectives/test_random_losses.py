"""No random loss is accepted and computed differently from `jax.value_and_grad`."""

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import ftmesh
from ftmesh import ArgumentError, Topology
from tests.support.more import more
from tests.support.random_losses import loss_of, make_args, on_one_device, programs

pytestmark = pytest.mark.usefixtures("quick_compiler")

PLAN = ftmesh.plan(Topology.grid("3x1"))
ACCEPTED = []


def check(steps, size):
    """Compare the value and the gradients, in float64; True if the loss was accepted."""
    loss = loss_of(steps)
    with jax.enable_x64(True):
        weights, batch = make_args(size)
        try:
            value, grads, _ = on_one_device(PLAN, loss, (weights, batch))
        except ArgumentError:
            return False
        expected = jax.jit(jax.value_and_grad(loss))(weights, batch)
    for a, b in zip(jax.tree.leaves((value, grads)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8)
    return True


@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow])
@given(programs())
def test_equal_or_rejected(steps):
    """A batch that three ranks can share equally, and one that they cannot."""
    ACCEPTED.append(check(steps, 12))
    check(steps, 10)


@more
@pytest.mark.slow
@settings(max_examples=500, suppress_health_check=[HealthCheck.too_slow])
@given(programs(max_steps=12))
def test_hundreds_equal_or_rejected(steps):
    check(steps, 12)
    check(steps, 10)


def test_many_were_accepted():
    """Rejecting everything would be right too."""
    assert sum(ACCEPTED) >= len(ACCEPTED) / 4
