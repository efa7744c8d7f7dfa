"""The supervisor: small real programs that end in various ways, and are restarted or not."""

import json
import os
import signal
import socket
import sys
import textwrap
import threading
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import pytest

import ftmesh
from ftmesh.elastic import child_process
from ftmesh.elastic import supervisor as module
from ftmesh.elastic.agent import LocalAgents
from ftmesh.elastic.agent_pool import AgentPool
from ftmesh.elastic.child_process import HostLayout
from ftmesh.elastic.local_pod import TIMED_OUT
from ftmesh.elastic.run_log import EventLog
from ftmesh.elastic.supervisor import Policy, Supervisor
from ftmesh.testing.fault_injection import recorded_processes

TIMEOUT = 120  # seconds for what takes two or three; programs that wait do so for 600
LINUX = sys.platform == "linux"
LOOPBACK = "0100007F"
SECRET = "5ec2e7"
HEAD = """
import os, pathlib, signal, sys, time
host, generation = int(os.environ["FTMESH_HOST"]), int(os.environ["FTMESH_EPOCH"])
run_dir = pathlib.Path(os.environ["FTMESH_RUN_DIR"])
"""

# The connection of a worker, without what needs JAX.
CONNECTED = f"""
import types
for name in ("ftmesh", "ftmesh.elastic", "ftmesh.distributed"):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [{str(Path(ftmesh.__file__).parent.parent)!r} + "/" + name.replace(".", "/")]
from ftmesh.elastic.rpc import connect
channel = connect(os.environ["FTMESH_STEWARD"], os.environ["FTMESH_SECRET"], timeout=60)
process = int(os.environ["FTMESH_PROCESS_ID"])
channel.send({{"hello": process, "pid": os.getpid(), "start": generation}})
channel.receive()
def send(**message):
    channel.send({{**message, "generation": generation}})
def wait_for(key):
    while key not in channel.receive()[0]:
        pass
"""


class Run:
    """A supervisor with its events and the output of its programs."""

    def __init__(self, folder, program, *, hosts=2, **policy):
        self.folder, self.lines, self.output = folder, [], defaultdict(bytes)
        self.events = EventLog(self.lines.append, folder / "events.jsonl")
        self.pool = AgentPool(hosts, SECRET)
        policy = Policy(**{"backoff": 0.0, **policy})
        layout = HostLayout.create(f"{hosts}x1", "1x1", hosts, 1)
        self.supervisor = Supervisor(self.pool, layout, policy, self.events, folder)
        self.agents = LocalAgents(
            self.pool,
            [sys.executable, "-S", "-c", HEAD + textwrap.dedent(program)],
            run_dir=folder,
            devices=1,
            on_output=lambda *output: self.on_output(*output),
        )
        self.on_output = self.collect

    def collect(self, host, stream, data):
        self.output[host] += data if stream == 1 else b""

    def status(self, timeout=TIMEOUT):
        """Run it when all agents are there; return its status. It leaves no process behind."""
        try:
            with self.pool, self.agents:
                self.wait_for_agents()
                status = self.supervisor.run(timeout)
        finally:
            self.events.close()
        assert recorded_processes(self.folder) == []
        return status

    def wait_for_agents(self):
        until = time.monotonic() + TIMEOUT
        while len(self.pool.present) < self.pool.num_hosts and time.monotonic() < until:
            time.sleep(0.01)

    def events_named(self, name):
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]


@pytest.fixture(autouse=True)
def short_end(monkeypatch):
    """These programs have no connection, and need no time to exit."""
    monkeypatch.setattr(module, "END_SECONDS", 0.1)


@pytest.fixture
def run(tmp_path):
    return lambda program, **options: Run(tmp_path, program, **options)


def test_success(run):
    supervised = run("print(os.environ['FTMESH_BLOCKS'], os.environ['FTMESH_MESH'])")
    assert supervised.status() == 0
    assert supervised.output == dict.fromkeys(range(2), b"1x1@0,0;1x1@1,0 2x1\n")
    assert supervised.lines == []
    assert supervised.events_named("started")[0]["hosts"] == [0, 1]
    (done,) = supervised.events_named("done")
    assert (done["status"], done["failures"], done["goodput"]) == (0, 0, 1)


def test_bad_arguments_are_not_retried(run):
    supervised = run("sys.exit(2 if host == 1 else time.sleep(600))")
    assert supervised.status() == 2
    assert supervised.events_named("restart") == []
    assert supervised.lines == ["gives up: host 1 (process 1, chips 1x1@1,0) ended with status 2"]


def test_a_command_that_cannot_run_is_not_retried(run, monkeypatch):
    monkeypatch.setattr(module, "END_SECONDS", 10.0)  # for all of them to fail
    supervised = run("import no_such_module", hosts=3, failures=10)
    assert supervised.status() == 1
    (gives_up,) = supervised.events_named("gives up")
    assert gives_up["why"] == "all processes ended with status 1 before they joined"
    assert not supervised.events_named("restart")


def test_one_worker_that_cannot_run_is_retried(run):
    """The others would have waited for it."""
    supervised = run(
        "sys.exit(1) if host == 1 and generation == 1 else time.sleep(0.3)", failures=3
    )
    assert supervised.status() == 0
    assert len(supervised.events_named("restart")) == 1


def test_a_lost_worker_is_restarted_with_all_others(run):
    supervised = run(
        """
        print(f"{host} in {generation}")
        (run_dir / f"here-{host}").touch()
        while not (run_dir / "here-0").exists():
            time.sleep(0.01)
        if generation == 1:
            os.kill(os.getpid(), signal.SIGKILL) if host == 1 else time.sleep(600)
        """
    )
    assert supervised.status() == 0
    assert supervised.output == {0: b"0 in 1\n0 in 2\n", 1: b"1 in 1\n1 in 2\n"}
    (failed,) = supervised.events_named("failed")
    assert (failed["host"], failed["how"], failed["epoch"]) == (1, "ended by SIGKILL", 1)
    (restart,) = supervised.events_named("restart")
    assert (restart["why"], restart["hosts"]) == ("host 1 is lost", [0, 1])
    assert supervised.events_named("done")[0]["failures"] == 1


@pytest.mark.slow
def test_a_failure_after_another_worker_is_done(run):
    program = """
        if host == 1 and generation == 1:
            while not (run_dir / "done").exists():
                time.sleep(0.01)
            time.sleep(0.3)
            sys.exit(3)
        (run_dir / "done").touch()
        """
    supervised = run(program)
    assert supervised.status() == 0
    assert supervised.events_named("failed")[0]["how"] == "ended with status 3"
    assert len(supervised.events_named("started")) == 2


def test_too_many_failures(run):
    supervised = run("sys.exit(3) if host == 1 else time.sleep(600)", failures=1)
    assert supervised.status() == 3
    assert len(supervised.events_named("started")) == 2
    assert "gives up: 2 failures; the last: host 1 is lost" in supervised.lines
    assert supervised.events_named("done")[0]["status"] == 3


def test_an_error_that_would_be_the_same_again_is_not_retried(run, monkeypatch):
    """The others exit with 75, as they are told: an engine would start all hosts again."""
    monkeypatch.setattr(module, "END_SECONDS", 10.0)  # for all of them to exit
    program = """
        (run_dir / f"here-{host}").touch()
        while not (run_dir / "here-0").exists():
            time.sleep(0.01)
        send(end="the loss is nan") if host == 1 else None
        wait_for("over")
        sys.exit(75)
        """
    supervised = run(CONNECTED + textwrap.dedent(program))
    assert supervised.status() == 1
    assert supervised.lines == ["gives up: host 1 (process 1, chips 1x1@1,0): the loss is nan"]


def test_an_error_after_the_last_step(run):
    """As of an export after the loop."""
    program = """
        send(leave=True)
        wait_for("left")
        sys.exit(3 if host == 1 else 0)
        """
    assert run(CONNECTED + textwrap.dedent(program)).status() == 3


def test_a_worker_that_is_lost_after_the_last_step(run):
    """Nothing depends on it."""
    program = """
        send(leave=True)
        wait_for("left")
        os.kill(os.getpid(), signal.SIGKILL) if host == 1 else None
        """
    assert run(CONNECTED + textwrap.dedent(program)).status() == 0


def test_how_long_workers_may_take_to_exit(run):
    program = """
        send(leave=True)
        wait_for("left")
        time.sleep(600)
        """
    begin = time.monotonic()
    supervised = run(CONNECTED + textwrap.dedent(program), phase_timeouts={"leave": 0.1})
    assert supervised.status() == 0
    assert time.monotonic() - begin < 50  # the default is 60 s


def test_a_host_that_fails_often_is_excluded(run):
    supervised = run("sys.exit(3) if host == 0 else time.sleep(600 * (generation < 3))", strikes=2)
    assert supervised.status() == 0
    assert [event["hosts"] for event in supervised.events_named("started")] == [[0, 1], [0, 1], [1]]
    assert "host 0 has failed 2 times and is excluded" in supervised.lines


@pytest.mark.slow
def test_the_backoff_doubles_after_starts_without_a_step(run):
    supervised = run("sys.exit(3)", hosts=1, failures=2, strikes=9, backoff=0.05)
    assert supervised.status() == 3
    assert [event["seconds"] for event in supervised.events_named("restart")] == [0.05, 0.1]


def test_every_host_is_excluded(run):
    supervised = run("sys.exit(4)", hosts=1, strikes=1)
    assert supervised.status() == 4
    assert (
        "gives up: every host has failed 1 times; the last: no worker is left" in supervised.lines
    )


def test_timeout(run):
    supervised = run("time.sleep(600)")
    begin = time.monotonic()
    assert supervised.status(timeout=0.5) == TIMED_OUT
    assert time.monotonic() - begin < TIMEOUT
    assert "gives up: --timeout reached" in supervised.lines


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all(run, signum):
    supervised = run("print('up'); time.sleep(600)")
    ended = []

    def on_output(host, stream, data):
        if b"up" in data and not ended:
            ended.append(host)
            supervised.supervisor.end(signum)

    supervised.on_output = on_output
    begin = time.monotonic()
    assert supervised.status() == 128 + signum
    assert time.monotonic() - begin < TIMEOUT / 2
    assert supervised.events_named("done")[0]["status"] == 128 + signum


def test_a_signal_before_the_start(run):
    supervised = run("time.sleep(600)")
    supervised.supervisor.end(signal.SIGINT)
    begin = time.monotonic()
    assert supervised.status() == 130
    assert time.monotonic() - begin < TIMEOUT / 2


def test_a_signal_during_the_backoff(run):
    supervised = run("sys.exit(3)", hosts=1, backoff=60.0)
    threading.Thread(target=_end_when, args=(supervised, "restart")).start()
    assert supervised.status() == 130


def _end_when(supervised, event):
    until = time.monotonic() + TIMEOUT
    while not supervised.events_named(event) and time.monotonic() < until:
        time.sleep(0.02)
    supervised.supervisor.end(signal.SIGINT)


def test_timeout_during_the_backoff(run):
    supervised = run("sys.exit(3)", hosts=1, backoff=60.0)
    begin = time.monotonic()
    assert supervised.status(timeout=1) == TIMED_OUT
    assert time.monotonic() - begin < 50  # less than the backoff


def test_a_killed_peer_store_is_restarted(run):
    supervised = run(
        """
        import json
        store = json.loads((run_dir / "pids" / "store-0.json").read_text())["pid"]
        print(store, os.environ["FTMESH_KEEPERS"])
        if generation == 1:
            os.kill(store, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        hosts=1,
    )
    assert supervised.status() == 0
    first, second = supervised.output[0].splitlines()
    assert first != second


def test_the_coordination_service_is_restarted(run):
    supervised = run(
        """
        import json
        service = json.loads((run_dir / "pids" / "service.json").read_text())["pid"]
        if generation == 1:
            os.kill(service, signal.SIGKILL)
            time.sleep(600)
        """,
        hosts=1,
    )
    assert supervised.status() == 0
    assert supervised.events_named("restart")[0]["why"] == "JAX's coordination service has ended"
    assert supervised.events_named("failed") == []


def test_a_port_that_is_taken_meanwhile(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], child_process.free_port()])
        monkeypatch.setattr(child_process, "free_port", lambda host: next(ports))
        with closing(child_process.CoordinationService(1, {})) as service:
            assert not service.address.endswith(f":{taken.getsockname()[1]}")


@pytest.mark.skipif(not LINUX, reason="looks at /proc")
def test_it_listens_on_loopback_only(run):
    supervised = run("print('up'); time.sleep(600)")
    up, ports = [], set()

    def on_output(host, stream, data):
        if b"up" in data:
            up.append(host)
        if len(up) == 2 and not ports:
            pids = [
                os.getpid(),
                *(record["pid"] for record in recorded_processes(supervised.folder)),
            ]
            assert len(pids) == 6  # two workers, two peer stores, the service
            ports.update(port for pid in pids for port in listening(pid))
            supervised.supervisor.end(signal.SIGTERM)

    supervised.on_output = on_output
    assert supervised.status() == 128 + signal.SIGTERM
    assert len(ports) >= 4  # the controller, two peer stores, the service
    assert {address for address, _ in ports} <= {LOOPBACK, f"0000000000000000FFFF0000{LOOPBACK}"}


def listening(pid):
    """Addresses and ports at which a process listens, from /proc."""
    files = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    addresses = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in files:
                addresses.add(tuple(words[1].split(":")))
    return addresses
