"""The doctor on two hosts: both find the same, on chips and links of either, and between them."""

import json
import sys
from pathlib import Path

import pytest

from ftmesh.elastic.local_pod import run_pod

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_both_find_the_same():
    command = [sys.executable, str(Path(__file__).parent / "examined.py")]
    done = run_pod(command, 2, 4, "4x2", env={"PYTHONPATH": str(ROOT)}, timeout=120)
    assert [each.status for each in done] == [0, 0], [each.stderr for each in done]
    first, second = (json.loads(each.stdout.splitlines()[-1]) for each in done)
    assert first == second
    assert [(one["kind"], one["chips"]) for one in first["found"]] == [
        ("wrong", [[3, 1]]),
        ("wrong", [[1, 0], [1, 1]]),
        ("wrong", [[2, 1], [3, 1]]),
    ]
    assert first["found"][1]["detail"] == "1 wrong word from 1,0 to 1,1"
    assert first["failed"] == "1x1@1,1;1x1@3,1"
    assert first["untried"] == []
    assert first["differ"] == [[2, 1]]
