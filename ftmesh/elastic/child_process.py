"""The processes that a launcher starts: workers, the reaper and sidecars."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from ftmesh.elastic import coordination_service, reaper
from ftmesh.elastic.peer_store import store_command
from ftmesh.elastic.pod_environment import Environment
from ftmesh.elastic.rpc import LOOPBACK, free_port
from ftmesh.errors import ClusterError

RECHECK_SECONDS = 0.01  # after a kill
POLL_SECONDS = 0.05  # for changes that no file descriptor reports
PORT_ATTEMPTS = 5  # to find a port for the service
SIDECAR_EXIT_SECONDS = 1.0  # before a sidecar is killed

RecordPid = Callable[[str, int, int], None]  # kind, host, pid

# The command waits for a line, so that the reaper knows of it first; without one it never runs.
_GATE = 'read -r go && exec "$@" </dev/null'


class ChildProcess:
    """A command in a session of its own: signals reach all it starts, a terminal's reach none."""

    def __init__(
        self, number: int, command: Sequence[str], env: Environment, *, kill_after: float
    ) -> None:
        self.number, self._kill_after = number, kill_after
        self.status: int | None = None  # once it has exited; 128 + n after signal n
        self.sent_signal: signal.Signals | None = None  # the first while it ran
        self.is_gone = False  # nothing of its session is left
        self._kill_at = float("inf")
        self._popen = subprocess.Popen(
            ["/bin/sh", "-c", _GATE, "sh", *command],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        self.pid = self._popen.pid
        self.exit_fd = _open_pidfd(self.pid)
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self._gate = self._popen.stdin
        self.streams = {1: self._popen.stdout, 2: self._popen.stderr}
        for stream in self.streams.values():
            os.set_blocking(stream.fileno(), False)

    def release(self) -> None:
        """Let the command run."""
        with contextlib.suppress(BrokenPipeError):  # it was killed before
            self._gate.write(b"\n")
        self._gate.close()

    def end(self, signum: signal.Signals) -> None:
        """Send a signal; `kill_if_due` kills what is left `kill_after` seconds later."""
        if self.is_gone:
            return
        if self.status is None:
            self.sent_signal = self.sent_signal or signum
        wait = 0 if signum == signal.SIGKILL else self._kill_after
        self._kill_at = min(self._kill_at, time.monotonic() + wait)
        reaper.send(self.pid, signum, signal.SIGCONT)  # a stopped process would not react

    def kill_if_due(self) -> None:
        """Kill it if its time to end is over, again while anything is left."""
        if not self.is_gone and time.monotonic() >= self._kill_at:
            reaper.send(self.pid, signal.SIGKILL)

    def poll(self) -> bool:
        """Update `status` and `is_gone`; return whether the command has exited since the last."""
        has_exited = self.status is None and self._popen.poll() is not None
        if has_exited:
            code = self._popen.returncode
            self.status = code if code >= 0 else 128 - code
        if self.status is not None and not reaper.groups_of(self.pid):
            self.is_gone = True
        elif has_exited:
            self.end(signal.SIGTERM)  # for the processes it left behind
        return has_exited

    def seconds_to_poll(self) -> float:
        """Return how long no call of `poll` or `kill_if_due` is needed unless `exit_fd` says so."""
        if self.is_gone:
            return float("inf")
        to_kill = max(self._kill_at - time.monotonic(), RECHECK_SECONDS)
        has_event = self.status is None and self.exit_fd is not None
        return to_kill if has_event else min(to_kill, POLL_SECONDS)

    def close(self) -> None:
        """Kill it, wait for it and close everything."""
        self.end(signal.SIGKILL)
        self._gate.close()
        self._popen.wait()
        if not self.is_gone:
            reaper.kill({self.pid})
        self.poll()
        for stream in self.streams.values():
            stream.close()
        if self.exit_fd is not None:
            os.close(self.exit_fd)
            self.exit_fd = None


class Reaper:
    """Kills the processes it watches if this process ends without doing so."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

        assert self._popen.stdin is not None
        self._stdin = self._popen.stdin

    def watch(self, process: ChildProcess) -> None:
        """Watch a process."""
        self._send(f"+{process.pid}\n")

    def forget(self, process: ChildProcess) -> None:
        """Stop watching a process: its pid may soon be reused."""
        self._send(f"-{process.pid}\n")

    def close(self) -> None:
        """Have it kill what it still watches, and wait for that."""
        self._stdin.close()
        self._popen.wait()

    def _send(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the reaper was killed: continue without
            self._stdin.write(line.encode())


class Sidecar:
    """A process that prints a line when it is up, and exits when its stdin closes."""

    name = "a peer store"

    def __init__(self, command: list[str], env: Environment) -> None:
        self._popen = subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.pid = self._popen.pid
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._stdin, self._stdout = self._popen.stdin, self._popen.stdout
        self.first_line = self._stdout.readline().strip()
        if not self.first_line:
            self.close()
            raise ClusterError(f"{self.name} exited before it was up: is its port or address free?")

    @property
    def has_exited(self) -> bool:
        """True once the process has exited."""
        return self._popen.poll() is not None

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._popen.wait(SIDECAR_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._stdout.close()


class CoordinationService(Sidecar):
    """JAX's coordination service for `num_processes` workers."""

    name = "JAX's coordination service"

    def __init__(self, num_processes: int, env: Environment, record_pid: RecordPid) -> None:
        for attempts_left in reversed(range(PORT_ATTEMPTS)):
            self.address = f"{LOOPBACK}:{free_port()}"
            command = [sys.executable, coordination_service.__file__, self.address]
            try:
                super().__init__([*command, str(num_processes)], env)
                break
            except ClusterError:  # another process took the port
                if not attempts_left:
                    raise
        record_pid("service", 0, self.pid)


class PeerStoreProcesses:
    """A peer store for each host."""

    def __init__(self, env: Environment, record_pid: RecordPid) -> None:
        self._env, self._record_pid = env, record_pid
        self._stores: dict[int, Sidecar] = {}

    def start_missing(self, hosts: Iterable[int]) -> None:
        """Start an empty store for each host that has none."""
        for host in hosts:
            if host in self._stores and not self._stores[host].has_exited:
                continue
            if host in self._stores:
                self._stores[host].close()
            self._stores[host] = Sidecar(store_command(), self._env)
            self._record_pid("keeper", host, self._stores[host].pid)

    @property
    def addresses(self) -> str:
        """Their addresses, as in ``0=127.0.0.1:2000,1=...``."""
        stores = sorted(self._stores.items())
        return ",".join(f"{host}={store.first_line}" for host, store in stores)

    def close(self) -> None:
        """End all stores."""
        for store in self._stores.values():
            store.close()


def _open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process exits, on Linux."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:  # a sandbox that does not allow it
        return None
