"""Learning-rate schedules match optax, with and without a device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.common.lr_schedules import poly_decay
from ftmesh import ArgumentError

SETTINGS = [
    {"peak": 8.0, "warmup_steps": 5, "total_steps": 30},
    {"peak": 0.003, "warmup_steps": 0, "total_steps": 20, "end": 0.0, "power": 1},
    {"peak": 29.0, "warmup_steps": 19, "total_steps": 20, "end": 1e-4, "power": 2},
    {"peak": 1.0, "warmup_steps": 1, "total_steps": 9, "end": 0.5, "power": 0.5},
]


def optax_decay(peak, warmup_steps, total_steps, end=1e-4, power=2):
    decay = optax.polynomial_schedule(peak, end, power, total_steps - warmup_steps)
    up = optax.linear_schedule(0, peak, warmup_steps)
    return optax.join_schedules([up, decay], [warmup_steps]) if warmup_steps else decay


@pytest.mark.parametrize("settings", SETTINGS)
def test_schedules_match_optax(settings):
    """Up to float32's rounding in a few operations on numbers up to the peak."""
    steps = np.arange(settings["total_steps"] + 3)
    lr_schedule, theirs = poly_decay(**settings), optax_decay(**settings)
    wanted = [float(theirs(step)) for step in steps]
    on_device = jax.jit(jax.vmap(lr_schedule))(jnp.asarray(steps))
    tolerance = {"rtol": 1e-6, "atol": 1e-6 * settings["peak"]}
    np.testing.assert_allclose(on_device, wanted, **tolerance)
    np.testing.assert_allclose([lr_schedule(int(step)) for step in steps], wanted, **tolerance)


def test_a_python_number_gives_a_python_number(monkeypatch):
    lr_schedule = poly_decay(8.0, warmup_steps=2, total_steps=6)
    for name in ("where", "clip", "asarray"):
        monkeypatch.delattr(jnp, name)
    assert type(lr_schedule(3)) is float
    assert type(lr_schedule(np.int64(1))) is float


def test_a_warm_up_that_does_not_fit():
    with pytest.raises(ArgumentError, match="6 steps of warm-up do not fit in 6 steps"):
        poly_decay(1.0, warmup_steps=6, total_steps=6)
