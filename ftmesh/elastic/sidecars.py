"""Processes beside those that train: JAX's coordination service, and a keeper for each host.

All of them end when their standard input closes, however this process ends.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable

from ftmesh.elastic import coordination_service
from ftmesh.elastic.peer_store import LIMIT, keeper_command
from ftmesh.elastic.pod_environment import LOOPBACK, Environment, free_port
from ftmesh.errors import ClusterError

TRIES = 5  # to find a port for the service
TO_END = 1.0  # seconds, before it is killed

NotePid = Callable[[str, int, int], None]


class _Beside:
    """A process that says a line when it is up."""

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
        assert self._popen.stdout is not None
        self.line = self._popen.stdout.readline().strip()
        if not self.line:
            self.close()
            raise ClusterError(f"{command[1]} has ended before it was up")
        self.pid = self._popen.pid

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more."""
        return self._popen.poll() is not None

    def close(self) -> None:
        """End it."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        with contextlib.suppress(OSError):
            self._popen.stdin.close()
        try:
            self._popen.wait(TO_END)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._popen.stdout.close()


class Service(_Beside):
    """JAX's coordination service for so many processes."""

    def __init__(self, num_processes: int, env: Environment, note_pid: NotePid) -> None:
        for tries_left in reversed(range(TRIES)):
            self.address = f"{LOOPBACK}:{free_port()}"
            try:
                super().__init__(
                    [
                        sys.executable,
                        coordination_service.__file__,
                        self.address,
                        str(num_processes),
                    ],
                    env,
                )
                break
            except ClusterError:  # another was quicker to take the port
                if not tries_left:
                    raise
        note_pid("service", 0, self.pid)


class KeeperProcesses:
    """A keeper for each host, of up to so many bytes."""

    def __init__(self, env: Environment, note_pid: NotePid, num_bytes: int = LIMIT) -> None:
        self._env, self._note_pid, self._bytes = env, note_pid, num_bytes
        self._keepers: dict[int, _Beside] = {}

    def have(self, hosts: Iterable[int]) -> None:
        """See that each of these hosts has one: a new one knows nothing."""
        for host in hosts:
            if host in self._keepers and not self._keepers[host].has_ended:
                continue
            if host in self._keepers:
                self._keepers[host].close()
            self._keepers[host] = _Beside(keeper_command(self._bytes), self._env)
            self._note_pid("keeper", host, self._keepers[host].pid)

    @property
    def addresses(self) -> str:
        """Where they are, as ``0=127.0.0.1:2000,1=...``."""
        return ",".join(f"{host}={each.line}" for host, each in sorted(self._keepers.items()))

    def close(self) -> None:
        """End all of them."""
        for each in self._keepers.values():
            each.close()
