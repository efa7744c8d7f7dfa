"""Processes without a controller say which of them was lost, and exit in time with status 76."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import ftmesh
from ftmesh.distributed.peer_monitor import PeerMonitor
from ftmesh.elastic.rpc import free_port
from ftmesh.errors import PEER_LOST
from tests.support.hosts import debian_names, needs_hosts, network, no_names
from tests.support.more import more_case

LOOP = str(Path(__file__).parent / "step_loop.py")
START = 180  # seconds for the processes to start, on a busy machine


class Run:
    """Processes of `step_loop.py`, and what they print."""

    def __init__(self, processes):
        self.processes = processes
        self._errors = [""] * len(processes)
        self._steps = [threading.Event() for _ in processes]
        self._threads = [
            threading.Thread(target=read, args=(number,))
            for number in range(len(processes))
            for read in (self._read_output, self._read_errors)
        ]
        for thread in self._threads:
            thread.start()

    def _read_output(self, number):
        for line in self.processes[number].stdout:
            if line.startswith("step 3"):
                self._steps[number].set()

    def _read_errors(self, number):
        self._errors[number] = self.processes[number].stderr.read()

    def wait_for_steps(self):
        """Wait until all have made steps; fail with what they printed if they do not."""
        deadline = time.monotonic() + START
        while not all(event.is_set() for event in self._steps):
            statuses = [process.poll() for process in self.processes]
            if statuses.count(None) < len(statuses) or time.monotonic() > deadline:
                for process in self.processes:
                    process.kill()
                for thread in self._threads:
                    thread.join()
                pytest.fail(f"no steps, statuses {statuses}\n" + "\n".join(self._errors))
            time.sleep(0.05)

    def end(self, number, how):
        os.kill(self.processes[number].pid, how)

    def results(self, timeout):
        """The status of each, and its lines that are ours."""
        deadline = time.monotonic() + timeout
        statuses = [p.wait(max(deadline - time.monotonic(), 0.1)) for p in self.processes]
        for thread in self._threads:
            thread.join()
        ours = [re.findall("^loop: .*$", text, re.MULTILINE) for text in self._errors]
        return statuses, ours


@contextmanager
def run_loop(number, *, steps=100_000, address="127.0.0.1", enter=None, variables=None):
    """Run the loop in `number` processes; `enter` makes the command line of each."""
    port, root = free_port(), str(Path(ftmesh.__file__).parent.parent)
    with ExitStack() as stack:
        processes = []
        for process in range(number):
            command = [sys.executable, LOOP, str(steps)]
            started = subprocess.Popen(
                enter(process, *command) if enter else command,
                env={
                    **os.environ,
                    "PYTHONPATH": root,
                    "JAX_PLATFORMS": "cpu",
                    "FTMESH_COORDINATOR": f"{address}:{port}",
                    "FTMESH_NUM_PROCESSES": str(number),
                    "FTMESH_PROCESS_ID": str(process),
                    **(variables or {}),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            processes.append(stack.enter_context(started))
            stack.callback(started.kill)
        yield Run(processes)


@pytest.mark.slow
def test_a_killed_process_is_named():
    with run_loop(3) as run:
        run.wait_for_steps()
        run.end(1, signal.SIGKILL)
        statuses, lines = run.results(10)
    assert statuses == [PEER_LOST, -signal.SIGKILL, PEER_LOST]
    for process in (0, 2):
        expected = f"loop: process {process}: process 1 was lost: the connection was closed"
        assert lines[process] == [expected]


def test_the_death_of_process_0():
    """It runs JAX's service, without which JAX's clients end at once; here they still save."""
    with run_loop(2, variables={"SAVES": "1"}) as run:
        run.wait_for_steps()
        run.end(0, signal.SIGKILL)
        statuses, lines = run.results(10)
    assert statuses == [-signal.SIGKILL, PEER_LOST]
    lost = "loop: process 1: process 0 was lost: the connection was closed"
    assert lines[1] == [lost, "loop: saved"]


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, more_case(1)])  # 0 runs the service of JAX
def test_a_stopped_process_is_named(who):
    with run_loop(3, variables={"FTMESH_HEARTBEAT_TIMEOUT": "5"}) as run:
        run.wait_for_steps()
        run.end(who, signal.SIGSTOP)
        stopped = time.monotonic()
        for process in {0, 1, 2} - {who}:
            assert run.processes[process].wait(20) == PEER_LOST
        assert 3 < time.monotonic() - stopped < 12
        run.end(who, signal.SIGCONT)  # it finds the others gone
        statuses, lines = run.results(10)
    assert statuses == [PEER_LOST] * 3
    for process in {0, 1, 2} - {who}:
        expected = f"loop: process {process}: process {who} was lost: no heartbeat for 5 s"
        assert lines[process] == [expected]
    assert lines[who] == [
        f"loop: process {who}: the others counted this process as lost: no heartbeat for 5 s"
    ]


def listening(pid):
    """The addresses at which programs listen on the host where a process runs."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A"}


def hexadecimal(address):
    """An address as the kernel writes it."""
    return socket.inet_aton(address)[::-1].hex().upper()


@pytest.mark.slow
@needs_hosts
def test_a_host_without_a_link():
    with network(3) as hosts, run_loop(3, address="h0", enter=hosts.command) as run:
        run.wait_for_steps()
        for host, process in enumerate(run.processes):  # on one interface alone
            own, mapped = hexadecimal(hosts.address(host)), "0" * 16 + "FFFF0000"
            loopback = hexadecimal("127.0.0.1")  # where JAX's client connects to
            assert listening(process.pid) <= {own, mapped + own, loopback}
        hosts.cut(2)
        statuses, lines = run.results(20)
    assert statuses == [PEER_LOST] * 3
    assert lines[0][-1] == "loop: process 0: process 2 was lost: no heartbeat for 10 s"
    assert lines[1] == ["loop: process 1: process 2 was lost: no heartbeat for 10 s"]
    assert lines[2] == ["loop: process 2: process 0 was lost: no heartbeat for 10 s"]


@pytest.mark.slow
@needs_hosts
@pytest.mark.parametrize(
    ("names", "address", "has_secret"),
    [
        (debian_names, "h0", False),
        more_case(debian_names, "10.66.0.1", True),
        (no_names, None, True),
    ],
)
def test_names_that_lead_nowhere(names, address, has_secret, tmp_path):
    """Collectives listen where a host reaches process 0, not where its own name leads."""
    secret = tmp_path / "secret"
    secret.write_text("abc")
    secret.chmod(0o600)
    variables = {"FTMESH_SECRET_FILE": str(secret)} if has_secret else {}
    with network(2, names) as hosts:
        at = address or hosts.address(0)
        options = {"address": at, "enter": hosts.command, "variables": variables}
        with run_loop(2, steps=3, **options) as run:
            statuses, lines = run.results(START)
    assert statuses == [0, 0]
    assert lines[1] == []
    warned = ["without a secret, anyone on the network can join" in line for line in lines[0]]
    assert warned == ([] if has_secret else [True])


# The monitor by itself ----------------------------------------------------------------------------


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return server.accept()[0], near


@contextmanager
def monitors(number, silence=1.5):
    """The monitors of a group, not started; yields them, their sockets and what each notices."""
    with ExitStack() as stack:
        pairs = {peer: tcp_pair() for peer in range(1, number)}
        ends = [{peer: pair[0] for peer, pair in pairs.items()}]
        ends += [{0: pair[1]} for pair in pairs.values()]
        noticed = [[] for _ in range(number)]
        made = []
        for process, connections in enumerate(ends):
            for connection in connections.values():
                stack.enter_context(connection)

            def on_lost(lost, line, own=noticed[process]):
                own.append((set(lost), line))

            made.append(PeerMonitor(process, connections, on_lost, silence=silence))
        yield made, ends, noticed
        for monitor in made:
            monitor.stop()


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_processes_that_end_together_are_named_together():
    with monitors(4) as (made, ends, noticed):
        for monitor in made[:2]:
            monitor.start()
        for process in (2, 3):
            ends[process][0].shutdown(socket.SHUT_RDWR)
        wait_until(lambda: noticed[0] and noticed[1])
        expected = ({2, 3}, "processes 2 and 3 were lost: the connection was closed")
        assert noticed[:2] == [[expected], [expected]]


def test_a_silent_process():
    """It is lost only once heartbeats are expected of it, and all learn of it."""
    with monitors(3) as (made, _, noticed):
        for monitor in made[:2]:
            monitor.start()
        time.sleep(2)
        assert noticed == [[], [], []]
        for monitor in made[:2]:
            monitor.expect_beats()
        wait_until(lambda: noticed[0] and noticed[1])
        expected = ({2}, "process 2 was lost: no heartbeat for 1.5 s")
        assert noticed[:2] == [[expected], [expected]]
        made[2].start()  # as if it was stopped until now
        wait_until(lambda: noticed[2])
        line = "the others counted this process as lost: no heartbeat for 1.5 s"
        assert noticed[2] == [({0, 2}, line)]


def test_a_process_that_says_goodbye():
    with monitors(3) as (made, ends, noticed):
        for monitor in made:
            monitor.start()
            monitor.expect_beats()
        made[1].stop()
        time.sleep(0.2)
        ends[1][0].shutdown(socket.SHUT_RDWR)
        time.sleep(2)  # the others beat
        assert noticed == [[], [], []]
        ends[2][0].shutdown(socket.SHUT_RDWR)
        wait_until(lambda: noticed[0])
        assert noticed[0][0][0] == {2}
