"""Faults planted in the Pallas kernel: the interpreter, or a limit of time, finds each of them."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pallas_programs import crossing_loop, in_numpy, on_devices, program_of

from ftmesh.execute.pallas_kernel import OneLane
from ftmesh.schedule.columns import COPY

pytestmark = pytest.mark.usefixtures("quick_compiler")

ROOT = Path(__file__).parents[2]
SIZE = 2, 1
WAITS_FOR_EVER = 3  # an exit status


def run(loop):
    """Whether devices do with a loop what NumPy does."""
    held = np.random.default_rng(0).integers(0, 99, (*SIZE, 8, 128), np.int32)
    program = program_of([loop], SIZE)
    return np.array_equal(on_devices(program, held), in_numpy(program, held))


def test_nothing_is_found_where_nothing_is_planted(interpreted):
    assert run(crossing_loop(3, num_ranks=2, lanes=(1,)))
    assert interpreted() == ""


def test_a_chunk_that_is_read_before_it_came(monkeypatch, interpreted):
    wait_came, put_together = OneLane.wait_came, OneLane.put_together
    pieces = []
    monkeypatch.setattr(OneLane, "wait_came", lambda self, piece: pieces.append(piece))

    def too_early(self, own, came, size):
        put_together(self, own, came, size)
        wait_came(self, pieces.pop())

    monkeypatch.setattr(OneLane, "put_together", too_early)
    assert not run(crossing_loop(3, num_ranks=2, lanes=(1,)))
    assert "RACE DETECTED" in interpreted()


def test_a_chunk_that_is_overwritten_before_it_left(monkeypatch, interpreted):
    wait_left, wait_written = OneLane.wait_left, OneLane.wait_written
    pieces = []
    monkeypatch.setattr(OneLane, "wait_left", lambda self, piece: pieces.append(piece))

    def too_late(self, piece):
        wait_written(self, piece)
        wait_left(self, pieces.pop())

    monkeypatch.setattr(OneLane, "wait_written", too_late)
    run(crossing_loop(3, COPY, num_ranks=2, lanes=(1,)))  # right or wrong, as it happens
    assert "RACE DETECTED" in interpreted()


def test_a_semaphore_that_nobody_waits_for(monkeypatch, interpreted):
    monkeypatch.setattr(OneLane, "wait_left", lambda self, piece: None)
    run(crossing_loop(3, num_ranks=2, lanes=(1,)))
    assert "has non-zero count" in interpreted()


@pytest.mark.slow  # a process each, for what never ends
@pytest.mark.parametrize("fault", ["nothing", "a credit too few", "a wait too many"])
def test_what_waits_for_ever(fault):
    command = [sys.executable, ROOT / "tests" / "pallas_fault.py", fault]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, timeout=120, capture_output=True, text=True)
    assert done.returncode == (WAITS_FOR_EVER if fault != "nothing" else 0), done.stderr
