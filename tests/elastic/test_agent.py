"""Agents and their pool in one process: nodes and their hosts, lost controllers, signals."""

import contextlib
import json
import signal
import socket
import sys
import threading
import time

import pytest

from ftmesh.elastic import agent as agent_module
from ftmesh.elastic import agent_pool as pool_module
from ftmesh.elastic import supervisor as supervisor_module
from ftmesh.elastic.agent import Agent
from ftmesh.elastic.agent_pool import AgentPool
from ftmesh.elastic.local_pod import TIMED_OUT
from ftmesh.elastic.rpc import connect, free_port
from ftmesh.elastic.run_log import EventLog
from ftmesh.elastic.supervisor import Policy, Supervisor
from ftmesh.errors import OUT_OF_HOSTS, RESTART, ArgumentError, ClusterError

SECRET = "5ec2e7"
TIMEOUT = 100  # seconds for what takes a few
HELLO = {"address": "127.0.0.1", "store": "", "successor": "127.0.0.1:1", "record": None}
RECORD = {
    "generation": 4, "roster": [0, 1], "highest_step": 70, "quarantined": "", "strikes": {},
    "failures": 2,
}  # fmt: skip


@contextlib.contextmanager
def joined(pool, name, index=None, **hello):
    """The connection of an agent, and what the pool has answered."""
    with connect(pool.address, SECRET, timeout=TIMEOUT) as channel:
        channel.send({**HELLO, "agent": name, "index": index, **hello})
        yield channel, channel.receive(TIMEOUT)[0]


def wait_until(condition):
    until = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def hosts_file(folder, nodes):
    (folder / "hosts.json").write_text(nodes if isinstance(nodes, str) else json.dumps(nodes))


class TestNodes:
    def test_each_has_a_host_of_its_own_though_one_was_replaced(self, tmp_path, monkeypatch):
        """As when a job is requeued on other nodes, which an engine numbers anew."""
        monkeypatch.setattr(pool_module, "REPLACE_SECONDS", 0.0)
        hosts_file(tmp_path, {"a": 0, "b": 1, "c": 2})
        with (
            AgentPool(3, SECRET, folder=tmp_path) as pool,
            joined(pool, "d", 2) as (_, d),
            joined(pool, "c", 1) as (_, c),
            joined(pool, "b", 0) as (_, b),
        ):
            assert sorted(answer["host"] for answer in (b, c, d)) == [0, 1, 2]
        assert sorted(json.loads((tmp_path / "hosts.json").read_text()).values()) == [0, 1, 2]

    def test_a_new_node_waits_for_those_of_the_last_run(self, tmp_path):
        hosts_file(tmp_path, {"a": 0, "b": 1})
        with AgentPool(2, SECRET, folder=tmp_path) as pool:
            with joined(pool, "new", 0) as (_, answer):
                assert "waiting for the nodes of the last run" in answer["rejected"]
            with (
                joined(pool, "a", 1) as (_, a),
                joined(pool, "b", 0) as (_, b),
                joined(pool, "new", 0) as (_, new),
            ):
                assert (a, b) == ({"host": 0}, {"host": 1})
                assert "one host more than the 2 of this run" in new["rejected"]

    @pytest.mark.parametrize(
        "text",
        ["", "[]", '{"a": null}', '{"a": Infinity}', '{"a": 0, "b": 0}', '{"a": -1}', '{"a": 0.5}',
         '{"a": true}', '{"a": "0"}', "[" * 100_000],
    )  # fmt: skip
    def test_a_damaged_record(self, tmp_path, text):
        hosts_file(tmp_path, text)
        with pytest.raises(ArgumentError, match=r"hosts\.json is not a record of hosts"):
            AgentPool(2, SECRET, folder=tmp_path)

    def test_the_host_is_answered_before_anything_else(self):
        """Other threads send to an agent as soon as it is known."""
        with AgentPool(1, SECRET) as pool:
            pool.dismiss(3)
            with joined(pool, "a") as (channel, answer):
                assert answer == {"host": 0}
                assert channel.receive(TIMEOUT)[0] == {"over": 3}


def test_strangers_are_logged_once():
    lines = []
    with AgentPool(1, SECRET, say=lines.append) as pool:
        host, port = pool.address.split(":")
        for _ in range(3):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                with contextlib.suppress(ConnectionResetError):
                    while stranger.recv(100):
                        pass
        wait_until(lambda: lines)
        with joined(pool, "a") as (_, first), joined(pool, "a") as (_, second):
            assert "host" in first
            assert "already has an agent" in second["rejected"]
        wait_until(lambda: len(lines) == 2)
    assert lines[0] == "rejects a connection from 127.0.0.1: it uses another protocol"
    assert "already has an agent" in lines[1]


class TestGather:
    """What a controller of a run with a record of its hosts does when not all of them come."""

    def status(self, folder, hosts, come, timeout=TIMEOUT, **policy):
        hosts_file(folder, {f"host {host}": host for host in range(hosts)})
        events = EventLog(self.lines.append)
        with AgentPool(hosts, SECRET, folder=folder) as pool:
            supervisor = Supervisor(pool, None, Policy(**policy), events, folder)
            agents = [self.agent(folder, pool, host) for host in come]
            wait_until(lambda: pool.present == come)
            status = supervisor.run(timeout)
            pool.dismiss(status)
            for thread in agents:
                thread.join(TIMEOUT)
        return status

    def agent(self, folder, pool, host):
        agent = Agent(
            [sys.executable, "-S", "-c", "import os; assert os.environ['FTMESH_EPOCH'] == '5'"]
            if self.record
            else ["true"],
            name=f"host {host}", index=host, secret=SECRET, run_dir=folder, devices=1,
        )  # fmt: skip
        agent._record = self.record
        thread = threading.Thread(target=agent.run, args=(pool.address, 5))
        thread.start()
        return thread

    @pytest.fixture(autouse=True)
    def short(self, monkeypatch):
        self.lines, self.record = [], {}
        monkeypatch.setattr(supervisor_module, "REJOIN_SECONDS", 0.5)

    def test_fewer_than_half_do_not_train(self, tmp_path):
        """The others may train already, by the controller of another host."""
        assert self.status(tmp_path, 4, [0]) == OUT_OF_HOSTS
        assert "gives up: hosts 1, 2, 3 did not join within 0.5 s" in self.lines

    def test_the_timeout_names_the_hosts_that_did_not_join(self, tmp_path):
        assert self.status(tmp_path, 4, [0, 2], timeout=0.1) == TIMED_OUT
        assert "gives up: --timeout reached: hosts 1, 3 did not join" in self.lines

    def test_more_than_half_train(self, tmp_path):
        assert self.status(tmp_path, 3, [0, 1]) == 0

    def test_as_few_as_min_hosts_train(self, tmp_path):
        assert self.status(tmp_path, 4, [0], min_hosts=1) == 0

    def test_the_record_that_agents_bring_is_continued(self, tmp_path):
        """The host of the controller was started again, and the agents of others were not."""
        self.record = RECORD
        assert self.status(tmp_path, 2, [0, 1]) == 0
        assert "70 steps, 2 failures" in self.lines[-1]


class Successor:
    """A controller that an agent starts, in a thread."""

    def __init__(self, folder, address, record):
        self.pool = AgentPool(2, SECRET, port=int(address.split(":")[1]))
        self.supervisor = Supervisor(
            self.pool, None, Policy(), EventLog(lambda line: None), folder, record=record,
            has_successors=True,
        )  # fmt: skip
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        with self.pool:
            status = self.supervisor.run(TIMEOUT)
            if not self.supervisor.hands_over:
                self.pool.dismiss(status)

    def close(self):
        self.supervisor.end(signal.SIGKILL)
        self.thread.join()


class TestLostController:
    @pytest.fixture
    def make(self, tmp_path, monkeypatch):
        """An agent that tries to take over where it is told to, and what it has started."""
        monkeypatch.setattr(agent_module, "SUCCESSION_SECONDS", 0.1)
        monkeypatch.setattr(supervisor_module, "QUORUM_SECONDS", 0.3)
        started, lines = [], []

        def start(address, record):
            started.append(address)
            return Successor(tmp_path, address, record)

        agent = Agent(
            ["true"], name="b", index=1, secret=SECRET, run_dir=tmp_path, devices=1,
            say=lines.append, start_controller=start,
        )  # fmt: skip
        (tmp_path / "pids").mkdir()
        return agent, started, lines

    def announce(self, pool, agent):
        pool.announce(RECORD)
        wait_until(lambda: agent._record)

    def test_without_a_majority_it_tries_once_and_asks_to_be_restarted(self, make, monkeypatch):
        monkeypatch.setattr(agent_module, "SEARCH_SECONDS", 2.5)
        agent, started, lines = make
        status = []
        pool = AgentPool(2, SECRET)
        thread = threading.Thread(target=lambda: status.append(agent.run(pool.address, 5)))
        with pool, joined(pool, "a", 0):
            thread.start()
            wait_until(lambda: len(pool.present) == 2)
            self.announce(pool, agent)
        thread.join(TIMEOUT)
        assert status == [RESTART]
        assert started == [agent._successor]
        assert lines.count("host 1 takes over the controller") == 1

    def test_it_returns_to_a_controller_that_is_back(self, make):
        """Its own could not continue; another one is at the address of the lost one again."""
        agent, started, _ = make
        status = []
        pool = AgentPool(2, SECRET)
        port = int(pool.address.split(":")[1])
        thread = threading.Thread(target=lambda: status.append(agent.run(pool.address, 5)))
        with pool, joined(pool, "a", 0):
            thread.start()
            wait_until(lambda: len(pool.present) == 2)
            self.announce(pool, agent)
        wait_until(lambda: started and agent._controller is None)
        with AgentPool(2, SECRET, port=port) as pool:
            wait_until(lambda: pool.present == [1])
            assert pool.newest_record == RECORD
            pool.dismiss(3)
            thread.join(TIMEOUT)
        assert status == [3]
        assert len(started) == 1

    def test_the_end_of_the_run_is_known_though_a_send_fails_first(self, make, monkeypatch):
        """The agent was busy with output when the controller ended; it must not take over."""
        agent, started, lines = make
        agent._command = ["echo", "busy"]
        status, is_busy, is_closed = [], threading.Event(), threading.Event()

        def on_output(stream, data):
            is_busy.set()
            assert is_closed.wait(TIMEOUT)

        monkeypatch.setattr(agent, "_on_output", on_output)
        pool = AgentPool(2, SECRET)
        thread = threading.Thread(target=lambda: status.append(agent.run(pool.address, 5)))
        with pool, joined(pool, "a", 0):
            thread.start()
            wait_until(lambda: len(pool.present) == 2)
            self.announce(pool, agent)
            pool.send(1, {"start": 1, "env": {"FTMESH_COORDINATOR": "none"}})
            assert is_busy.wait(TIMEOUT)
            pool.dismiss(3)
        time.sleep(0.2)  # for its thread that listens
        is_closed.set()
        thread.join(TIMEOUT)
        assert (status, started, lines) == ([3], [], [])


class TestFirstConnection:
    def agent(self, folder, lines, secret=SECRET):
        (folder / "pids").mkdir()
        return Agent(
            ["true"], name="a", index=1, secret=secret, run_dir=folder, devices=1,
            say=lines.append,
        )  # fmt: skip

    def test_a_controller_that_is_not_there_may_be_late(self, tmp_path):
        lines = []
        address = f"127.0.0.1:{free_port()}"
        assert self.agent(tmp_path, lines).run(address, 0.3) == RESTART
        assert lines[0].startswith(f"no controller at {address} within 0.3 s: nothing answers")

    def test_another_secret_is_a_mistake(self, tmp_path):
        with AgentPool(1, SECRET) as pool, pytest.raises(ClusterError, match="knows the secret"):
            self.agent(tmp_path, [], "another").run(pool.address, 0.3)

    def test_a_signal_meanwhile(self, tmp_path):
        agent = self.agent(tmp_path, [])
        threading.Timer(0.2, agent.end, [signal.SIGTERM]).start()
        begin = time.monotonic()
        assert agent.run(f"127.0.0.1:{free_port()}", 600) == 128 + signal.SIGTERM
        assert time.monotonic() - begin < TIMEOUT


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_before_all_have_come(tmp_path, signum):
    """The run ends at once, with the status of the signal that the hosts have received."""
    statuses = []
    with AgentPool(2, SECRET) as pool:
        supervisor = Supervisor(pool, None, Policy(), EventLog(lambda line: None), tmp_path)
        agent = Agent(["true"], name="a", index=0, secret=SECRET, run_dir=tmp_path, devices=1)
        thread = threading.Thread(target=lambda: statuses.append(agent.run(pool.address, 5)))
        thread.start()
        wait_until(lambda: pool.present)
        agent.end(signum)
        statuses.append(supervisor.run(TIMEOUT))
        pool.dismiss(statuses[0])
        thread.join(TIMEOUT)
    assert statuses == [128 + signum] * 2
