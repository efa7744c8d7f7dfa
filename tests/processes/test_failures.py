"""Real pods with failures: how they recover, from which state, and with the right weights."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import ftmesh
from examples.soak.checks import TOLERANCE, Run, check, difference
from examples.soak.pod import FAST_COMPILE, LIMITS, MESH, PHASE_LIMIT, Pod, phase_limits
from examples.soak.train import PRESETS
from ftmesh.testing.fault_injection import recorded_processes
from ftmesh.testing.fault_spec import draw_faults
from ftmesh.topology.ranks import Ranks, backup_ranks
from ftmesh.topology.topology import Topology
from tests.support.more import more

pytestmark = pytest.mark.slow

HOSTS, STEPS = 4, 30
TIMEOUT = 400  # seconds: ten times what a run takes
EXIT_TIMEOUT = 60  # for all processes of a launcher that is killed
BATCH = PRESETS["tiny"].batch
BLOCKS = ("2x2@0,0", "2x2@2,0", "2x2@0,2", "2x2@2,2")  # of the hosts


def start_launcher(folder, *arguments, faults="", options=()):
    """Start a launcher that trains, with all its files in `folder`."""
    (folder / "run").mkdir(parents=True, exist_ok=True)
    limits = [str(word) for limit in LIMITS.items() for word in limit]
    limits += ["--limits", phase_limits(PHASE_LIMIT)]
    launch = ["ftmesh", "launch", "--hosts", str(HOSTS), "--devices-per-host", "4", "--mesh", MESH]
    launch += ["--host-shape", "2x2", "--failures", "10", *limits, *options]
    launch += ["--events", str(folder / "events.jsonl"), "--run-dir", str(folder / "run"), "--"]
    launch += [sys.executable, "-m", "examples.soak.train", "--steps", str(STEPS)]
    launch += ["--out", str(folder / "out"), *arguments]
    env = {**os.environ, **FAST_COMPILE, "PYTHONPATH": str(Path(ftmesh.__file__).parent.parent)}
    if faults:
        env["FTMESH_FAULTS"] = faults
    with open(folder / "log", "ab") as log:
        return subprocess.Popen([sys.executable, "-m", *launch], env=env, stdout=log, stderr=log)


def train(folder, *arguments, faults="", options=()):
    """Run a launcher to its end; return the run."""
    process = start_launcher(folder, *arguments, faults=faults, options=options)
    try:
        status = process.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        pytest.fail((folder / "log").read_text()[-5000:])
    finally:
        process.terminate()
        process.wait()
    run = Run.read(folder, status, faults)
    assert status == 0, (folder / "log").read_text()[-5000:]
    assert len(run.faults) == len(list(filter(None, faults.split(";"))))  # all were injected
    assert recorded_processes(folder / "run") == []
    return run


def assert_correct(run, reference):
    assert check(run, steps=STEPS, num_examples=STEPS * BATCH, reference=reference) == []


def assert_same_bits(run, reference):
    with np.load(run.folder / "out" / "weights.npz") as own, np.load(reference) as expected:
        for name in expected.files:
            assert own[name].tobytes() == expected[name].tobytes(), name


def generations(run, *facts):
    """Some facts of each generation."""
    return [tuple(event[fact] for fact in facts) for event in run.named("epoch")]


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the timeout is over"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of a run without failures."""
    run = train(tmp_path_factory.mktemp("undisturbed"))
    assert_correct(run, None)
    assert generations(run, "epoch", "live", "source") == [(1, 16, "start")]
    return run.folder / "out" / "weights.npz"


def test_process_0_is_killed_in_a_collective_and_its_host_comes_back(undisturbed, tmp_path):
    """Without checkpoints: lost shards come from copies on devices of other hosts."""
    run = train(tmp_path, faults="kill@0:8:collective", options=("--grow-back", "1"))
    assert_correct(run, undisturbed)
    first, in_place, grown = generations(run, "in_place", "live", "failed", "source", "repeated")
    assert first == (False, 16, "", "start", 0)
    assert in_place == (True, 12, BLOCKS[0], "devices", 0)
    assert grown == (False, 16, "", "host memory", 0)
    (lost,) = run.named("failed")
    assert (lost["host"], lost["chips"], lost["how"]) == (0, BLOCKS[0], "ended by SIGKILL")
    assert lost["phase"] in ("read", "step", "commit", "save")
    assert run.named("restart")[-1]["why"] == "lost hosts come back"
    assert not list(tmp_path.glob("saved*"))


@more
def test_two_hosts_at_once(undisturbed, tmp_path):
    """One has the copies of the other's shards: the state comes from host memory."""
    faults = "kill@2:13:collective;kill@3:13:collective"
    run = train(tmp_path, "--copy-every", "5", faults=faults)
    assert_correct(run, undisturbed)
    assert sorted(event["host"] for event in run.named("failed")) == [2, 3]
    last = run.named("epoch")[-1]
    assert last["hosts"] == [0, 1]
    assert (last["in_place"], last["live"], last["failed"]) == (True, 8, "4x2@0,2")
    assert (last["source"], last["from_step"]) == ("host memory", 10)
    assert last["repeated"] in (1, 2)  # the step before may have been committed or not


def test_two_hosts_hold_the_backups_of_each_other():
    """The assumption of the test above."""
    topology = Topology.grid(MESH)
    hosts = [x // 2 + 2 * (y // 2) for x, y in Ranks(topology).coords]
    backups = backup_ranks(topology, hosts)
    pairs = {(hosts[rank], hosts[partner]) for rank, partner in enumerate(backups)}
    assert pairs & {(2, 3), (3, 2)}


@more
def test_all_workers_and_then_the_service(undisturbed, tmp_path):
    """No device has a state: all continue from host memory, to the bit."""
    run = train(tmp_path, "--copy-every", "5", faults="all@1:13:collective;service@2:24")
    assert_correct(run, undisturbed)
    assert_same_bits(run, undisturbed)
    first, second, third = generations(run, "in_place", "live", "source", "from_step")
    assert first == (False, 16, "start", 0)
    assert second == (False, 16, "host memory", 10)
    assert third == (False, 16, "host memory", 20)
    assert "service" in run.named("restart")[-1]["why"]


@more
def test_a_power_cut_in_the_middle_of_a_checkpoint(undisturbed, tmp_path):
    """The launcher is killed; one part of the checkpoint is missing, and one is truncated."""
    saved = ("--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-every", "10")
    process = start_launcher(tmp_path, *saved, faults="stop@2:20:checkpoint")
    try:
        parts = [tmp_path / "saved" / "20" / name for name in ("0.bin", "1.bin", "3.bin")]
        faults = tmp_path / "run" / "faults.jsonl"
        wait_until(lambda: faults.exists() and all(part.exists() for part in parts), TIMEOUT)
        assert {record["kind"] for record in recorded_processes(tmp_path / "run")} == {
            "worker",
            "store",
            "service",
        }
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: recorded_processes(tmp_path / "run") == [], EXIT_TIMEOUT)
    os.truncate(parts[1], parts[1].stat().st_size // 2)
    again = tmp_path / "again"
    run = train(again, *saved, "--resume")
    assert generations(run, "source", "from_step", "live") == [("checkpoint", 10, 16)]
    assert "skipped the checkpoint of step 20" in (again / "log").read_text()
    assert_same_bits(run, undisturbed)


def test_wrong_stuck_and_blocked_workers(undisturbed, tmp_path):
    faults = "wrong@1:6;stuck@1:12;hold@0:18"
    run = train(tmp_path, "--check-every", "1", "--copy-every", "5", faults=faults)
    assert_correct(run, undisturbed)
    (quarantined,) = run.named("masked")
    assert quarantined["chips"] == "1x1@2,0"  # the first chip of host 1
    assert "its parameters differ from those of the other chips after step 6" in quarantined["why"]
    stuck, held = run.named("failed")
    for lost, host, step in ((stuck, 1, 12), (held, 0, 18)):
        assert (lost["host"], lost["chips"]) == (host, BLOCKS[host])
        assert step - 1 <= lost["step"] <= step  # the last step it reported
        assert lost["how"].startswith("is stuck: alive, and ")
        assert f"s in phase {lost['phase']!r} of step {lost['step']}" in lost["how"]
        stacks = (tmp_path / "run" / f"stacks-1-{host}.txt").read_text()
        assert "fault_injection.py" in stacks
    assert generations(run, "live", "repeated") == [(16, 0), (15, 0), (12, 0), (8, 0)]
    assert all(event["in_place"] for event in run.named("epoch")[1:])
    log = (tmp_path / "log").read_text()
    assert f"host 1 is lost (process 1, chips {BLOCKS[1]}): it is stuck: alive" in log


@more
def test_random_faults(undisturbed, tmp_path):
    """Random faults; their text is in the message if the run fails."""
    pod = Pod(hosts=HOSTS, steps=STEPS, failures=10)
    faults = draw_faults(13, hosts=HOSTS, steps=STEPS - 1)
    run = pod.train(tmp_path / "run", faults, limit=TIMEOUT)
    examples = STEPS * BATCH
    assert check(run, steps=STEPS, num_examples=examples, reference=undisturbed) == [], faults
    assert json.loads((tmp_path / "run" / "run" / "faults.jsonl").read_text().splitlines()[0])
    assert difference(run.folder / "out" / "weights.npz", undisturbed) < TOLERANCE
