"""``ftmesh doctor``: its output and exit status."""

import json
import os
import subprocess
import sys

import pytest

from ftmesh.cli.main import main


@pytest.fixture
def run(capsys):
    def call(*argv):
        try:
            status = main(["doctor", *argv])
        except SystemExit as stop:  # argparse
            status = stop.code
        return status, *capsys.readouterr()

    return call


def test_findings_are_drawn_and_end_with_the_option(run, monkeypatch):
    monkeypatch.setenv("FTMESH_SICK", "wrong@1,0;link-wrong@2,1-2,0")
    status, out, _ = run("--emulate", "--mesh", "3x2", "--failed", "1x1@0,1")
    assert status == 1
    assert out.splitlines() == [
        "3x2 less 1x1@0,1",
        "   0   1   2",
        "0  o   X   o",
        "           ╳",
        "1  X   o   o",
        "o live   X failed   ╳ failed link",
        "chip 1,0 is wrong: float32 in 6 of 6 runs, bfloat16 in 6 of 6 runs, "
        "integers in 6 of 6 runs",
        "link 2,0-2,1 is wrong: 1 wrong word from 2,1 to 2,0",
        "to keep both ends of a bad link: --failed '1x1@1,0;1x1@0,1' --failed-links 2,0-2,1; "
        "otherwise:",
        "--failed '2x1@1,0;1x1@0,1'",
    ]


def test_healthy_mesh(run):
    status, out, _ = run("--emulate", "--mesh", "2x1", "--json")
    data = json.loads(out)
    assert status == 0
    assert data.pop("seconds") > 0
    assert data == {
        "mesh": "2x1",
        "live": 2,
        "links": 1,
        "well": True,
        "found": [],
        "untried": [],
        "failed": "",
        "links_alone": None,
    }


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--emulate"], "--emulate needs --mesh"),
        (["--emulate", "--mesh", "2x2", "--process-id", "1"], "--emulate is for one process"),
        (["--timeout", "0"], "'0' is not a number from 0.001"),
        (["--slow", "1"], "'1' is not a number from 1.001"),
        (["--mesh", "two"], "'two' is not a mesh shape"),
        (["--limit", "soon"], "'soon' is not a number"),
        (["--coordinator", "127.0.0.1:99"], "the number of processes is not given"),
    ],
)
def test_bad_arguments(run, argv, reason):
    status, _, err = run(*argv)
    assert status == 2
    assert reason in err


def test_malformed_faults_are_rejected(run, monkeypatch):
    monkeypatch.setenv("FTMESH_SICK", "wrong@7,7")
    status, _, err = run("--emulate", "--mesh", "2x2")
    assert status == 2
    assert "chip (7, 7) is not on the mesh" in err


def test_help(run):
    status, out, _ = run("--help")
    assert status == 0
    for word in ("--timeout", "--slow", "--one-by-one", "--coordinator", "FTMESH_SICK", "status"):
        assert word in out


@pytest.mark.slow
@pytest.mark.parametrize("faults", ["silent@1,0", "link-silent@0,0-1,0"])
def test_silent_chips_do_not_keep_the_command_from_exiting(faults):
    env = {**os.environ, "FTMESH_SICK": faults, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "ftmesh", "doctor", "--emulate", "--mesh", "2x2"]
    done = subprocess.run(
        [*command, "--timeout", "5"], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done.stderr
    assert "is silent" in done.stdout
    assert "--failed 1x1@" in done.stdout.splitlines()[-1]
