"""Loops as users write them: six changed lines, and they survive the loss of a worker."""

import difflib
import json
import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from tests.processes.loops.points import SAMPLER, STEPS
from tests.support.more import more, more_case

LOOPS = ("nnx", "linen", "shard_map", "hsdp")
FOLDER = Path(__file__).parent / "loops"
ROOT = FOLDER.parent.parent.parent
TIMEOUT = 300  # seconds: ten times what a run takes
TOLERANCE = 1e-6
PODS = {
    "2 x 2": ("--hosts", "2", "--devices-per-host", "2", "--mesh", "2x2"),
    "4 x 1": ("--hosts", "4", "--devices-per-host", "1", "--mesh", "2x2", "--host-shape", "1x1"),
}


def code_lines(path):
    """The lines of a program, without indentation and empty ones."""
    return list(filter(None, map(str.strip, path.read_text().splitlines())))


@pytest.mark.parametrize("loop", LOOPS)
def test_six_lines_change(loop):
    plain, elastic = (code_lines(FOLDER / f"{loop}_{kind}.py") for kind in ("plain", "elastic"))
    changes = difflib.SequenceMatcher(None, plain, elastic, autojunk=False).get_opcodes()
    sizes = [max(a1 - a0, b1 - b0) for tag, a0, a1, b0, b1 in changes if tag != "equal"]
    assert sum(sizes) <= 6, changes


def environment(folder, **variables):
    fast = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return {**os.environ, **fast, "PYTHONPATH": str(ROOT), "OUT": str(folder), **variables}


def weights_in(folder):
    """The weights that each process has saved, by process."""
    saved = {}
    for path in folder.glob("*.npz"):
        with np.load(path) as file:
            saved[int(path.stem)] = {name: file[name] for name in file.files}
    return saved


def assert_same(weights, expected, tolerance=0.0):
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, rtol=0, atol=tolerance, err_msg=name)


class PodRun:
    """A loop under ``ftmesh launch``: the weights, examples and events that it left behind."""

    def __init__(self, folder, loop, pod, *options, faults="", **variables):
        (folder / "run").mkdir(parents=True)
        launch = ["ftmesh", "launch", *PODS[pod], "--failures", "3", "--collective-limit", "5"]
        launch += ["--events", str(folder / "events.jsonl"), "--run-dir", str(folder / "run")]
        command = [*launch, *options, "--", sys.executable, str(FOLDER / f"{loop}_elastic.py")]
        if faults:
            variables["FTMESH_FAULTS"] = faults
        done = subprocess.run(
            [sys.executable, "-m", *command],
            env=environment(folder, **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
        )
        assert done.returncode == 0, done.stdout[-5000:]
        self.weights, self.log = weights_in(folder), done.stdout
        self.events = list(map(json.loads, (folder / "events.jsonl").read_text().splitlines()))
        assert_each_example_once(self.log)

    def generations(self, *facts):
        found = [event for event in self.events if event["event"] == "epoch"]
        return [tuple(event[fact] for fact in facts) for event in found]


def assert_each_example_once(log):
    """What processes read of a step last, with the fewest chips, is its batch."""
    reads = {}  # step -> chips -> process -> examples; the last time counts
    pattern = r"^\[(\d+)\] step (\d+) with (\d+) chips reads (.*)$"
    for who, step, chips, rows in re.findall(pattern, log, re.M):
        reads.setdefault(int(step), {}).setdefault(int(chips), {})[who] = rows.split()
    for step in range(STEPS):
        parts = reads[step][min(reads[step])].values()
        assert sorted(map(int, chain.from_iterable(parts))) == sorted(SAMPLER[step]), step


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The weights of a plain loop in one process with four devices."""
    cache = {}

    def run(loop):
        if loop not in cache:
            folder = tmp_path_factory.mktemp(loop)
            flags = "--xla_force_host_platform_device_count=4"
            subprocess.run(
                [sys.executable, str(FOLDER / f"{loop}_plain.py")],
                env=environment(folder, XLA_FLAGS=flags, JAX_PLATFORMS="cpu"),
                check=True,
                stdout=subprocess.DEVNULL,
                timeout=TIMEOUT,
            )
            cache[loop] = weights_in(folder)[0]
        return cache[loop]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["linen", more_case("nnx"), more_case("shard_map"), "hsdp"])
def test_in_place(loop, plain, tmp_path):
    """The last committed state is on the devices; the step of "linen" donates it."""
    run = PodRun(tmp_path, loop, "2 x 2", faults="kill@1:7")
    first, second, *others = run.generations("in_place", "live", "failed", "source")
    assert first == (False, 4, "", "start")
    assert second == (True, 2, "2x1@0,1", "host memory" if loop == "linen" else "devices")
    if others:  # gloo keeps a connection between devices of one host that a timeout has closed
        assert loop == "hsdp"
        assert others == [(False, 4, "", "host memory")]
        (restart,) = (event for event in run.events if event["event"] == "restart")
        assert "Gloo AllGather failed: Application timeout caused pair closure" in restart["why"]
    assert run.weights.keys() >= {0}
    assert_same(run.weights[0], plain(loop), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["shard_map", *map(more_case, ["nnx", "linen", "hsdp"])])
def test_restart(loop, plain, tmp_path):
    """With the same mesh the weights are those of an undisturbed run to the bit."""
    undisturbed = PodRun(tmp_path / "undisturbed", loop, "2 x 2")
    assert undisturbed.generations("source") == [("start",)]
    run = PodRun(tmp_path / "run", loop, "2 x 2", "--restart", faults="kill@1:7:collective")
    first, last = run.generations("in_place", "live", "source")
    assert first == (False, 4, "start")
    assert last == (False, 4, "host memory")
    assert run.weights.keys() == undisturbed.weights.keys() == {0, 1}
    for process, weights in run.weights.items():
        assert_same(weights, undisturbed.weights[process])
        assert_same(weights, plain(loop), TOLERANCE)


@more
@pytest.mark.slow
def test_the_first_process_is_lost(plain, tmp_path):
    run = PodRun(tmp_path, "linen", "2 x 2", faults="kill@0:7:collective")
    assert run.weights.keys() == {1}
    assert_same(run.weights[1], plain("linen"), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [more_case("2"), "4"])
def test_sharded_weights_of_four_processes(shards, plain, tmp_path):
    """Of two replicas of two shards one is left; of one of four shards there are copies."""
    variables = {"SHARDS": "2" if shards == "2" else "12"}  # or three, of three chips
    run = PodRun(tmp_path, "hsdp", "4 x 1", faults="kill@3:7", **variables)
    assert run.generations("in_place", "live", "source")[-1] == (True, 3, "devices")
    assert run.weights.keys() == {0, 1, 2}
    for weights in run.weights.values():
        assert_same(weights, plain("hsdp"), TOLERANCE)


@more
@pytest.mark.slow
def test_two_losses_one_after_another(plain, tmp_path):
    run = PodRun(tmp_path, "nnx", "4 x 1", faults="kill@1:5;kill@3:9")
    assert [live for (live,) in run.generations("live")] == [4, 3, 2]
    assert_same(run.weights[0], plain("nnx"), TOLERANCE)
