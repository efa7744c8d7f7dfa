"""The supervisor's connections to the agents of all hosts, and the workers that they run.

The agent of each host connects and gets a host index. A node keeps its index for the whole run, and
in later runs with the same folder, so that it has the same chips again.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftmesh.elastic.rpc import LOOPBACK, Channel, ChannelClosed, Listener
from ftmesh.errors import RESTART, ArgumentError
from ftmesh.files import write_text

BEAT_SECONDS = 0.5
LEASE_SECONDS = 4.0  # an agent that hears nothing for this long ends its worker
MAX_REJECTIONS = 20  # that are logged
REPLACE_SECONDS = 5.0  # for the nodes of an earlier run, before new ones replace them
LOST_SECONDS = 6.0  # a host that is not heard of for this long is lost; more than the lease


@dataclass
class AgentConnection:
    """The connection of one agent."""

    name: str  # of its node
    channel: Channel
    address: str  # by which the host is reached
    store: str  # of its peer store
    successor: str  # where it would run the controller
    last_heard: float = field(default_factory=time.monotonic)
    leaving: signal.Signals | None = None  # by which its host is being shut down
    is_closed: bool = False

    @property
    def problem(self) -> str:
        """Why the host is not available; empty if it is."""
        silence = time.monotonic() - self.last_heard
        if self.is_closed:
            return "has lost its agent"
        return f"is out of reach: no message for {silence:.0f} s" * (silence > LOST_SECONDS)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. A closed connection is noticed elsewhere."""
        with contextlib.suppress(OSError):
            self.channel.send(message)


class AgentPool:
    """Listens for the agents of up to `num_hosts` hosts.

    Args:
        num_hosts: Number of hosts of a full run.
        secret: The secret of the run.
        host, port: Where to listen; by default on loopback, at a free port.
        folder: Folder that records the node of each host index; None records nothing.
        say: Called with lines about agents and strangers that are rejected, once for each reason.
    """

    def __init__(
        self,
        num_hosts: int,
        secret: str,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        folder: Path | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.num_hosts, self.secret, self.host, self._say = num_hosts, secret, host, say
        self.ended: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()  # host, message
        self.newest_record: dict[str, Any] = {}  # that an agent has brought
        self._agents: dict[int, AgentConnection] = {}
        self._began = time.monotonic()
        self._file = None if folder is None else folder / "hosts.json"
        self._nodes = self._load_nodes()  # name -> host index
        self._record: dict[str, Any] = {}
        self._status: int | None = None  # of the run, once it is over
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._rejections: set[str] = set()
        listener = Listener(
            self._serve, secret=secret, host=host, port=port, on_stranger=self._reject
        )
        self._listener, self.address = listener, listener.address
        threading.Thread(target=self._beat, name="ftmesh agents", daemon=True).start()

    def __enter__(self) -> AgentPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def present(self) -> list[int]:
        """The hosts with a connected agent that are not being shut down, in order."""
        with self._lock:
            agents = sorted(self._agents.items())
        return [host for host, agent in agents if not agent.problem and agent.leaving is None]

    @property
    def leaving(self) -> list[int]:
        """The hosts that are being shut down and are still connected."""
        with self._lock:
            agents = sorted(self._agents.items())
        return [host for host, agent in agents if agent.leaving and not agent.problem]

    @property
    def ended_by(self) -> signal.Signals | None:
        """The signal that shuts down all hosts; None if one host stays."""
        with self._lock:
            signals = [agent.leaving for agent in self._agents.values() if not agent.problem]
        return signals[0] if all(signals) and signals else None

    @property
    def known_nodes(self) -> int:
        """How many nodes have an index, from this run or earlier ones."""
        return len(self._nodes)

    def agent(self, host: int) -> AgentConnection:
        """Return the last connection of a host."""
        with self._lock:
            return self._agents[host]

    def send(self, host: int, message: dict[str, Any]) -> None:
        """Send a message to the agent of a host, if it is here."""
        with self._lock:
            agent = self._agents.get(host)
        if agent is not None:
            agent.send(message)

    def announce(self, record: Mapping[str, Any]) -> None:
        """Send all agents the record from which one of them could continue the run."""
        self._record = dict(record)
        present = self.present
        successors = {host: self.agent(host).successor for host in present}
        for host in present:
            self.send(host, {"record": self._record, "successors": successors})

    def dismiss(self, status: int) -> None:
        """Make all agents exit with a status, also those that connect later."""
        with self._lock:
            self._status = status
            agents = list(self._agents.values())
        for agent in agents:
            agent.send({"over": status})

    def close(self) -> None:
        """Accept no more agents and close all connections."""
        self._closed.set()
        self._listener.close()
        with self._lock:
            agents = list(self._agents.values())
        for agent in agents:
            agent.channel.close()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            with self._lock:
                agents = list(self._agents.values())
            for agent in agents:
                if not agent.problem:
                    agent.send({"beat": True})

    def _serve(self, channel: Channel) -> None:
        """Handle the connection of one agent, in a thread of its own."""
        host, agent = -1, None
        try:
            while frame := channel.receive():
                message = frame[0]
                if agent is None:
                    host, agent = self._admit(channel, message)
                    continue
                agent.last_heard = time.monotonic()
                if "leaving" in message:
                    agent.leaving = signal.Signals(message["leaving"])
                elif "ended" in message or "gone" in message:
                    agent.store = str(message.get("store", agent.store))
                    self.ended.put((host, message))
        except ChannelClosed:
            pass
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if agent is None:
                with contextlib.suppress(OSError):
                    channel.send({"rejected": str(error)})
                self._reject(channel.peer.rpartition(":")[0], str(error))
        finally:
            channel.close()
            if agent is not None:
                agent.is_closed = True

    def _reject(self, peer: str, why: str) -> None:
        line = f"rejects a connection from {peer}: {why}"
        with self._lock:
            is_new = line not in self._rejections and len(self._rejections) < MAX_REJECTIONS
            if is_new:
                self._rejections.add(line)
        if is_new:
            self._say(line)

    def _admit(self, channel: Channel, hello: dict[str, Any]) -> tuple[int, AgentConnection]:
        name, index = str(hello["agent"]), hello["index"]
        agent = AgentConnection(
            name, channel, str(hello["address"]), str(hello["store"]), str(hello["successor"])
        )
        with self._lock:
            host = self._host_of(name, None if index is None else int(index))
            old = self._agents.get(host)
            if old is not None and not old.problem:
                raise ArgumentError(f"host {host} ({name}) already has an agent")
            channel.send({"host": host})  # the first message
            self._agents[host] = agent
            record = hello["record"] or {}
            if record.get("generation", 0) > self.newest_record.get("generation", 0):
                self.newest_record = record
            status = self._status
        if old is not None:
            old.channel.close()
        if status is not None:
            channel.send({"over": status})
        elif self._record:
            self.announce(self._record)
        return host, agent

    def _host_of(self, name: str, index: int | None) -> int:
        """Return the index of a node: its earlier one, its engine's, or the first free one."""
        if name not in self._nodes:
            taken = set(self._nodes.values())
            free = [host for host in range(self.num_hosts) if host not in taken]
            if not free:  # a new node replaces one that is not here
                free = [h for h in range(self.num_hosts) if h not in self._agents]
                if free and time.monotonic() < self._began + REPLACE_SECONDS:
                    raise ArgumentError(f"{name} is new: waiting for the nodes of the last run")
                free += [h for h, agent in self._agents.items() if agent.problem]
            if not free:
                raise ArgumentError(
                    f"{name} is one host more than the {self.num_hosts} of this run"
                )
            host = index if index in free else free[0]
            self._nodes = {n: h for n, h in self._nodes.items() if h != host} | {name: host}
            if self._file is not None:
                with contextlib.suppress(OSError):  # a full disk must not end the run
                    write_text(self._file, json.dumps(self._nodes))
        return self._nodes[name]

    def _load_nodes(self) -> dict[str, int]:
        try:
            nodes = {} if self._file is None else json.loads(self._file.read_text())
            hosts = list(nodes.values())
            if not all(type(h) is int and h >= 0 and hosts.count(h) == 1 for h in hosts):
                raise ValueError("a host index is missing, negative or used twice")
            return {name: host for name, host in nodes.items() if host < self.num_hosts}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ArgumentError(
                f"{self._file} is not a record of hosts: delete it to start a new run"
            ) from error


class RemoteWorker:
    """A worker that an agent runs."""

    def __init__(self, pool: AgentPool, start: int, number: int, host: int) -> None:
        self._pool, self._start = pool, start
        self._agent = pool.agent(host)
        self.number, self.host = number, host
        self.status: int | None = None  # once it has exited; 128 + n after signal n
        self.sent_signal: signal.Signals | None = None  # the first while it ran
        self.is_gone = False  # nothing of it is left, or its host is out of reach
        self.how = ""  # it ended

    @property
    def error_status(self) -> int:
        """The status with which it has ended by itself, because of an error; 0 if it has not."""
        status = self.status or 0
        return status if status < 128 and status != RESTART else 0

    def end(self, signum: signal.Signals) -> None:
        """Send it a signal."""
        if not self.is_gone:
            if self.status is None:
                self.sent_signal = self.sent_signal or signum
            self._pool.send(self.host, {"signal": int(signum), "start": self._start})

    def write_stacks(self, pid: int) -> None:
        """Have its process `pid` write the stacks of its threads."""
        self._pool.send(self.host, {"stacks": self._start, "pid": pid})

    def handle(self, message: dict[str, Any]) -> bool:
        """Take a message of its agent; return whether it has exited."""
        if message.get("gone") == self._start:
            self.is_gone = True
        if message.get("ended") != self._start or self.status is not None:
            return False
        self.status, self.how = int(message["status"]), _how_ended(int(message["status"]))
        return True

    def check_host(self) -> bool:
        """Return whether its host has just been lost."""
        problem = self._agent.problem
        if not problem or self.is_gone:
            return False
        was_running, self.is_gone = self.status is None, True
        if was_running:
            self.status, self.how = 128 + signal.SIGKILL, problem
        return was_running


class RemotePod:
    """The workers of one start, as `local_pod.Pod` has them: process i runs on ``hosts[i]``."""

    def __init__(self, pool: AgentPool, start: int, hosts: Sequence[int]) -> None:
        self._pool, self._start = pool, start
        self.processes = [RemoteWorker(pool, start, i, host) for i, host in enumerate(hosts)]
        self._by_host = {worker.host: worker for worker in self.processes}
        self.first_failed: RemoteWorker | None = None

    def release(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Start the workers, each with some variables added to its environment."""
        for worker, env in zip(self.processes, environments, strict=True):
            self._pool.send(worker.host, {"start": self._start, "env": dict(env)})

    @property
    def is_running(self) -> bool:
        """True while anything is left of a worker whose host can be reached."""
        return not all(worker.is_gone for worker in self.processes)

    @property
    def how_all_failed(self) -> str:
        """How all workers that were not killed have ended, if alike: a missing module, perhaps."""
        exited = [worker for worker in self.processes if worker.sent_signal is None]
        statuses = {worker.status or 0 for worker in exited}
        is_same = len(exited) > 1 == len(statuses)
        return exited[0].how if is_same and 0 < min(statuses) < 128 else ""

    def poll(self, seconds: float) -> list[RemoteWorker]:
        """Wait up to `seconds` for the end of workers; return those that have ended."""
        ended = []
        with contextlib.suppress(queue.Empty):
            host, message = self._pool.ended.get(timeout=seconds)
            while True:
                if host in self._by_host and self._by_host[host].handle(message):
                    ended.append(self._by_host[host])
                host, message = self._pool.ended.get_nowait()
        ended += [worker for worker in self.processes if worker.check_host()]
        # With 75 a worker has done as its controller told it, or has lost it.
        failed = [w for w in ended if w.status not in (0, RESTART) and w.sent_signal is None]
        self.first_failed = self.first_failed or next(iter(failed), None)
        return ended

    def wait(self, timeout: float) -> bool:
        """Wait until nothing of the workers is left; False after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.is_running and (left := deadline - time.monotonic()) > 0:
            self.poll(min(left, BEAT_SECONDS))
        return not self.is_running

    def end(self, signum: signal.Signals) -> None:
        """Send all a signal."""
        for worker in self.processes:
            worker.end(signum)


def _how_ended(status: int) -> str:
    if status - 128 in {*signal.Signals}:
        return f"ended by {signal.Signals(status - 128).name}"
    return f"ended with status {status}"
