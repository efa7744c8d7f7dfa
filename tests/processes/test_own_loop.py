"""A program that joins others by itself: none waits for one that has gone, however it went."""

import sys
from pathlib import Path

import pytest

from ftmesh.elastic.local_pod import run_pod

ROOT = Path(__file__).parent.parent.parent


def run(what, who):
    command = [sys.executable, str(Path(__file__).parent / "own_loop.py"), what, str(who)]
    done = run_pod(command, 2, 1, env={"PYTHONPATH": str(ROOT)}, grace=150, timeout=150)
    return [each.status for each in done], [each.stderr for each in done], done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "who", "status", "reason"),
    [
        ("raises before the block", 0, 1, "ValueError: outside"),
        ("raises before the block", 1, 1, "ValueError: outside"),
        ("raises", 0, 1, "ValueError: inside"),
        ("leaves early", 1, 3, "has left before the end, with status 3"),
        ("says a word", 0, 1, "that was all"),
        ("cannot speak", 0, 1, "ValueError: unheard here"),
        ("cannot speak", 1, 1, "ValueError: unheard here"),
        ("is interrupted twice", 1, 130, "interrupted"),
    ],
)
def test_the_other_hears_why(what, who, status, reason):
    statuses, said, _ = run(what, who)
    assert statuses == [status] * 2, said
    other = 1 - who
    assert f"ftmesh: process {other}: process {who}: {reason}" in said[other]


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_one_that_is_done_waits_for_the_others(who):
    statuses, said, done = run("is done before the others", who)
    assert statuses == [0, 0], said
    assert all("well" in each.stdout for each in done)


@pytest.mark.slow
def test_processes_that_have_joined_by_themselves():
    statuses, said, _ = run("joins twice", 0)
    assert statuses == [0, 0], said
