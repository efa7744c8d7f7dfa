"""The Pallas executor against the other one, bit for bit, with races looked for."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from on_devices import per_rank
from pallas_programs import program_of, random_loop

import ftmesh
from ftmesh import ArgumentError, CollectiveError, Topology
from ftmesh.execute import pallas, ppermute
from ftmesh.execute.lower import lower
from ftmesh.testing import cpu_grid, on_one_device

pytestmark = pytest.mark.usefixtures("quick_compiler", "no_race")

HOLE = "4x4", "2x2@2,2"
ALGORITHMS = [
    ("ring", *HOLE),
    ("row_pair", *HOLE),
    ("two_dim", "2x2", ""),
    pytest.param(("ring", "4x4", ""), marks=pytest.mark.slow),
    pytest.param(("row_pair", "4x4", ""), marks=pytest.mark.slow),
    pytest.param(("two_dim", "4x4", ""), marks=pytest.mark.slow),
    pytest.param(("ring", "6x6", "2x2@2,2"), marks=pytest.mark.slow),
    pytest.param(("row_pair", "6x6", "2x2@2,2"), marks=pytest.mark.slow),
]


@pytest.fixture
def no_race(monkeypatch, capfd):
    monkeypatch.setattr(pallas, "INTERPRET", pltpu.InterpretParams(detect_races=True))
    yield
    said = capfd.readouterr().out
    assert "RACE" not in said
    assert "non-zero" not in said  # semaphores


def both(plan, run, *args, **options):
    """What `run` gives on a plan with either executor: `run(plan, *args)`."""
    return [
        per_rank(each, lambda *args, each=each: run(each, *args), *args, **options)
        for each in (plan, replace(plan, executor="pallas"))
    ]


def buffers(program, dtype=np.float32, *, rows=8):
    rng = np.random.default_rng(0)
    shape = program.num_ranks, program.num_chunks, rows, 128
    if np.issubdtype(dtype, np.integer):
        return rng.integers(-1000, 1000, shape, dtype)
    return rng.normal(size=shape).astype(dtype)


@pytest.mark.parametrize("case", ALGORITHMS, ids=" ".join)
def test_sums_have_the_same_bits(case):
    algorithm, shape, failed = case
    plan = ftmesh.plan(cpu_grid(shape, failed=failed), algorithm)
    x = buffers(plan.program)
    ours, theirs = both(plan, lambda plan, x: plan.psum(x, "data"), x)
    np.testing.assert_array_equal(ours, theirs)
    assert (theirs == theirs[0]).all()
    np.testing.assert_allclose(theirs[0], x.sum(axis=0), atol=1e-4)
