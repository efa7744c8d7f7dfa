"""Faults planted in the Pallas kernel: the interpreter or a timeout detects each of them."""

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

from ftmesh.execute import pallas_tables
from ftmesh.execute.lowering import MIXED
from ftmesh.execute.pallas_rank import KernelLane
from ftmesh.execute.pallas_tables import SLOTS
from ftmesh.schedule.transfers import COPY
from tests.support.pallas_programs import crossing_loop, make_program, run_in_numpy, run_on_devices

pytestmark = pytest.mark.usefixtures("quick_compiler")

ROOT = Path(__file__).parents[2]
SIZE = 2, 1
HANGS = 3  # exit status


@pytest.fixture
def run_loop(interpreted):
    """Run a loop: what the interpreter prints, and whether the result is that of NumPy."""

    def run(loop):
        held = np.random.default_rng(0).integers(0, 99, (*SIZE, 8, 128), np.int32)
        program = make_program([loop], SIZE)
        try:
            is_correct = np.array_equal(run_on_devices(program, held), run_in_numpy(program, held))
            return interpreted(), is_correct
        except jax.errors.JaxRuntimeError as error:  # races, since JAX 0.11
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                jax.effects_barrier()
            pltpu.reset_tpu_interpret_mode_state()
            return f"{interpreted()}{error}", False

    return run


def test_no_fault(run_loop):
    assert run_loop(crossing_loop(3, num_ranks=2, lanes=(1,))) == ("", True)


def test_a_chunk_read_before_it_arrives(monkeypatch, run_loop):
    wait_arrived, combine = KernelLane.wait_arrived, KernelLane.combine
    monkeypatch.setattr(KernelLane, "wait_arrived", lambda self, piece: None)

    def too_early(self, piece):
        combine(self, piece)
        wait_arrived(self, piece)

    monkeypatch.setattr(KernelLane, "combine", too_early)
    output, is_correct = run_loop(crossing_loop(3, num_ranks=2, lanes=(1,)))
    assert "RACE DETECTED" in output
    assert not is_correct


def test_a_chunk_overwritten_before_it_leaves(monkeypatch, run_loop):
    wait_sent, wait_written = KernelLane.wait_sent, KernelLane.wait_written
    pieces = []
    monkeypatch.setattr(KernelLane, "wait_sent", lambda self, piece: pieces.append(piece))

    def too_late(self, piece):
        wait_written(self, piece)
        wait_sent(self, pieces.pop())

    monkeypatch.setattr(KernelLane, "wait_written", too_late)
    output, _ = run_loop(crossing_loop(3, COPY, num_ranks=2, lanes=(1,)))  # correct only by chance
    assert "RACE DETECTED" in output


def test_a_round_too_far_ahead(monkeypatch, run_loop):
    """What arrives in a round is sent on in the next."""
    monkeypatch.setattr(pallas_tables, "_min_gap", lambda loop: (2, 1))
    output, _ = run_loop(crossing_loop(3, num_ranks=2, lanes=(1,)))
    assert "RACE DETECTED" in output


def test_lanes_that_do_not_wait_for_each_other(monkeypatch, run_loop):
    """Both add to one chunk."""
    loop = crossing_loop(2, MIXED, num_ranks=2, lanes=(1, -1))
    assert run_loop(loop) == ("", True)
    monkeypatch.setattr(KernelLane, "must_wait", lambda lane, step: False)
    output, is_correct = run_loop(replace(loop))  # a new loop: JAX caches by identity
    assert "RACE DETECTED" in output
    assert not is_correct


def test_a_semaphore_that_does_not_end_at_zero(monkeypatch, run_loop):
    take_credit = KernelLane.take_credit

    def all_but_the_last(self, number):
        if number < SLOTS:
            take_credit(self, number)

    monkeypatch.setattr(KernelLane, "take_credit", all_but_the_last)
    output, is_correct = run_loop(crossing_loop(3, num_ranks=2, lanes=(1,)))
    assert "has non-zero count" in output
    assert is_correct


@pytest.mark.slow  # each in a process of its own, which may hang
@pytest.mark.parametrize("fault", ["none", "a missing credit", "an extra wait"])
def test_kernels_that_hang(fault):
    command = [sys.executable, ROOT / "tests" / "support" / "pallas_fault.py", fault]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, timeout=300, capture_output=True, text=True)
    assert done.returncode == (HANGS if fault != "none" else 0), done.stderr
