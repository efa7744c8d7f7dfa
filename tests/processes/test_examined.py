"""The health check on two hosts: the same findings for chips and links of and between both."""

import json
import sys
from pathlib import Path

import pytest

from ftmesh.elastic.local_pod import run_pod

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_both_hosts_have_the_same_findings():
    command = [sys.executable, str(Path(__file__).parent / "examined.py")]
    results = run_pod(command, 2, 4, "4x2", env={"PYTHONPATH": str(ROOT)}, timeout=120)
    assert [result.status for result in results] == [0, 0], [result.stderr for result in results]
    first, second = (json.loads(result.stdout.splitlines()[-1]) for result in results)
    assert first == second
    assert [(entry["kind"], entry["chips"]) for entry in first["found"]] == [
        ("wrong", [[3, 1]]),
        ("wrong", [[1, 0], [1, 1]]),
        ("wrong", [[2, 1], [3, 1]]),
    ]
    assert first["found"][1]["detail"] == "1 wrong word from 1,0 to 1,1"
    assert first["failed"] == "1x1@1,1;1x1@3,1"
    assert first["untried"] == []
    assert first["differ"] == [[2, 1]]
