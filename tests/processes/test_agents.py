"""Agents of ``ftmesh run`` as real processes: on loopback, without JAX, and killed in turn."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import ftmesh
from ftmesh.elastic.rpc import free_port
from ftmesh.errors import OUT_OF_HOSTS, RESTART
from tests.support.more import more, more_case

TIMEOUT = 180  # seconds for what takes a few
SECRET = "5ec2e7" * 4
HEAD = """
import os, pathlib, signal, sys, time
host, generation = int(os.environ["FTMESH_HOST"]), int(os.environ["FTMESH_EPOCH"])
run_dir = pathlib.Path(os.environ["FTMESH_RUN_DIR"])
def wait_for(name):
    while not (run_dir / name).exists():
        time.sleep(0.02)
(run_dir / f"up-{generation}-{host}").touch()
"""


class Hosts:
    """Agents on loopback, as an engine starts them, each with a program as its worker."""

    def __init__(self, folder, program, hosts=3, *options, started=None):
        self.folder, self.run_dir = folder, folder / "run"
        self.run_dir.mkdir()
        self._command = [sys.executable, "-S", "-c", HEAD + textwrap.dedent(program)]
        self._hosts, self._options = hosts, options
        self._started = range(hosts) if started is None else started
        self._join = f"127.0.0.1:{free_port()}"
        self.agents = {}

    def __enter__(self):
        for host in self._started:
            self.start(host)
        return self

    def __exit__(self, *error):
        for host in list(self.agents):
            self.kill(host)

    def kill(self, host):
        agent = self.agents.pop(host)
        agent.kill()
        agent.wait()

    def start(self, host, name=None, options=(), **env):
        words = ["--join", self._join, "--hosts", str(self._hosts), "--host-index", str(host)]
        words += ["--node-name", name or f"node{host}", "--run-dir", str(self.run_dir)]
        words += ["--events", str(self.folder / "events.jsonl"), *self._options, *options]
        root = str(Path(ftmesh.__file__).parent.parent)
        env = {**os.environ, "PYTHONPATH": root, "FTMESH_SECRET": SECRET, **env}
        with open(self.folder / f"log-{host}", "ab") as log:
            self.agents[host] = subprocess.Popen(
                [sys.executable, "-m", "ftmesh", "run", *words, "--", *self._command],
                env=env,
                stdout=log,
                stderr=log,
            )

    def wait_for(self, *names):
        until = time.monotonic() + TIMEOUT
        while not all((self.run_dir / name).exists() for name in names):
            assert time.monotonic() < until, "\n\n".join([str(names), *self.logs()])
            time.sleep(0.02)

    def statuses(self):
        """The exit status of each agent; nothing that it started may be left."""
        try:
            return [agent.wait(TIMEOUT) for agent in self.agents.values()]
        except subprocess.TimeoutExpired:
            pytest.fail(str(self.logs()))

    def kill_controller(self):
        for line in _processes():
            if "--controller-only" in line and str(self.run_dir) in line:
                os.kill(int(line.split()[0]), signal.SIGKILL)

    def log(self, host):
        return (self.folder / f"log-{host}").read_text()

    def logs(self):
        return [self.log(host) for host in self.agents]

    def events(self, name):
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def leftovers(self):
        return [line for line in _processes() if str(self.run_dir) in line]


def _processes():
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True
    )
    return listed.stdout.splitlines()


@pytest.fixture
def hosts(tmp_path):
    return lambda program, *arguments, **options: Hosts(tmp_path, program, *arguments, **options)


def test_workers_run_on_all_hosts_and_end_together(hosts):
    with hosts("print(f'worker on {host}')", 3, "--mesh", "3x1", "--devices-per-host", "1") as run:
        assert run.statuses() == [0, 0, 0]
        assert [f"worker on {host}" in run.log(host) for host in range(3)] == [True] * 3
        assert json.loads((run.run_dir / "hosts.json").read_text()) == {
            "node0": 0,
            "node1": 1,
            "node2": 2,
        }
        assert run.leftovers() == []


def test_a_lost_host_is_named_and_the_others_are_restarted(hosts):
    program = "wait_for('up-2-0' if generation == 1 else 'done')"
    with hosts(program) as run:
        run.wait_for("up-1-0", "up-1-1", "up-1-2")
        run.kill(2)
        run.wait_for("up-2-0", "up-2-1")
        (run.run_dir / "done").touch()
        assert run.statuses() == [0, 0]
        (lost,) = run.events("failed")
        assert (lost["host"], lost["how"]) == (2, "has lost its agent")
        assert "host 2 is lost (process 2): it has lost its agent" in run.log(0)
        assert [event["hosts"] for event in run.events("started")] == [[0, 1, 2], [0, 1]]
        assert run.leftovers() == []


@pytest.mark.slow
@pytest.mark.parametrize("lost", [more_case("the controller"), "its host"])
def test_another_agent_takes_over(hosts, lost):
    program = "wait_for('up-2-1' if generation == 1 else 'done')"
    with hosts(program) as run:
        run.wait_for("up-1-0", "up-1-1", "up-1-2")
        begin = time.monotonic()
        if lost == "its host":
            run.kill(0)
        run.kill_controller()
        run.wait_for("up-2-1", "up-2-2")
        assert time.monotonic() - begin < 50  # agents would give up after 60 s
        (run.run_dir / "done").touch()
        assert set(run.statuses()) == {0}
        successor = 0 if lost == "the controller" else 1
        assert f"host {successor} takes over the controller" in run.log(successor)
        assert run.events("takes over")[0]["hosts"] == ([0, 1, 2] if successor == 0 else [1, 2])
        assert run.leftovers() == []


@pytest.mark.slow
def test_the_first_host_comes_back_after_another_took_over(hosts):
    """It joins the run, and starts no controller of its own."""
    program = """
    wait_for("over" if generation > 2 else "again" if (host, generation) == (1, 2) else "never")
    sys.exit(generation == 2)
    """
    with hosts(program) as run:
        run.wait_for("up-1-0", "up-1-1", "up-1-2")
        run.kill(0)
        run.kill_controller()
        run.wait_for("up-2-1", "up-2-2")
        (run.run_dir / "pids" / "store-0.json").unlink()
        run.start(0)
        run.wait_for("pids/store-0.json")  # it has joined
        (run.run_dir / "again").touch()  # a worker fails, and all are started again
        run.wait_for("up-3-0", "up-3-1", "up-3-2")
        (run.run_dir / "over").touch()
        assert run.statuses() == [0, 0, 0]
        assert "takes over" not in run.log(0)
        assert run.leftovers() == []


@more
@pytest.mark.slow
def test_without_a_majority_all_ask_to_be_restarted(hosts):
    with hosts("wait_for('never')", 2, "--restart-status", "42") as run:
        run.wait_for("up-1-0", "up-1-1")
        run.kill(0)
        run.kill_controller()
        assert run.agents[1].wait(3 * TIMEOUT) == 42
        assert "cut off from most hosts" in run.log(1)


@more
@pytest.mark.slow
def test_a_host_that_is_shut_down_is_left_out(hosts):
    """Its worker never commits a step, so it is ended in the end."""
    program = "wait_for('up-2-0' if generation == 1 else 'done')"
    with hosts(program) as run:
        run.wait_for("up-1-0", "up-1-1", "up-1-2")
        run.agents[1].terminate()
        run.wait_for("up-2-0", "up-2-2")
        (run.run_dir / "done").touch()
        assert run.statuses() == [0, 128 + signal.SIGTERM, 0]


def test_a_signal_to_all_ends_the_run(hosts):
    with hosts("wait_for('never')") as run:
        run.wait_for("up-1-0", "up-1-1", "up-1-2")
        for agent in run.agents.values():
            agent.terminate()
        assert run.statuses() == [128 + signal.SIGTERM] * 3
        assert run.leftovers() == []


def test_a_host_that_does_not_come(hosts):
    with hosts("", 2, "--join-timeout", "2", started=[0]) as run:
        assert run.statuses() == [OUT_OF_HOSTS]
        assert "gives up: host 1 did not join within 2 s" in run.log(0)


def test_a_worker_s_mistake_is_its_status_everywhere(hosts):
    with hosts("sys.exit(2)", 2) as run:
        assert run.statuses() == [2, 2]


def test_nodes_keep_their_chips_when_they_are_started_in_another_order(hosts, tmp_path):
    options = (2, "--mesh", "2x1", "--devices-per-host", "1")
    with hosts("print(os.environ['FTMESH_NODE_FOR_TEST'], host)", *options, started=()) as run:
        (run.run_dir / "hosts.json").write_text(json.dumps({"first": 0, "second": 1}))
        run.start(0, "second", FTMESH_NODE_FOR_TEST="second")
        run.start(1, "first", FTMESH_NODE_FOR_TEST="first")
        assert run.statuses() == [0, 0]
        assert "second 1" in run.log(0)
        assert "first 0" in run.log(1)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"FTMESH_SECRET": ""}, "the hosts need a secret that only they know"),
        ({"FTMESH_SECRET": "short"}, "of 16 characters or more"),
        ({"FTMESH_SECRET": "another" * 4}, "knows the secret of this run: it closed"),
    ],
)
def test_secrets(hosts, env, message):
    with hosts("", 2, started=[0]) as run:
        run.wait_for("pids/store-0.json")  # host 0 has joined
        run.start(1, options=("--join-timeout", "1"), **env)
        assert run.agents[1].wait(TIMEOUT) not in (0, RESTART)
        assert message in run.log(1)
