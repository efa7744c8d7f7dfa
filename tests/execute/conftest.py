"""Fixtures for tests of the Pallas executor: interpreted kernels, with race detection."""

import jax
import jax._src.callback
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from ftmesh.execute import pallas


@pytest.fixture
def interpreted(monkeypatch, capfd):
    """A function that returns what the interpreter has printed: races, and semaphores left over."""

    def call(*args, callback, **_):
        return jax.tree.map(np.asarray, callback(*args))

    # JAX's own puts every argument of every step on a device first.
    monkeypatch.setattr(jax._src.callback, "io_callback_impl", call)
    # Copies are hashed to clock entries that no device uses: with many entries, few collide.
    params = pltpu.InterpretParams(detect_races=True, vector_clock_size=512)
    monkeypatch.setattr(pallas, "INTERPRET", params)
    return lambda: capfd.readouterr().out


@pytest.fixture
def no_race(interpreted):
    yield
    output = interpreted()
    assert "RACE" not in output
    assert "non-zero" not in output
