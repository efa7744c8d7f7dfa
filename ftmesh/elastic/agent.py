"""Agent: runs on every host, starts its worker and its peer store, and outlives the worker.

The supervisor tells it when to start and end the worker. An agent that receives nothing for
`LEASE_SECONDS` ends its worker, before the supervisor declares the host lost. If the supervisor is
lost, the first remaining agent starts another one, and all connect to that.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Protocol, Self

from ftmesh.distributed.handshake import RejectedError
from ftmesh.elastic import reaper
from ftmesh.elastic.agent_pool import BEAT_SECONDS, LEASE_SECONDS, AgentPool
from ftmesh.elastic.child_process import Sidecar, emulated_environment, record_pid
from ftmesh.elastic.local_pod import Processes
from ftmesh.elastic.peer_store import store_command
from ftmesh.elastic.rpc import Channel, ChannelClosed, connect, free_port
from ftmesh.errors import RESTART, ClusterError

POLL_SECONDS = 0.05
CONNECT_SECONDS = 2.0  # to one address
PROBE_SECONDS = 1.0  # to an address where another agent may have started a controller
SUCCESSION_SECONDS = 5.0  # an agent gives each one before it this long to take over
SEARCH_SECONDS = 60.0  # for a controller, before an agent exits
LEAVE_SECONDS = 25.0  # from a signal to the end of the worker: time for a checkpoint

OnOutput = Callable[[int, bytes], None]  # 1 for stdout or 2 for stderr, data


class Closable(Protocol):
    """A controller that can be closed."""

    def close(self) -> None:
        """End it."""


StartController = Callable[[str, dict[str, Any]], Closable]  # address, record


class Agent:
    """The agent of one host.

    Args:
        command: What the worker runs.
        name: The name of the node, unique in the run.
        index: The host index from the engine; None to let the controller assign one.
        secret: The secret of the run.
        run_dir: Folder for stack traces and process ids.
        devices: CPU devices that the worker emulates; None to use the devices of the host.
        flags: XLA flags for emulated devices.
        on_output: Called with the worker's output; with empty data at its end.
        say: Called with lines for the user.
        start_controller: Starts a controller at an address when the old one is lost; None if
            this agent must not take over.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        index: int | None,
        secret: str,
        run_dir: Path,
        devices: int | None = None,
        flags: str = "",
        on_output: OnOutput = lambda stream, data: None,
        say: Callable[[str], None] = lambda line: None,
        start_controller: StartController | None = None,
    ) -> None:
        self._command, self._name, self._index = list(command), name, index
        self._secret, self._run_dir = secret, run_dir
        self._devices, self._flags = devices, flags
        self._on_output, self._say = on_output, say
        self._start_controller = start_controller
        self._controller: Closable | None = None
        self._pod: Processes | None = None
        self._start = 0  # generation in which the worker was started
        self._store: Sidecar | None = None
        self._host: int | None = None
        self._record: dict[str, Any] = {}
        self._successors: dict[int, str] = {}
        self._successor = ""  # where this agent would have a controller
        self._signal: signal.Signals | None = None
        self._leave_at = float("inf")
        self._last_heard = time.monotonic()
        self._address = self._leader = ""  # of this controller, of the last one that had a record
        self._lost_at = 0.0  # when that one was lost
        self._has_tried = False  # to take over since

    def run(self, address: str, timeout: float) -> int:
        """Connect to the controller at `address`, within `timeout` seconds; run until the end.

        Returns:
            The exit status of the run; 75 if there is no controller, or it is lost and no agent
            takes over.

        Raises:
            ClusterError: The controller has another secret, or rejects this host.
        """
        try:
            self._leader = address
            channel = self._connect_first(address, timeout)
            while channel is not None:
                status = self._serve(channel)
                if status is not None:
                    return status
                if self._controller is not None:  # it has not found enough hosts
                    self._controller.close()
                    self._controller = None
                channel = self._find_controller()
            return 128 + self._signal if self._signal else RESTART
        finally:
            self._end_worker()
            if self._store is not None:
                self._store.close()
            if self._controller is not None:
                self._controller.close()

    def end(self, signum: signal.Signals) -> None:
        """Leave the run: the host is being shut down. A second call ends the worker at once."""
        if self._signal is None:
            self._signal = signum
            self._leave_at = time.monotonic() + LEAVE_SECONDS
        else:
            self._leave_at = 0.0

    def enforce(self) -> None:
        """Kill what is due to be killed; for an `on_output` that blocks."""
        pod = self._pod
        if pod is not None:
            pod.enforce()

    # Connection to the controller ---------------------------------------------------------------

    def _connect_first(self, address: str, timeout: float) -> Channel | None:
        deadline = time.monotonic() + timeout
        while self._signal is None:
            try:
                return self._join(address)
            except ChannelClosed as error:
                if time.monotonic() > deadline:
                    reason = f"no controller at {address} within {timeout:g} s: {error}"
                    if isinstance(error.__cause__, (RejectedError, NoneType)):
                        raise ClusterError(reason) from error
                    self._say(reason)  # it may only be late
                    return None
            time.sleep(BEAT_SECONDS / 2)
        return None

    def _join(self, address: str, timeout: float = CONNECT_SECONDS) -> Channel:
        """Connect to a controller and register this agent."""
        channel = connect(address, self._secret, timeout=timeout)
        own = channel.own_host
        if not self._successor:
            self._successor = f"{own}:{free_port(own)}"
        channel.send(
            {
                "agent": self._name,
                "index": self._index if self._host is None else self._host,
                "address": own,
                "store": self._running_store(own).first_line,
                "successor": self._successor,
                "record": self._record or None,
            }
        )
        reply = channel.receive(CONNECT_SECONDS)
        if reply is None or "host" not in reply[0]:
            channel.close()
            reason = str((reply or ({},))[0].get("rejected", "no reply"))
            raise ChannelClosed(f"the controller at {address}: {reason}")
        self._host, self._address = int(reply[0]["host"]), address
        record_pid(self._run_dir, "store", self._host, self._running_store(own).pid)
        return channel

    def _running_store(self, own_address: str) -> Sidecar:
        """Return the peer store of this host; start an empty one if there is none."""
        if self._store is None or self._store.has_exited:
            if self._store is not None:
                self._store.close()
            own = {"FTMESH_KEEPER_HOST": own_address, "FTMESH_RUN_DIR": str(self._run_dir)}
            self._store = Sidecar(store_command(), {**own, "FTMESH_SECRET": self._secret})
            if self._host is not None:
                record_pid(self._run_dir, "store", self._host, self._store.pid)
        return self._store

    def _find_controller(self) -> Channel | None:
        """Return a connection to the run's next controller, which this agent may start."""
        if self._address == self._leader:
            self._lost_at, self._has_tried = time.monotonic(), False
        others = sorted((h, a) for h, a in self._successors.items() if h != self._host)
        before = [address for host, address in others if host < (self._host or 0)]
        while (since := time.monotonic() - self._lost_at) < SEARCH_SECONDS and not self._signal:
            unreachable: set[str] = set()  # hosts
            # Hosts after this one take over only after this one has tried.
            last = [address for _, address in others] if self._has_tried else before
            for address in (self._leader, *last):
                host = address.rpartition(":")[0]
                if host in unreachable or self._signal:
                    continue
                try:
                    return self._join(address, PROBE_SECONDS)
                except ChannelClosed as error:
                    # A host that rejects connections may be about to start a controller.
                    if not isinstance(error.__cause__, ConnectionRefusedError):
                        unreachable.add(host)
            waits_for = [a for a in before if a.rpartition(":")[0] not in unreachable]
            is_due = not waits_for or since >= SUCCESSION_SECONDS * len(before)
            if self._start_controller and self._record and is_due and not self._has_tried:
                self._has_tried = True
                self._say(f"host {self._host} takes over the controller")
                with contextlib.suppress(ClusterError):
                    self._controller = self._start_controller(self._successor, self._record)
                    return self._join(self._successor)
            time.sleep(BEAT_SECONDS)
        return None

    def _serve(self, channel: Channel) -> int | None:
        """Follow the controller; return the status of the run, None if the controller is lost."""
        inbox: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._last_heard = time.monotonic()
        stopped, told_to_leave = threading.Event(), False

        def listen() -> None:
            with contextlib.suppress(ChannelClosed):
                while frame := channel.receive():
                    self._last_heard = time.monotonic()
                    pod, message = self._pod, frame[0]
                    if pod is not None and "signal" in message and message["start"] == self._start:
                        pod.end(signal.Signals(message["signal"]))  # if the main thread is blocked
                    elif "beat" not in message:
                        inbox.put(message)
            inbox.put(None)

        def beat() -> None:
            while not stopped.wait(BEAT_SECONDS):
                with contextlib.suppress(ChannelClosed):
                    channel.send({"beat": True})
                if time.monotonic() - self._last_heard > LEASE_SECONDS:
                    self._kill_session()  # also if the main thread is blocked
                    inbox.put(None)
                    return

        threads = [threading.Thread(target=target, daemon=True) for target in (listen, beat)]
        for thread in threads:
            thread.start()
        try:
            while (message := self._next(inbox)) is not None:
                if "over" in message:
                    return int(message["over"])
                self._handle(message)
                self._poll_worker(channel)
                if self._signal is not None and not told_to_leave:
                    channel.send({"leaving": int(self._signal)})
                    told_to_leave = True
                if time.monotonic() > self._leave_at:
                    return 128 + (self._signal or signal.SIGTERM)
            self._say(f"host {self._host} lost contact with the controller and ends its worker")
        except ChannelClosed:  # by a send; what came before is still read
            threads[0].join(CONNECT_SECONDS)
        finally:
            stopped.set()
            channel.close()
            self._end_worker()
        return next((int(last["over"]) for last in inbox.queue if last and "over" in last), None)

    def _next(self, inbox: queue.Queue[dict[str, Any] | None]) -> dict[str, Any] | None:
        """Return the next message, empty if there is none now; None if the controller is lost."""
        with contextlib.suppress(queue.Empty):
            return inbox.get(timeout=0 if self._pod else POLL_SECONDS)
        return {}

    def _handle(self, message: Mapping[str, Any]) -> None:
        if "env" in message:
            self._start_worker(int(message["start"]), message["env"])
        elif "record" in message:
            self._record = dict(message["record"])
            self._successors = {int(h): str(a) for h, a in message["successors"].items()}
            self._leader = self._address
        elif self._pod is not None and self._start in (message.get("start"), message.get("stacks")):
            if "signal" in message:
                self._pod.end(signal.Signals(message["signal"]))
            elif self._pod.processes[0].status is None:
                with contextlib.suppress(OSError):
                    os.kill(int(message["pid"]), signal.SIGUSR1)

    # The worker ---------------------------------------------------------------------------------

    def _start_worker(self, start: int, env: Mapping[str, str]) -> None:
        self._end_worker()
        own = {"FTMESH_SECRET": self._secret, "FTMESH_RUN_DIR": str(self._run_dir)}
        if self._devices is None:
            environment = {"PYTHONUNBUFFERED": "1", **os.environ, **own, **env}
        else:
            environment = emulated_environment(self._devices, {**own, **env}, self._flags)
        self._start = start
        self._pod = Processes(
            self._command,
            [environment],
            on_output=lambda process, stream, data: self._on_output(stream, data),
        )
        self._pod.__enter__()
        assert self._host is not None
        record_pid(self._run_dir, "worker", self._host, self._pod.processes[0].pid)

    def _poll_worker(self, channel: Channel) -> None:
        """Pass output on, and tell the controller if the worker has exited."""
        if self._pod is None:
            return
        for process in self._pod.poll(POLL_SECONDS):
            channel.send({"ended": self._start, "status": process.status})
        if not self._pod.is_running:
            self._end_worker()
            store = self._running_store(channel.own_host)
            channel.send({"gone": self._start, "store": store.first_line})

    def _kill_session(self) -> None:
        pod = self._pod
        if pod is not None:
            reaper.send(pod.processes[0].pid, signal.SIGKILL)

    def _end_worker(self) -> None:
        pod, self._pod = self._pod, None
        if pod is not None:
            pod.close()


class LocalAgents:
    """The agents of an emulated pod, in threads of this process, inside a ``with`` block.

    Args:
        pool: Whose agents they are, for all of its hosts.
        on_output: Called with the index of a host, 1 for stdout or 2 for stderr, and data, from one
            thread at a time.
        agent_options: The other arguments of `Agent`.
    """

    def __init__(
        self,
        pool: AgentPool,
        command: Sequence[str],
        *,
        on_output: Callable[[int, int, bytes], None] = lambda host, stream, data: None,
        **agent_options: Any,
    ) -> None:
        self._pool, self._on_output, self._lock = pool, on_output, threading.Lock()
        self._agents = [
            Agent(
                command,
                name=f"host {host}",
                index=host,
                secret=pool.secret,
                on_output=partial(self._pass_on, host),
                **agent_options,
            )
            for host in range(pool.num_hosts)
        ]
        self._threads = [
            threading.Thread(target=agent.run, args=(pool.address, CONNECT_SECONDS), daemon=True)
            for agent in self._agents
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.dismiss(0)
        for thread in self._threads:
            thread.join()

    def enforce(self) -> None:
        """As `Agent.enforce`, of all agents."""
        for agent in self._agents:
            agent.enforce()

    def _pass_on(self, host: int, stream: int, data: bytes) -> None:
        while not self._lock.acquire(timeout=POLL_SECONDS):
            self._agents[host].enforce()  # nobody reads the output of another
        try:
            self._on_output(host, stream, data)
        finally:
            self._lock.release()
