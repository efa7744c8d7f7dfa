"""The supervisor: small real programs that end in every way, started again or not."""

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

from ftmesh.elastic import sidecars
from ftmesh.elastic import supervisor as module
from ftmesh.elastic.events import Events
from ftmesh.elastic.local_pod import TIMED_OUT
from ftmesh.elastic.pod_environment import Place
from ftmesh.elastic.supervisor import Policy, Supervisor
from ftmesh.errors import ArgumentError
from ftmesh.testing.fault_actions import noted_processes

SECONDS = 30  # for what takes two or three
LINUX = sys.platform == "linux"
LOOPBACK = "0100007F"
HEAD = """
import os, pathlib, signal, sys, time
host, epoch = int(os.environ["FTMESH_HOST"]), int(os.environ["FTMESH_EPOCH"])
run_dir = pathlib.Path(os.environ["FTMESH_RUN_DIR"])
"""


class Run:
    """A supervisor with its events, and what its programs have written."""

    def __init__(self, folder, program, *, hosts=2, **policy):
        self.folder, self.lines, self.output = folder, [], defaultdict(bytes)
        self.events = Events(self.lines.append, folder / "events.jsonl")
        self.supervisor = Supervisor(
            [sys.executable, "-S", "-c", HEAD + textwrap.dedent(program)],
            Place.of(f"{hosts}x1", "1x1", hosts, 1),
            Policy(**{"backoff": 0.0, **policy}),
            self.events,
            folder,
            on_output=self.hear,
        )

    def hear(self, host, stream, piece):
        self.output[host] += piece if stream == 1 else b""

    def status(self, timeout=SECONDS):
        """That of the run, which leaves nothing behind."""
        try:
            status = self.supervisor.run(timeout)
        finally:
            self.events.close()
        assert noted_processes(self.folder) == []
        return status

    def of(self, event):
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [each for each in map(json.loads, lines) if each["event"] == event]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """These programs do not hear that all is over, and need no time to end."""
    monkeypatch.setattr(module, "TO_END", 0.1)


@pytest.fixture
def run(tmp_path):
    return lambda program, **options: Run(tmp_path, program, **options)


def test_all_is_well(run):
    found = run("print(os.environ['FTMESH_BLOCKS'], os.environ['FTMESH_MESH'])")
    assert found.status() == 0
    assert found.output == dict.fromkeys(range(2), b"1x1@0,0;1x1@1,0 2x1\n")
    assert found.lines == []
    assert found.of("started")[0]["hosts"] == [0, 1]
    (done,) = found.of("done")
    assert (done["status"], done["failures"], done["goodput"]) == (0, 0, 1)


def test_refused_arguments_are_not_tried_again(run):
    found = run("sys.exit(2 if host == 1 else time.sleep(60))")
    assert found.status() == 2
    assert found.of("restart") == []
    assert found.lines == ["gives up: host 1 (process 1, chips 1x1@1,0) ended with status 2"]


def test_a_command_that_cannot_run_is_not_tried_again(run, monkeypatch):
    monkeypatch.setattr(module, "TO_END", 10.0)  # for all of them to fail
    found = run("import no_such_module", hosts=3, failures=10)
    assert found.status() == 1
    (gives_up,) = found.of("gives up")
    assert gives_up["why"] == ("before they joined each other, all processes ended with status 1")
    assert not found.of("restart")


def test_one_that_cannot_run_is_tried_again(run):
    """Where the others would have waited for it."""
    found = run("sys.exit(1) if host == 1 and epoch == 1 else time.sleep(0.3)", failures=3)
    assert found.status() == 0
    assert len(found.of("restart")) == 1


def test_a_process_that_dies_is_started_again_with_all_others(run):
    found = run(
        """
        print(f"{host} in {epoch}")
        (run_dir / f"here-{host}").touch()
        while not (run_dir / "here-0").exists():
            time.sleep(0.01)
        if epoch == 1:
            os.kill(os.getpid(), signal.SIGKILL) if host == 1 else time.sleep(60)
        """
    )
    assert found.status() == 0
    assert found.output == {0: b"0 in 1\n0 in 2\n", 1: b"1 in 1\n1 in 2\n"}
    (failed,) = found.of("failed")
    assert (failed["host"], failed["how"], failed["epoch"]) == (1, "ended by SIGKILL", 1)
    (restart,) = found.of("restart")
    assert (restart["why"], restart["hosts"]) == ("host 1 is lost", [0, 1])
    assert found.of("done")[0]["failures"] == 1


@pytest.mark.slow
def test_the_failure_of_one_when_another_is_done_is_one(run):
    program = """
        if host == 1 and epoch == 1:
            while not (run_dir / "done").exists():
                time.sleep(0.01)
            time.sleep(0.3)
            sys.exit(3)
        (run_dir / "done").touch()
        """
    found = run(program)
    assert found.status() == 0
    assert found.of("failed")[0]["how"] == "ended with status 3"
    assert len(found.of("started")) == 2


def test_too_many_failures(run):
    found = run("sys.exit(3) if host == 1 else time.sleep(60)", failures=1)
    assert found.status() == 3
    assert len(found.of("started")) == 2
    assert "gives up: 2 failures; the last: host 1 is lost" in found.lines
    assert found.of("done")[0]["status"] == 3


def test_a_host_that_fails_too_often_stays_out(run):
    found = run("sys.exit(3) if host == 0 else time.sleep(60 * (epoch < 3))", strikes=2)
    assert found.status() == 0
    assert [each["hosts"] for each in found.of("started")] == [[0, 1], [0, 1], [1]]
    assert "host 0 has failed 2 times, and stays out" in found.lines


@pytest.mark.slow
def test_each_start_without_a_step_is_waited_for_longer(run):
    found = run("sys.exit(3)", hosts=1, failures=2, strikes=9, backoff=0.05)
    assert found.status() == 3
    assert [each["seconds"] for each in found.of("restart")] == [0.05, 0.1]


def test_every_host_is_out(run):
    found = run("sys.exit(4)", hosts=1, strikes=1)
    assert found.status() == 4
    assert "gives up: every host has failed 1 times; the last: no process is left" in found.lines


def test_time_is_up(run):
    found = run("time.sleep(60)")
    begin = time.monotonic()
    assert found.status(timeout=0.5) == TIMED_OUT
    assert time.monotonic() - begin < SECONDS
    assert "gives up: time is up" in found.lines


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all(run, signum):
    found = run("print('up'); time.sleep(60)")
    ended = []

    def hear(host, stream, piece):
        if b"up" in piece and not ended:
            ended.append(host)
            found.supervisor.end(signum)

    found.supervisor._on_output = hear
    begin = time.monotonic()
    assert found.status() == 128 + signum
    assert time.monotonic() - begin < SECONDS / 2
    assert found.of("done")[0]["status"] == 128 + signum


def test_a_signal_before_there_is_anyone_to_tell(run):
    found = run("time.sleep(60)")
    found.supervisor.end(signal.SIGINT)
    begin = time.monotonic()
    assert found.status() == 130
    assert time.monotonic() - begin < SECONDS / 2


def test_a_signal_while_it_waits_to_start_again(run):
    found = run("sys.exit(3)", hosts=1, backoff=60.0)
    threading.Thread(target=_end_when, args=(found, "restart")).start()
    assert found.status() == 130


def _end_when(found, event):
    until = time.monotonic() + SECONDS
    while not found.of(event) and time.monotonic() < until:
        time.sleep(0.02)
    found.supervisor.end(signal.SIGINT)


def test_time_is_up_while_it_waits_to_start_again(run):
    found = run("sys.exit(3)", hosts=1, backoff=60.0)
    begin = time.monotonic()
    assert found.status(timeout=1) == TIMED_OUT
    assert time.monotonic() - begin < SECONDS


def test_a_keeper_that_was_killed_is_there_in_the_next_start(run):
    found = run(
        """
        import json
        keeper = json.loads((run_dir / "pids" / "keeper-0.json").read_text())["pid"]
        print(keeper, os.environ["FTMESH_KEEPERS"])
        if epoch == 1:
            os.kill(keeper, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        hosts=1,
    )
    assert found.status() == 0
    first, second = found.output[0].splitlines()
    assert first != second


def test_the_service_of_jax_is_started_again(run):
    found = run(
        """
        import json
        service = json.loads((run_dir / "pids" / "service.json").read_text())["pid"]
        if epoch == 1:
            os.kill(service, signal.SIGKILL)
            time.sleep(60)
        """,
        hosts=1,
    )
    assert found.status() == 0
    assert found.of("restart")[0]["why"] == "JAX's coordination service has ended"
    assert found.of("failed") == []


def test_a_port_that_another_takes_first(monkeypatch):
    pids = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], sidecars.free_port()])
        monkeypatch.setattr(sidecars, "free_port", lambda: next(ports))
        with closing(sidecars.Service(1, {}, lambda kind, host, pid: pids.append(pid))) as service:
            assert not service.address.endswith(f":{taken.getsockname()[1]}")
            assert pids == [service.pid]


@pytest.mark.skipif(not LINUX, reason="looks at /proc")
def test_it_listens_on_loopback_only(run):
    found = run("print('up'); time.sleep(60)")
    heard, ports = [], set()

    def hear(host, stream, piece):
        if b"up" in piece:
            heard.append(host)
        if len(heard) == 2 and not ports:
            pids = [os.getpid(), *(each["pid"] for each in noted_processes(found.folder))]
            assert len(pids) == 6  # two workers, two keepers, the service
            ports.update(port for pid in pids for port in listening(pid))
            found.supervisor.end(signal.SIGTERM)

    found.supervisor._on_output = hear
    assert found.status() == 128 + signal.SIGTERM
    assert len(ports) >= 4  # the steward, two keepers, the service
    assert {address for address, _ in ports} <= {LOOPBACK, f"0000000000000000FFFF0000{LOOPBACK}"}


def listening(pid):
    """Where a process listens, as /proc shows it: addresses and ports."""
    files = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in files:
                found.add(tuple(words[1].split(":")))
    return found


class TestPlace:
    @pytest.mark.parametrize(
        ("given", "blocks"),
        [
            (("4x4", "2x2", 4, 4), "2x2@0,0 2x2@2,0 2x2@0,2 2x2@2,2"),
            (("4x4", None, 4, 4), "4x1@0,0 4x1@0,1 4x1@0,2 4x1@0,3"),
            (("4x4", None, 2, 8), "4x2@0,0 4x2@0,2"),
            (
                ("4x4", None, 8, 2),
                "2x1@0,0 2x1@2,0 2x1@0,1 2x1@2,1 2x1@0,2 2x1@2,2 2x1@0,3 2x1@2,3",
            ),
            (("4x2", "1x2", 4, 2), "1x2@0,0 1x2@1,0 1x2@2,0 1x2@3,0"),
            (("2x2x2", "2x2", 2, 4), "2x2x1@0,0,0 2x2x1@0,0,1"),
            (("2x2x2", "1x2x2", 2, 4), "1x2x2@0,0,0 1x2x2@1,0,0"),
            (("4x4", "4x4", 1, 16), "4x4@0,0"),
        ],
    )
    def test_blocks_of_hosts(self, given, blocks):
        assert [str(block) for block in Place.of(*given).blocks] == blocks.split()

    @pytest.mark.parametrize(
        "given",
        [
            ("4x4", "2x2", 3, 4),
            ("4x4", "2x2", 4, 8),
            ("4x4", "3x1", 4, 3),
            ("4x4", "8x2", 1, 16),
            ("4x4", "2x2x1", 4, 4),
            ("4x4", None, 4, 3),
            ("4x4", None, 2, 6),
        ],
    )
    def test_what_does_not_fill_the_mesh(self, given):
        with pytest.raises(ArgumentError, match="do not fill mesh 4x4: give another --host-shape"):
            Place.of(*given)

    @pytest.mark.parametrize(
        "given", [("4x4", None, 4, 0), ("4x4", None, 0, 4), ("4x4", "2x2", -1, 4)]
    )
    def test_no_pod_at_all(self, given):
        with pytest.raises(ArgumentError, match="make no pod"):
            Place.of(*given)
