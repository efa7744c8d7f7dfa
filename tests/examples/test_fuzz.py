"""The fuzzer detects planted problems, and finds none in a short run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.fuzz.commands import NO_PROGRAM, run_rejected
from examples.fuzz.running import ACCEPTED_WRONG, MAX_BYTES, WrongError, problem_of

REJECTED = 69
ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


@pytest.mark.parametrize(
    ("status", "stderr", "problem"),
    [
        (0, "", ""),
        (0, "a warning\n", ""),
        (2, "ftmesh: no\n", ""),
        (66, "ftmesh: no\n", ""),
        (REJECTED, "", "not one line"),
        (REJECTED, "ftmesh: no\n" * 9, "not one line"),
        (REJECTED, "ftmesh: \x1b[2J\n", "control characters"),
        (0, "Traceback (most recent call last):\n", "traceback"),
        (70, "ftmesh: this is a bug\n", "traceback"),
        (1, "", "status 1"),
        (ACCEPTED_WRONG, "WRONG: it does not sum\n", "accepted"),
    ],
)
def test_exit_statuses_and_stderr(tmp_path, status, stderr, problem):
    assert problem_of(status, stderr, tmp_path, set(), 10**8) == problem


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.svg", b"<svg></svg>\n", ""),
        ("a.svg", b"<svg>", "half-written"),
        ("a.npz", b"PK", "half-written"),
        ("a.png", b"\x89PNG", "half-written"),
        (".a.npz.0123.begun", b"", "left behind"),
        (".train.ftmesh-index", b"", ""),
    ],
)
def test_files_left_behind(tmp_path, name, content, problem):
    (tmp_path / name).write_bytes(content)
    assert problem_of(REJECTED, "ftmesh: no\n", tmp_path, {name}, 10**8) == problem
    assert problem_of(0, "", tmp_path, set(), MAX_BYTES + 1) == "memory"


def test_command_that_must_fail():
    with pytest.raises(WrongError, match="a command that cannot work has succeeded"):
        run_rejected(["draw", "--figure", "1"])
    assert (
        run_rejected(["launch", "--hosts", "1", "--devices-per-host", "1", "--", NO_PROGRAM]) == 2
    )


PLANTED = """
import sys, time
from pathlib import Path
from examples.fuzz import running

running.CPU_SECONDS, running.WALL_SECONDS, running.MAX_BYTES = 1, 4, 300 * 2**20

def spin():
    while True:
        pass

def take():
    kept = [bytearray(2**20 * n) for n in range(1, 40)]
    time.sleep(60)
    return len(kept)

def wrong():
    raise running.WrongError("it does not sum")

for work in (lambda: 0, spin, lambda: time.sleep(60), take, wrong, lambda: [][0]):
    print(repr(running.run(work, Path("in").resolve(), Path("out").resolve()).problem))
"""


@pytest.mark.slow
def test_hangs_memory_and_wrong_results_are_detected(tmp_path):
    for name in ("in", "out"):
        (tmp_path / name).mkdir()
    command = [sys.executable, "-c", PLANTED]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=tmp_path, env=ENVIRONMENT
    )
    assert done.stdout.splitlines() == [
        "''", "'hangs'", "'hangs'", "'memory'", "'accepted'", "'traceback'",
    ]  # fmt: skip


@pytest.mark.slow
def test_short_run_finds_nothing():
    command = [sys.executable, "-m", "examples.fuzz.fuzz", "--cases", "10", "--seed", "19"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout
    assert "80 cases, none failed" in done.stdout
