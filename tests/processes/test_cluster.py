"""Training by ``ftmesh run`` on four hosts with networks of their own, which are lost in turn."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ftmesh
from examples.soak.checks import difference
from tests.support.hosts import needs_hosts, network
from tests.support.more import more

pytestmark = [pytest.mark.slow, more, needs_hosts]

HOSTS, STEPS, PORT = 4, 150, 25_555
TIMEOUT = 200  # seconds for what takes a minute
RECOVERY = 40  # seconds from a fault to the next step, on a busy machine
TOLERANCE = 1e-5


class ClusterRun:
    """Trains on hosts of a network; `fault` is called with them once steps are committed."""

    def __init__(self, folder, fault=None):
        self.folder = folder
        (folder / "run").mkdir(parents=True)
        with network(HOSTS) as hosts:
            agents = [self._start(hosts, host) for host in range(HOSTS)]
            try:
                self._wait_for_steps(agents)
                if fault is not None:
                    self.fault_time = time.time()
                    fault(hosts)
                until = time.monotonic() + TIMEOUT
                while any(a.poll() is None for a in agents) and time.monotonic() < until:
                    time.sleep(0.2)
                self.statuses = [agent.poll() for agent in agents]
                self.left = [pid for host in range(HOSTS) for pid in hosts.running(host)]
            finally:
                for agent in agents:
                    agent.kill()
                    agent.wait()

    def _start(self, hosts, host):
        command = [sys.executable, "-m", "ftmesh", "run", "--join", f"{hosts.address(0)}:{PORT}"]
        command += ["--hosts", str(HOSTS), "--host-index", str(host), "--mesh", "4x2"]
        command += ["--host-shape", "2x1", "--devices-per-host", "2", "--collective-limit", "5"]
        command += ["--run-dir", str(self.folder / "run")]
        command += ["--events", str(self.folder / "events.jsonl"), "--", sys.executable, "-m"]
        command += ["examples.soak.train", "--steps", str(STEPS), "--copy-every", "5"]
        command += ["--out", str(self.folder / "out")]
        env = {**os.environ, "PYTHONPATH": str(Path(ftmesh.__file__).parent.parent)}
        env |= {"FTMESH_SECRET": "5ec2e7" * 4, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        with open(self.folder / f"log-{host}", "ab") as log:
            words = hosts.command(host, *command)
            return subprocess.Popen(words, env=env, stdout=log, stderr=log)

    def _wait_for_steps(self, agents):
        until = time.monotonic() + TIMEOUT
        while not self.events("epoch"):
            assert time.monotonic() < until, self.log(0)
            assert all(agent.poll() is None for agent in agents), self.log(0)
            time.sleep(0.1)
        time.sleep(4)

    def log(self, host):
        return (self.folder / f"log-{host}").read_text()[-3000:]

    def events(self, name):
        file = self.folder / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    @property
    def weights(self):
        return self.folder / "out" / "weights.npz"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = ClusterRun(tmp_path_factory.mktemp("undisturbed") / "cluster")
    assert run.statuses == [0] * HOSTS, run.log(0)
    return run.weights


@pytest.mark.parametrize("lost", [0, 2])
def test_a_host_loses_power(lost, undisturbed, tmp_path):
    """Without host 0 another host takes over the controller."""
    run = ClusterRun(tmp_path / "cluster", lambda hosts: hosts.power_off(lost))
    others = [status for host, status in enumerate(run.statuses) if host != lost]
    assert others == [0] * (HOSTS - 1), run.log(1)
    (failed,) = run.events("failed")
    assert failed["host"] == lost
    assert failed["time"] - run.fault_time < 15
    assert run.events("goes on")[0]["time"] - run.fault_time < RECOVERY
    assert difference(run.weights, undisturbed) < TOLERANCE
    assert run.left == []


def test_a_host_is_cut_off(undisturbed, tmp_path):
    """It ends its worker by itself, and asks to be restarted."""
    run = ClusterRun(tmp_path / "cluster", lambda hosts: hosts.cut(2))
    assert run.statuses[:2] + run.statuses[3:] == [0] * (HOSTS - 1), run.log(0)
    assert run.statuses[2] == 75
    assert "is out of reach" in run.events("failed")[0]["how"]
    assert difference(run.weights, undisturbed) < TOLERANCE
    assert run.left == []
