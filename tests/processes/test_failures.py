"""Real pods in which things fail: what goes on, from where, and that the weights come out right."""

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
from examples.soak.checks import CLOSE, Run, check, difference
from examples.soak.running import LIMITS, MESH, PHASE_LIMIT, QUICKLY, Pod, limits_of_phases
from examples.soak.train import PRESETS
from ftmesh.testing.fault_actions import noted_processes
from ftmesh.testing.fault_spec import draw
from ftmesh.topology.partners import partners
from ftmesh.topology.topology import Topology
from tests.support.more import more

pytestmark = pytest.mark.slow

HOSTS, STEPS = 4, 30
END = 400  # seconds: ten times what a run takes
TO_GO = 60  # for all processes of a launcher that is killed
BATCH = PRESETS["tiny"].batch
BLOCKS = ("2x2@0,0", "2x2@2,0", "2x2@0,2", "2x2@2,2")  # of the hosts


def started(folder, *train, faults="", how=()):
    """A launcher that trains, with all its files in a folder."""
    (folder / "run").mkdir(parents=True, exist_ok=True)
    limits = [str(word) for limit in LIMITS.items() for word in limit]
    limits += ["--limits", limits_of_phases(PHASE_LIMIT)]
    launch = ["ftmesh", "launch", "--hosts", str(HOSTS), "--devices-per-host", "4", "--mesh", MESH]
    launch += ["--host-shape", "2x2", "--failures", "10", *limits, *how]
    launch += ["--events", str(folder / "events.jsonl"), "--run-dir", str(folder / "run"), "--"]
    launch += [sys.executable, "-m", "examples.soak.train", "--steps", str(STEPS)]
    launch += ["--out", str(folder / "out"), *train]
    env = {**os.environ, **QUICKLY, "PYTHONPATH": str(Path(ftmesh.__file__).parent.parent)}
    if faults:
        env["FTMESH_FAULTS"] = faults
    with open(folder / "log", "ab") as log:
        return subprocess.Popen([sys.executable, "-m", *launch], env=env, stdout=log, stderr=log)


def trained(folder, *train, faults="", how=()):
    """A run that has ended by itself."""
    process = started(folder, *train, faults=faults, how=how)
    try:
        status = process.wait(END)
    except subprocess.TimeoutExpired:
        pytest.fail((folder / "log").read_text()[-5000:])
    finally:
        process.terminate()
        process.wait()
    run = Run.read(folder, status, faults)
    assert status == 0, (folder / "log").read_text()[-5000:]
    assert len(run.faults) == len(list(filter(None, faults.split(";"))))  # each has struck
    assert noted_processes(folder / "run") == []
    return run


def assert_well(run, reference):
    assert check(run, steps=STEPS, num_examples=STEPS * BATCH, reference=reference) == []


def assert_same_bits(run, reference):
    with np.load(run.folder / "out" / "weights.npz") as own, np.load(reference) as wanted:
        for name in wanted.files:
            assert own[name].tobytes() == wanted[name].tobytes(), name


def epochs(run, *facts):
    """Some facts of each epoch."""
    return [tuple(event[fact] for fact in facts) for event in run.of("epoch")]


def wait_until(is_so, seconds):
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, "time is up"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of a run in which nothing fails."""
    run = trained(tmp_path_factory.mktemp("undisturbed"))
    assert_well(run, None)
    assert epochs(run, "epoch", "live", "source") == [(1, 16, "start")]
    return run.folder / "out" / "weights.npz"


def test_process_0_is_killed_in_a_collective_and_its_host_comes_back(undisturbed, tmp_path):
    """No checkpoints at all: shards of the lost come from copies on devices of other hosts."""
    run = trained(tmp_path, faults="kill@0:8:collective", how=("--grow-back", "1"))
    assert_well(run, undisturbed)
    first, in_place, grown = epochs(run, "in_place", "live", "failed", "source", "repeated")
    assert first == (False, 16, "", "start", 0)
    assert in_place == (True, 12, BLOCKS[0], "devices", 0)
    assert grown == (False, 16, "", "host memory", 0)
    (lost,) = run.of("failed")
    assert (lost["host"], lost["chips"], lost["how"]) == (0, BLOCKS[0], "ended by SIGKILL")
    assert lost["phase"] in ("read", "step", "commit")
    assert run.of("restart")[-1]["why"] == "hosts that were missing come back"
    assert not list(tmp_path.glob("saved*"))


@more
def test_two_hosts_at_once(undisturbed, tmp_path):
    """One of them has copies of the other's shards: so what is left goes back to host memory."""
    faults = "kill@2:13:collective;kill@3:13:collective"
    run = trained(tmp_path, "--copy-every", "5", faults=faults)
    assert_well(run, undisturbed)
    assert sorted(event["host"] for event in run.of("failed")) == [2, 3]
    last = run.of("epoch")[-1]
    assert last["hosts"] == [0, 1]
    assert (last["in_place"], last["live"], last["failed"]) == (True, 8, "4x2@0,2")
    assert (last["source"], last["from_step"]) == ("host memory", 10)
    assert last["repeated"] in (1, 2)  # the step before may have counted by then, or not


def test_in_which_way_two_hosts_are_partners():
    """What the test above stands on."""
    topology = Topology.grid(MESH)
    hosts = [x // 2 + 2 * (y // 2) for x, y in topology.coords]
    found = partners(topology, hosts)
    pairs = {(hosts[rank], hosts[partner]) for rank, partner in enumerate(found)}
    assert pairs & {(2, 3), (3, 2)}


@more
def test_all_workers_and_then_the_service(undisturbed, tmp_path):
    """Nothing is left on any device: all goes on from host memory, to the bit."""
    run = trained(tmp_path, "--copy-every", "5", faults="all@1:13:collective;service@2:24")
    assert_well(run, undisturbed)
    assert_same_bits(run, undisturbed)
    first, second, third = epochs(run, "in_place", "live", "source", "from_step")
    assert first == (False, 16, "start", 0)
    assert second == (False, 16, "host memory", 10)
    assert third == (False, 16, "host memory", 20)
    assert "service" in run.of("restart")[-1]["why"]


def test_a_power_cut_in_the_middle_of_a_checkpoint(undisturbed, tmp_path):
    """The launcher goes without a word; one part of the checkpoint is missing, and one is torn."""
    saved = ("--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-every", "10")
    process = started(tmp_path, *saved, faults="stop@2:20:checkpoint")
    try:
        parts = [tmp_path / "saved" / "20" / name for name in ("0.bin", "1.bin", "3.bin")]
        struck = tmp_path / "run" / "faults.jsonl"
        wait_until(lambda: struck.exists() and all(part.exists() for part in parts), END)
        assert {each["kind"] for each in noted_processes(tmp_path / "run")} == {
            "worker",
            "keeper",
            "service",
        }
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: noted_processes(tmp_path / "run") == [], TO_GO)
    os.truncate(parts[1], parts[1].stat().st_size // 2)
    again = tmp_path / "again"
    run = trained(again, *saved, "--resume")
    assert epochs(run, "source", "from_step", "live") == [("checkpoint", 10, 16)]
    assert "passed over the checkpoint of step 20" in (again / "log").read_text()
    assert_same_bits(run, undisturbed)


def test_what_is_wrong_stuck_or_held_is_named_and_left_out(undisturbed, tmp_path):
    faults = "wrong@1:6;stuck@1:12;hold@0:18"
    run = trained(tmp_path, "--check-every", "1", "--copy-every", "5", faults=faults)
    assert_well(run, undisturbed)
    (masked,) = run.of("masked")
    assert masked["chips"] == "1x1@2,0"  # the first chip of host 1
    assert "after step 6 its parameters are not those of the other chips" in masked["why"]
    stuck, held = run.of("failed")
    for lost, host, step in ((stuck, 1, 12), (held, 0, 18)):
        assert (lost["host"], lost["chips"]) == (host, BLOCKS[host])
        assert step - 1 <= lost["step"] <= step  # the last that was heard of it
        assert lost["how"].startswith("is stuck: alive, and ")
        assert f"s in phase {lost['phase']!r} of step {lost['step']}" in lost["how"]
        stacks = (tmp_path / "run" / f"stacks-1-{host}.txt").read_text()
        assert "fault_acts.py" in stacks
    assert epochs(run, "live", "repeated") == [(16, 0), (15, 0), (12, 0), (8, 0)]
    assert all(event["in_place"] for event in run.of("epoch")[1:])
    log = (tmp_path / "log").read_text()
    assert f"host 1 is lost (process 1, chips {BLOCKS[1]}): it is stuck: alive" in log


def test_a_soak(undisturbed, tmp_path):
    """Faults that are drawn; their text is in the message where a run goes wrong."""
    pod = Pod(hosts=HOSTS, steps=STEPS, failures=10)
    faults = draw(13, hosts=HOSTS, steps=STEPS - 1)
    run = pod.train(tmp_path / "run", faults, limit=END)
    examples = STEPS * BATCH
    assert check(run, steps=STEPS, num_examples=examples, reference=undisturbed) == [], faults
    assert json.loads((tmp_path / "run" / "run" / "faults.jsonl").read_text().splitlines()[0])
    assert difference(run.folder / "out" / "weights.npz", undisturbed) < CLOSE
