"""A loop of a user: however one process exits, no other waits for it."""

import sys
from pathlib import Path

import pytest

from ftmesh.elastic.local_pod import run_pod
from tests.support.more import more_case

ROOT = Path(__file__).parent.parent.parent


def run(what, who):
    command = [sys.executable, str(Path(__file__).parent / "own_loop.py"), what, str(who)]
    results = run_pod(command, 2, 1, env={"PYTHONPATH": str(ROOT)}, grace=150, timeout=150)
    return [r.status for r in results], [r.stderr for r in results], results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "who", "status", "reason"),
    [
        more_case("raises before the block", 0, 1, "ValueError: outside"),
        ("raises before the block", 1, 1, "ValueError: outside"),
        ("raises", 0, 1, "ValueError: inside"),
        ("leaves early", 1, 3, "exited before the end, with status 3"),
        ("says a word", 0, 1, "that was all"),
        ("cannot speak", 0, 1, "ValueError: unheard here"),
        more_case("cannot speak", 1, 1, "ValueError: unheard here"),
        ("is interrupted twice", 1, 130, "interrupted"),
    ],
)
def test_the_other_process_prints_why(what, who, status, reason):
    statuses, stderr, _ = run(what, who)
    assert statuses == [status] * 2, stderr
    other = 1 - who
    assert f"ftmesh: process {other}: process {who}: {reason}" in stderr[other]


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_is_done_waits_for_the_others(who):
    statuses, stderr, results = run("is done before the others", who)
    assert statuses == [0, 0], stderr
    assert all("done" in result.stdout for result in results)


@pytest.mark.slow
def test_after_jax_distributed_initialize():
    statuses, stderr, _ = run("joins twice", 0)
    assert statuses == [0, 0], stderr
