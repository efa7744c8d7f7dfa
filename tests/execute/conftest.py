"""Settings for tests of the Pallas executor: kernels are interpreted, and races looked for."""

import jax
import jax._src.callback
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from ftmesh.execute import pallas


@pytest.fixture
def interpreted(monkeypatch, capfd):
    """What the interpreter has said so far, as a function: of races, and of semaphores."""

    def call(*args, callback, **_):
        return jax.tree.map(np.asarray, callback(*args))

    # As JAX has it, each argument of each step would be put on a device first.
    monkeypatch.setattr(jax._src.callback, "io_callback_impl", call)
    # Copies share the entries of clocks that no device has, by chance: many, so that few do.
    params = pltpu.InterpretParams(detect_races=True, vector_clock_size=512)
    monkeypatch.setattr(pallas, "INTERPRET", params)
    return lambda: capfd.readouterr().out


@pytest.fixture
def no_race(interpreted):
    yield
    said = interpreted()
    assert "RACE" not in said
    assert "non-zero" not in said
