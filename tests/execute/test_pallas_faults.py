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
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ftmesh.execute import pallas, pallas_tables
from ftmesh.execute.lowering import MIXED
from ftmesh.execute.pallas_rank import KernelLane, KernelRank
from ftmesh.execute.pallas_tables import SLOTS
from ftmesh.schedule.transfers import ADD, COPY
from tests.support.kernel_faults import PLANT
from tests.support.more import more_case
from tests.support.pallas_programs import (
    crossing_loop,
    lower_for_tpus,
    make_program,
    run_in_numpy,
    run_on_devices,
)

pytestmark = pytest.mark.usefixtures("quick_compiler")

ROOT = Path(__file__).parents[2]
SIZE = 2, 1
HANGS = 3  # exit status


@pytest.fixture
def run_program(interpreted):
    """Run a program: what the interpreter prints, and whether the result is that of NumPy."""

    def run(program, rows=8):
        shape = program.num_ranks, program.num_chunks, rows, 128
        held = np.random.default_rng(0).integers(0, 99, shape, np.int32)
        try:
            result = run_on_devices(program, held)
            return interpreted(), np.array_equal(result, run_in_numpy(program, held))
        except jax.errors.JaxRuntimeError as error:  # races, since JAX 0.11
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                jax.effects_barrier()
            pltpu.reset_tpu_interpret_mode_state()
            return f"{interpreted()}{error}", False

    return run


@pytest.fixture
def run_loop(run_program):
    """The same for one loop of two ranks and one chunk."""
    return lambda loop, **options: run_program(make_program([loop], SIZE), **options)


def test_no_fault(run_loop):
    assert run_loop(crossing_loop(3, num_ranks=2, lanes=(1,))) == ("", True)


@pytest.mark.parametrize("op", [ADD, COPY], ids=["adding", "copying"])
@pytest.mark.parametrize("fault", ["none", "a credit too many", "a slot reused early"])
def test_a_slot_overwritten(monkeypatch, run_loop, fault, op):
    """A transfer has more pieces than there are slots."""
    monkeypatch.setattr(pallas, "MAX_PIECE_BYTES", 4096)
    if fault != "none":
        PLANT[fault](monkeypatch.setattr)
    output, _ = run_loop(crossing_loop(1, op, num_ranks=2, lanes=(1,)), rows=8 * 2 * SLOTS)
    # A credit too many is left over if no piece came early enough for a race.
    is_found = "RACE DETECTED" in output or "has non-zero count" in output
    assert is_found == (fault != "none")


def test_a_barrier_that_nobody_waits_at(monkeypatch, run_loop):
    barrier = KernelRank.barrier

    def signal_only(rank):
        with monkeypatch.context() as patch:
            patch.setattr(pl, "semaphore_wait", lambda *_: None)
            barrier(rank)

    monkeypatch.setattr(KernelRank, "barrier", signal_only)
    output, _ = run_loop(crossing_loop(3, num_ranks=2, lanes=(1,)))
    assert "has non-zero count" in output


@pytest.mark.parametrize("has_barrier", [True, False])
def test_no_barrier(monkeypatch, has_barrier):
    """Interpreted semaphores exist before their kernel; lowering for TPUs asks for a barrier."""
    monkeypatch.setattr(pallas, "is_interpreted", lambda program: False)
    if not has_barrier:
        PLANT["no barrier"](monkeypatch.setattr)
    program = make_program([crossing_loop(3, num_ranks=2, lanes=(1,))], SIZE)
    rejects = pytest.raises(ValueError, match="collective_id has to be unspecified")
    with contextlib.nullcontext() if has_barrier else rejects:
        text = lower_for_tpus(program, np.zeros((*SIZE, 8, 128), np.int32))
        assert text.count("tpu_custom_call") == 1


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
@pytest.mark.parametrize(
    "fault",
    ["none", "a credit too few", *map(more_case, ("an extra wait", "two rows of a table swapped"))],
)
def test_kernels_that_hang(fault):
    command = [sys.executable, ROOT / "tests" / "support" / "pallas_fault.py", fault]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, timeout=300, capture_output=True, text=True)
    assert done.returncode == (HANGS if fault != "none" else 0), done.stderr
