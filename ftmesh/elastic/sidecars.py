"""Processes next to the workers: JAX's coordination service, and a peer store for each host.

They exit when their stdin closes, however this process ends.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable

from ftmesh.elastic import coordination_service
from ftmesh.elastic.peer_store import store_command
from ftmesh.elastic.pod_environment import Environment
from ftmesh.elastic.rpc import LOOPBACK, free_port
from ftmesh.errors import ClusterError

PORT_ATTEMPTS = 5  # to find a port for the service
EXIT_SECONDS = 1.0  # before it is killed

RecordPid = Callable[[str, int, int], None]  # kind, host, pid


class Sidecar:
    """A process that prints a line when it is up."""

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
        self.first_line = self._popen.stdout.readline().strip()
        if not self.first_line:
            self.close()
            raise ClusterError(f"{command[1]} exited before it was up")
        self.pid = self._popen.pid

    @property
    def has_exited(self) -> bool:
        """True once the process has exited."""
        return self._popen.poll() is not None

    def close(self) -> None:
        """End the process."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        with contextlib.suppress(OSError):
            self._popen.stdin.close()
        try:
            self._popen.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._popen.stdout.close()


class CoordinationService(Sidecar):
    """JAX's coordination service for `num_processes` workers."""

    def __init__(self, num_processes: int, env: Environment, record_pid: RecordPid) -> None:
        for attempts_left in reversed(range(PORT_ATTEMPTS)):
            self.address = f"{LOOPBACK}:{free_port()}"
            program = coordination_service.__file__
            try:
                super().__init__([sys.executable, program, self.address, str(num_processes)], env)
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
        return ",".join(
            f"{host}={store.first_line}" for host, store in sorted(self._stores.items())
        )

    def close(self) -> None:
        """End all stores."""
        for store in self._stores.values():
            store.close()
