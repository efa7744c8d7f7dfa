"""Trainers on pods: hosts that have lost different chips, or all, train as one process would."""

import json
import os
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from linear import arguments, linear_job, linear_trainer
from watching import Watching

from ftmesh import Topology
from ftmesh.cluster.launch import run_pod
from ftmesh.train.loop import run, start_log
from ftmesh.train.report import read_metrics
from ftmesh.train.trainer import StepOptions

HERE = Path(__file__).parent
PATHS = os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parent.parent)))
STEPS = 6


def train(hosts, folder, *argv, mesh="4x4", timeout=100, **env):
    """A run of the linear model by several processes; what each of them said, and the losses."""
    number = int(np.prod([int(n) for n in mesh.split("x")])) // hosts
    command = [sys.executable, str(HERE / "linear_train.py"), "--out", str(folder), "--limit", "30"]
    env = {"PYTHONPATH": PATHS, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", **env}
    done = run_pod([*command, *argv], hosts, number, mesh, env=env, timeout=timeout)
    assert [each.status for each in done] == [0] * hosts, done
    return done, read_metrics(folder / "metrics.jsonl")


def alone(failed, mesh="4x4", steps=STEPS, **options):
    """The losses and evaluations of one process with as many devices."""
    count = int(np.prod([int(n) for n in mesh.split("x")]))
    topology = Topology.from_devices(jax.devices()[:count], shape=mesh, failed=failed)
    job = linear_job(linear_trainer(topology, StepOptions(**options)), steps=steps, steps_per_eval=3)
    report = run(job, arguments(), start_log(arguments()))
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
    """Which processes said anything on stdout that is not Gloo's."""
    own = [[line for line in d.stdout.splitlines() if "[Gloo]" not in line] for d in done]
    return [number for number, lines in enumerate(own) if any(map(str.strip, lines))]


def test_unequal_hosts_train_evaluate_checkpoint_and_go_on_in_other_processes(tmp_path):
    argv = ("--failed", "2x2@2,2", "--checkpoint-dir", str(tmp_path / "saved"))
    done, _ = train(2, tmp_path / "run", *argv, "--steps", "3")
    assert spoke(done) == [0]
    done, found = train(4, tmp_path / "run", *argv, "--steps", str(STEPS), "--resume")
    assert spoke(done) == [0]
    assert_same(found, alone("2x2@2,2"))
    (said,) = [line for line in done[0].stdout.splitlines() if line.startswith("linear: accuracy")]
    assert "on 4x4 less 2x2@2,2" in said
    assert (tmp_path / "run" / "run.svg").exists()


def test_a_host_without_a_live_chip_stands_by_and_nothing_runs_on_failed_ones(tmp_path):
    done, found = train(4, tmp_path, "--failed", "4x1@0,0", "--steps", str(STEPS), WATCHED="1")
    assert spoke(done) == [0, 1, 2, 3]  # only what was watched, of those but one
    used = [json.loads(d.stdout.rpartition("used: ")[2]) for d in done]
    live = list(range(4, 16))
    assert used == [[], live, live, live]
    assert "after step 3: accuracy" in done[1].stdout
    assert all("after step" not in done[n].stdout for n in (0, 2, 3))
    assert_same(found, alone("4x1@0,0"))


def test_with_idle_devices_the_first_host_with_a_live_chip_speaks(tmp_path):
    argv = ("--failed", "4x1@0,0", "--steps", str(STEPS), "--idle")
    done, found = train(2, tmp_path, *argv, mesh="4x2")
    assert spoke(done) == [1]
    assert_same(found, alone("4x1@0,0", mesh="4x2", with_idle=True))


def test_what_runs_on_a_failed_chip_is_seen():
    with Watching() as watching:
        jax.block_until_ready(jax.numpy.zeros(3) + 1)
        assert watching.used == {jax.devices()[0].id}
        jax.device_put(np.ones(3), jax.devices()[5])
    assert watching.used == {jax.devices()[n].id for n in (0, 5)}


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2, 4, 8])
@pytest.mark.parametrize("failed", ["", "2x2@2,2", "host", "2x2@0,0"])
@pytest.mark.parametrize("idle", [False, True])
def test_every_division_and_damage(hosts, failed, idle, tmp_path):
    failed = {2: "4x2@0,2", 4: "4x1@0,3", 8: "2x1@2,3"}[hosts] if failed == "host" else failed
    argv = ("--failed", failed, "--steps", str(STEPS), *["--idle"] * idle)
    _, found = train(hosts, tmp_path, *argv)
    assert_same(found, alone(failed, with_idle=idle))
