"""The soak under engines: its faults, and the checks of a run that was started again."""

import json

import numpy as np
import pytest

from examples.soak import soak
from examples.soak.checks import Run, check
from examples.soak.cluster_faults import (
    ANY_HOST,
    KINDS,
    draw_cluster_faults,
    parse_cluster_faults,
)
from examples.soak.recoveries import STARTED_AGAIN, find_recoveries
from ftmesh.errors import ArgumentError

STEPS, BATCH = 6, 4


def write_lines(file, lines):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def started_again(folder, *, from_step=2):
    """A run of one process that ends after step 3, and goes on from a checkpoint of step 2."""
    facts = {"hosts": [0], "in_place": False, "failed": "", "source": "start"}
    events = [
        {"time": 100.0, "event": "started", "epoch": 1, **facts},
        {"time": 101.0, "event": "epoch", "epoch": 1, "from_step": 0, **facts},
        {"time": 104.0, "event": "gives up", "epoch": 1, "why": "cut off"},
        {"time": 200.0, "event": "started", "epoch": 1, **facts},
        {"time": 201.0, "event": "epoch", "epoch": 1, "from_step": from_step, **facts},
        {"time": 206.0, "event": "done", "status": 0, "steps": STEPS, "failures": 1},
    ]
    write_lines(folder / "events.jsonl", events)
    fault = {"kind": "power", "moment": "step", "process": 0, "step": 3, "text": "power loss"}
    write_lines(folder / "run" / "faults.jsonl", [{"time": 103.5, "event": "fault", **fault}])
    steps = [
        *((1, 101.1), (2, 102.1), (3, 103.1)),
        *((step, 200.1 + step) for step in (3, 4, 5, 6)),
    ]
    examples = np.arange(STEPS * BATCH).reshape(STEPS, BATCH).tolist()
    used = [{"time": at, "step": step, "examples": examples[step - 1]} for step, at in steps]
    write_lines(folder / "run" / "used-1-0.jsonl", used)
    metrics = [{"time": at + 0.5, "step": step, "loss": 1.0, "lr": 0.1} for step, at in steps]
    write_lines(folder / "out" / "metrics.jsonl", metrics)
    return Run.read(folder, 0, "power@0:3")


def errors_of(run):
    return check(run, steps=STEPS, num_examples=STEPS * BATCH, reference=None)


def test_a_run_that_was_started_again(tmp_path):
    run = started_again(tmp_path)
    assert errors_of(run) == []
    assert run.starts == (0.0, 200.0)
    assert run.generations() == [(1, 0), (1001, 2)]
    (recovery,) = find_recoveries(run)
    assert (recovery.how, recovery.seconds) == (STARTED_AGAIN, pytest.approx(203.6 - 103.5))


def test_a_run_that_forgot_a_step_when_it_was_started_again(tmp_path):
    """It says that it continued from step 1, and never did step 2 again."""
    assert errors_of(started_again(tmp_path, from_step=1)) == [
        "no process read examples for step 2 in generation 1001",
        "4 examples were not used, the first: [4, 5, 6, 7]",
    ]


def test_faults_are_drawn_alike_and_read_back():
    drawn = draw_cluster_faults(7, tuple(KINDS), 4, 120)
    assert drawn == draw_cluster_faults(7, tuple(KINDS), 4, 120)
    assert parse_cluster_faults("; ".join(map(str, drawn))) == drawn
    every = [f for seed in range(300) for f in draw_cluster_faults(seed, tuple(KINDS), 4, 120)]
    assert {fault.kind for fault in every} == set(KINDS)
    assert {fault.moment for fault in every} == {"start", "compile", "step", "recovery"}
    assert {fault.host for fault in every if fault.kind not in ANY_HOST} == {0, 1, 2, 3}
    assert all(0 < fault.step < 120 for fault in every if fault.moment == "step")


@pytest.mark.parametrize("text", ["power", "flood@0:3", "power@4:3", "power@0:soon", "power@0"])
def test_faults_that_are_none(text):
    with pytest.raises(ArgumentError, match="give KIND@HOST:WHEN"):
        parse_cluster_faults(text)


@pytest.mark.parametrize("option", ["--restart", "--jobs=2", "--every=10"])
def test_options_that_engines_do_not_have(capsys, option):
    assert soak.main(["--engine", "slurm", option]) == 2
    assert "are not for --engine" in capsys.readouterr().err
