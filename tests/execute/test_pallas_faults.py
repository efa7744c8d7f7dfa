"""Faults planted in the Pallas kernel: the interpreter, or a limit of time, finds each of them."""

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from ftmesh.execute import pallas_kernel, pallas_tables
from ftmesh.execute.lowering import MIXED
from ftmesh.execute.pallas_lanes import OneLane
from ftmesh.execute.pallas_tables import SLOTS
from ftmesh.schedule.transfers import COPY
from tests.support.pallas_programs import crossing_loop, in_numpy, on_devices, program_of

pytestmark = pytest.mark.usefixtures("quick_compiler")

ROOT = Path(__file__).parents[2]
SIZE = 2, 1
WAITS_FOR_EVER = 3  # an exit status


@pytest.fixture
def found(interpreted):
    """What the interpreter has to say of a loop, and whether it does what NumPy does."""

    def run(loop):
        held = np.random.default_rng(0).integers(0, 99, (*SIZE, 8, 128), np.int32)
        program = program_of([loop], SIZE)
        try:
            is_right = np.array_equal(on_devices(program, held), in_numpy(program, held))
            return interpreted(), is_right
        except jax.errors.JaxRuntimeError as error:  # a race, from JAX 0.11 on
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                jax.effects_barrier()
            pltpu.reset_tpu_interpret_mode_state()
            return f"{interpreted()}{error}", False

    return run


def test_nothing_is_found_where_nothing_is_planted(found):
    assert found(crossing_loop(3, num_ranks=2, lanes=(1,))) == ("", True)


def test_a_chunk_that_is_read_before_it_came(monkeypatch, found):
    wait_came, put_together = OneLane.wait_came, OneLane.put_together
    monkeypatch.setattr(OneLane, "wait_came", lambda self, piece: None)

    def too_early(self, piece):
        put_together(self, piece)
        wait_came(self, piece)

    monkeypatch.setattr(OneLane, "put_together", too_early)
    said, is_right = found(crossing_loop(3, num_ranks=2, lanes=(1,)))
    assert "RACE DETECTED" in said
    assert not is_right


def test_a_chunk_that_is_overwritten_before_it_left(monkeypatch, found):
    wait_left, wait_written = OneLane.wait_left, OneLane.wait_written
    pieces = []
    monkeypatch.setattr(OneLane, "wait_left", lambda self, piece: pieces.append(piece))

    def too_late(self, piece):
        wait_written(self, piece)
        wait_left(self, pieces.pop())

    monkeypatch.setattr(OneLane, "wait_written", too_late)
    said, _ = found(crossing_loop(3, COPY, num_ranks=2, lanes=(1,)))  # right only by chance
    assert "RACE DETECTED" in said


def test_a_round_too_far_ahead_of_another(monkeypatch, found):
    """What comes in a round is sent on in the next."""
    monkeypatch.setattr(pallas_tables, "_apart", lambda loop: (2, 1))
    said, _ = found(crossing_loop(3, num_ranks=2, lanes=(1,)))
    assert "RACE DETECTED" in said


def test_lanes_that_do_not_wait_for_each_other(monkeypatch, found):
    """Both add to one chunk."""
    loop = crossing_loop(2, MIXED, num_ranks=2, lanes=(1, -1))
    assert found(loop) == ("", True)
    monkeypatch.setattr(pallas_kernel, "late", lambda cut, coming: [False] * len(coming))
    said, is_right = found(replace(loop))  # which is not the one that JAX has compiled
    assert "RACE DETECTED" in said
    assert not is_right


def test_a_semaphore_that_does_not_end_at_zero(monkeypatch, found):
    take_credit = OneLane.take_credit

    def but_the_last(self, number):
        if number < SLOTS:
            take_credit(self, number)

    monkeypatch.setattr(OneLane, "take_credit", but_the_last)
    said, is_right = found(crossing_loop(3, num_ranks=2, lanes=(1,)))
    assert "has non-zero count" in said
    assert is_right


@pytest.mark.slow  # a process each, for what never ends
@pytest.mark.parametrize("fault", ["nothing", "a credit too few", "a wait too many"])
def test_what_waits_for_ever(fault):
    command = [sys.executable, ROOT / "tests" / "pallas_fault.py", fault]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, timeout=300, capture_output=True, text=True)
    assert done.returncode == (WAITS_FOR_EVER if fault != "nothing" else 0), done.stderr
