"""Trainers on pods: hosts that have lost different chips, or all, train as one process would."""

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
from examples.common.loop import run, start_log
from examples.common.report import read_metrics
from examples.common.trainer import StepOptions
from ftmesh import Topology
from ftmesh.elastic.local_pod import run_pod
from tests.support.linear import arguments, linear_job, linear_trainer
from tests.support.more import more
from tests.support.watching import Watching

HERE = Path(__file__).parent
PATHS = os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parent.parent)))
STEPS = 6
GLOO = re.compile(
    r"\[Gloo\]|Rank|is connected to|[Ee]xpected number of|connected|peer ranks|is :|[\d.:\s]"
)

pytestmark = pytest.mark.usefixtures("quick_compiler")


def train(hosts, folder, *argv, mesh="4x4", timeout=400, **env):
    """A run of the linear model by several processes; what each of them said, and the losses."""
    number = int(np.prod([int(n) for n in mesh.split("x")])) // hosts
    command = [sys.executable, str(HERE / "linear_train.py"), "--out", str(folder), "--limit", "90"]
    env = {"PYTHONPATH": PATHS, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", **env}
    done = run_pod([*command, *argv], hosts, number, mesh, env=env, timeout=timeout)
    assert [each.status for each in done] == [0] * hosts, done
    return done, read_metrics(folder / "metrics.jsonl")


def alone(failed, *argv, mesh="4x4", steps=STEPS, **options):
    """The losses and evaluations of one process with as many devices."""
    count = int(np.prod([int(n) for n in mesh.split("x")]))
    topology = Topology.from_devices(jax.devices()[:count], shape=mesh, failed=failed)
    job = linear_job(
        linear_trainer(topology, StepOptions(**options), kind=optax.adam),
        steps=steps,
        steps_per_eval=3,
    )
    report = run(job, arguments(*argv), start_log(arguments(*argv)))
    return report.losses, report.evaluations


def assert_same(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        assert list(ours) == list(theirs)
        np.testing.assert_allclose(
            [v if isinstance(v, float) else v["accuracy"] for v in ours.values()],
            [v if isinstance(v, float) else v["accuracy"] for v in theirs.values()],
            rtol=1e-6,
        )


def spoke(done):
    """Which processes said anything on stdout; Gloo's threads talk there, all at once."""
    return [number for number, each in enumerate(done) if GLOO.sub("", each.stdout)]


@pytest.mark.slow
def test_unequal_hosts_train_and_checkpoint_nothing_runs_on_failed_chips_and_one_process_goes_on(
    tmp_path,
):
    """One host has no live chip, one has all, one has two of four."""
    failed, argv = "2x2@0,0;2x1@0,5", ("--checkpoint-dir", str(tmp_path / "saved"))
    more = ("--failed", failed, "--steps", "3", *argv)
    done, found = train(3, tmp_path / "run", *more, mesh="2x6", WATCHED="1")
    used = [json.loads(each.stdout.rpartition("used: ")[2]) for each in done]
    live = list(range(4, 10))
    assert used == [[], live, live]
    assert ["after step 3: accuracy" in each.stdout for each in done] == [False, True, False]
    (said,) = [line for line in done[1].stdout.splitlines() if line.startswith("linear: accuracy")]
    assert "on 2x6 less 2x2@0,0;2x1@0,5" in said
    assert "points, on 2x6 less 2x2@0,0;2x1@0,5" in (tmp_path / "run" / "run.svg").read_text()
    whole = alone(failed, mesh="2x6")
    assert_same(found, [{step: v for step, v in part.items() if step <= 3} for part in whole])
    found = alone(failed, *argv, "--resume", mesh="2x6")
    assert_same(found, [{step: v for step, v in part.items() if step > 3} for part in whole])


@more
@pytest.mark.slow
def test_other_processes_go_on_and_one_of_them_speaks(tmp_path):
    argv = ("--failed", "2x2@0,0", "--checkpoint-dir", str(tmp_path / "saved"))
    done, _ = train(8, tmp_path / "run", *argv, "--steps", "3")
    assert spoke(done) == [1]
    done, found = train(4, tmp_path / "run", *argv, "--steps", str(STEPS), "--resume")
    assert spoke(done) == [0]
    assert_same(found, alone("2x2@0,0"))


@more
@pytest.mark.slow
def test_with_idle_devices_the_first_host_with_a_live_chip_speaks(tmp_path):
    argv = ("--failed", "4x1@0,0", "--steps", str(STEPS), "--idle")
    done, found = train(2, tmp_path, *argv, mesh="4x2")
    assert spoke(done) == [1]
    assert_same(found, alone("4x1@0,0", mesh="4x2", with_idle=True))


def test_nothing_runs_on_the_failed_chips_of_one_process():
    argv = ["--mesh", "8x8", "--failed", "2x2@0,0;8x6@0,2", "--steps", "3"]
    with Watching() as watching:
        parser = argparse.ArgumentParser()
        assert start("linear", parser, {"tiny": Config()}, linear_train.train, argv) == 0
    assert watching.used == {*range(2, 8), *range(10, 16)}


def test_what_runs_on_a_failed_chip_is_seen():
    with Watching() as watching:
        jax.block_until_ready(jax.numpy.zeros(3) + 1)
        assert watching.used == {0}
        jax.device_put(np.ones(3), jax.devices()[5])
    assert watching.used == {0, 5}


@pytest.mark.slow  # scripts/pods has every division and damage
@pytest.mark.parametrize(
    ("hosts", "failed", "idle"),
    [pytest.param(2, "4x2@0,2", True, marks=more), (4, "2x2@2,2", False)],
)
def test_divisions_and_damages(hosts, failed, idle, tmp_path):
    argv = ("--failed", failed, "--steps", str(STEPS), *["--idle"] * idle)
    _, found = train(hosts, tmp_path, *argv)
    assert_same(found, alone(failed, with_idle=idle))
