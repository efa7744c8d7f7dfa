"""Trainers on pods: hosts that have lost some or all chips train as one process would."""

import argparse
import json
import os
import re
import sys
from pathlib import Path

import jax
import linear_train
import numpy as np
import optax
import pytest
from linear_train import Config

from examples.common.arguments import start
from examples.common.report import read_metrics
from examples.common.trainer import StepOptions
from ftmesh import Topology
from ftmesh.elastic.local_pod import run_pod
from tests.support.linear import linear_job, linear_trainer
from tests.support.linear import train as train_alone
from tests.support.more import more
from tests.support.watching import DeviceWatcher

HERE = Path(__file__).parent
PATHS = os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parent.parent)))
STEPS = 6
GLOO = re.compile(
    r"\[Gloo\]|Rank|is connected to|[Ee]xpected number of|connected|peer ranks|is :|[\d.:\s]"
)

pytestmark = pytest.mark.usefixtures("quick_compiler")


def train(hosts, folder, *argv, mesh="4x4", timeout=400, **env):
    """Train the linear model in several processes; return their results and the losses."""
    number = int(np.prod([int(n) for n in mesh.split("x")])) // hosts
    command = [sys.executable, str(HERE / "linear_train.py"), "--out", str(folder), "--limit", "90"]
    env = {"PYTHONPATH": PATHS, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", **env}
    done = run_pod([*command, *argv], hosts, number, mesh, env=env, timeout=timeout)
    assert [result.status for result in done] == [0] * hosts, done
    return done, read_metrics(folder / "metrics.jsonl")


def alone(failed, *argv, mesh="4x4", steps=STEPS, **options):
    """The losses and evaluations of one process with the same devices."""
    count = int(np.prod([int(n) for n in mesh.split("x")]))
    topology = Topology.from_devices(jax.devices()[:count], shape=mesh, failed=failed)
    job = linear_job(
        linear_trainer(topology, StepOptions(**options), kind=optax.adam),
        steps=steps,
        steps_per_eval=3,
    )
    report = train_alone(job, *argv)
    return report.losses, report.evaluations


def assert_same(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        assert list(ours) == list(theirs)
        np.testing.assert_allclose(
            [v if isinstance(v, float) else v["accuracy"] for v in ours.values()],
            [v if isinstance(v, float) else v["accuracy"] for v in theirs.values()],
            rtol=1e-6,
        )


def printed(done):
    """Which processes printed to stdout; Gloo's threads print there all at once."""
    return [number for number, result in enumerate(done) if GLOO.sub("", result.stdout)]


@pytest.mark.slow
def test_unequal_hosts_train_and_one_process_resumes(
    tmp_path,
):
    """One host has no live chip, one has all, one has two of four."""
    failed, argv = "2x2@0,0;2x1@0,5", ("--checkpoint-dir", str(tmp_path / "saved"))
    more = ("--failed", failed, "--steps", "3", *argv)
    done, found = train(3, tmp_path / "run", *more, mesh="2x6", WATCHED="1")
    used = [json.loads(result.stdout.rpartition("used: ")[2]) for result in done]
    live = list(range(4, 10))
    assert used == [[], live, live]
    assert ["after step 3: accuracy" in result.stdout for result in done] == [False, True, False]
    (said,) = [line for line in done[1].stdout.splitlines() if line.startswith("linear: accuracy")]
    assert "on 2x6 less 2x2@0,0;2x1@0,5" in said
    assert "points, on 2x6 less 2x2@0,0;2x1@0,5" in (tmp_path / "run" / "run.svg").read_text()
    whole = alone(failed, mesh="2x6")
    assert_same(found, [{step: v for step, v in part.items() if step <= 3} for part in whole])
    found = alone(failed, *argv, "--resume", mesh="2x6")
    assert_same(found, [{step: v for step, v in part.items() if step > 3} for part in whole])


@more
@pytest.mark.slow
def test_another_number_of_processes_resumes(tmp_path):
    argv = ("--failed", "2x2@0,0", "--checkpoint-dir", str(tmp_path / "saved"))
    done, _ = train(8, tmp_path / "run", *argv, "--steps", "3")
    assert printed(done) == [1]
    done, found = train(4, tmp_path / "run", *argv, "--steps", str(STEPS), "--resume")
    assert printed(done) == [0]
    assert_same(found, alone("2x2@0,0"))


@more
@pytest.mark.slow
def test_with_idle_devices_the_first_host_with_a_live_chip_is_primary(tmp_path):
    argv = ("--failed", "4x1@0,0", "--steps", str(STEPS), "--idle")
    done, found = train(2, tmp_path, *argv, mesh="4x2")
    assert printed(done) == [1]
    assert_same(found, alone("4x1@0,0", mesh="4x2", with_idle=True))


def test_nothing_runs_on_the_failed_chips_of_one_process():
    argv = ["--mesh", "8x8", "--failed", "2x2@0,0;8x6@0,2", "--steps", "3"]
    with DeviceWatcher() as watching:
        parser = argparse.ArgumentParser()
        assert start("linear", parser, {"tiny": Config()}, linear_train.train, argv) == 0
    assert watching.used == {*range(2, 8), *range(10, 16)}


def test_the_watcher_sees_what_runs_on_a_device():
    with DeviceWatcher() as watching:
        jax.block_until_ready(jax.numpy.zeros(3) + 1)
        assert watching.used == {0}
        jax.device_put(np.ones(3), jax.devices()[5])
    assert watching.used == {0, 5}


@pytest.mark.slow  # scripts/pods has every division and damage
@pytest.mark.parametrize(
    ("hosts", "failed", "idle"),
    [pytest.param(2, "4x2@0,2", True, marks=more), (4, "2x2@2,2", False)],
)
def test_numbers_of_hosts_and_damages(hosts, failed, idle, tmp_path):
    argv = ("--failed", failed, "--steps", str(STEPS), *["--idle"] * idle)
    _, found = train(hosts, tmp_path, *argv)
    assert_same(found, alone(failed, with_idle=idle))
