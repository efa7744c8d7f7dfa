"""A real Ray cluster over hosts of one machine: its head on the hub, a node on each host.

It needs root, and the package ray.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from examples.soak.cluster_faults import KINDS, command_line, send
from examples.soak.hosts import HUB, Hosts

RECIPES = Path(__file__).parent.parent / "cluster" / "ray"
PORT = 6379
NOT_HERE = ("head", "requeue")  # without a store of its own, Ray does not survive its head
FILES = tempfile.gettempdir() + "/ray"  # Ray writes to it on every host
START_SECONDS, UP = 180.0, "Ray runtime started"
AGENT_PORTS = (  # otherwise a daemon ends if its agents take 15 s to start
    "--dashboard-agent-grpc-port=29001",
    "--dashboard-agent-listen-port=29002",
    "--metrics-export-port=29003",
    "--runtime-env-agent-port=29004",
)
SETTINGS = {  # a node is lost after 15 s; by default after half a minute or more
    "RAY_health_check_period_ms": "3000",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_raylet_start_wait_time_s": "150",  # on a busy machine
    "RAY_enable_worker_prestart": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class Ray:
    """The daemons of Ray over hosts, inside a ``with`` block. It can start one run at a time."""

    kinds: tuple[str, ...] = tuple(kind for kind in KINDS if kind not in NOT_HERE)
    daemons: tuple[str, ...] = (
        "ray start",
        "raylet",
        "gcs_server",
        "ray::",
        "ray/_private",
        "ray/dashboard",
    )

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder.resolve()
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._logs: list[Path] = []
        self._driver: subprocess.Popen[bytes] | None = None
        self._run: tuple[Path, Sequence[str], str] | None = None
        self._env: dict[str, str] = {}

    @staticmethod
    def missing_programs() -> list[str]:
        """Return what is not installed."""
        return [] if importlib.util.find_spec("ray") else ["the package ray"]

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def _stop(self) -> None:
        for host in (HUB, *range(self.hosts.number)):
            self.hosts.kill_all(host)
        for daemon in self._daemons:
            daemon.wait()
        self._daemons, self._logs = [], []

    def start(
        self,
        run_dir: Path,
        command: Sequence[str],
        env: Mapping[str, str],
        recipe: str = "driver.py",
    ) -> None:
        """Start a new cluster, and on it a run by a recipe of `examples/cluster/ray`."""
        self._stop()
        Path(FILES).mkdir(exist_ok=True)
        self._env = {**os.environ, **env, **SETTINGS}
        head = ("--head", f"--port={PORT}", "--num-cpus=1", "--include-dashboard=false")
        _wait_until_up([self._start(HUB, *head)])
        for host in range(self.hosts.number):
            self.repair(host)
        _wait_until_up(self._logs)
        self._run = (run_dir, command, recipe)
        self._start_driver()

    def _start_driver(self) -> None:
        assert self._run is not None
        run_dir, command, recipe = self._run
        words = [sys.executable, str(RECIPES / recipe), "--hosts", str(self.hosts.number)]
        words += ["--run-dir", str(run_dir), "--", *command]
        with open(run_dir.parent / "log", "ab") as log:
            env = {**self._env, "RAY_ADDRESS": f"{self.hosts.address(HUB)}:{PORT}"}
            words = self._command(HUB, *words)
            self._driver = subprocess.Popen(words, env=env, stdout=log, stderr=log)

    def poll(self) -> int | None:
        """Return the exit status of the run, None while it goes on."""
        time.sleep(0.1)
        assert self._driver is not None
        status = self._driver.poll()
        if status == 128 + signal.SIGTERM:  # all nodes were shut down: as an operator would
            self._start_driver()
            return None
        return status

    def end(self) -> None:
        """End the driver."""
        assert self._driver is not None
        if self._driver.poll() is None:
            self._driver.terminate()
            time.sleep(2)
            self._driver.kill()
        self._driver.wait()

    def perform(self, kind: str, host: int) -> None:
        """Kill the daemon of a host."""
        pids = (p for p in self.hosts.running(host) if "raylet/raylet" in command_line(p)[0])
        send(pids, signal.SIGKILL)

    def repair(self, host: int) -> None:
        """Start the daemon of a host."""
        self._start(host, f"--address={self.hosts.address(HUB)}:{PORT}", "--num-cpus=2")

    def wait_until_ready(self) -> None:
        """Return at once: every run has a new cluster."""

    def _command(self, host: int | str, *command: str) -> list[str]:
        """Return a command line for a host, where Ray has a folder of its own."""
        own = self.folder / f"files-{host}"
        own.mkdir(exist_ok=True)
        script = f'mount --bind {shlex.quote(str(own))} "$0"; exec "$@"'
        return self.hosts.command(host, "sh", "-c", script, FILES, *command)

    def _start(self, host: int | str, *options: str) -> Path:
        """Start the daemon of a host; return its log."""
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        words += [f"--node-ip-address={self.hosts.address(host)}", *options]
        words += ["--object-store-memory=100000000", *AGENT_PORTS]
        file = self.folder / f"daemon-{len(self._logs)}.log"
        self._logs.append(file)
        with open(file, "wb") as log:
            command = self._command(host, *words)
            daemon = subprocess.Popen(command, env=self._env, stdout=log, stderr=log)
        self._daemons.append(daemon)
        return file


def _wait_until_up(logs: Sequence[Path]) -> None:
    until = time.monotonic() + START_SECONDS
    for log in logs:
        while UP not in log.read_text(errors="replace"):
            if time.monotonic() > until:
                raise TimeoutError(f"a daemon of Ray is not up: see {log}")
            time.sleep(0.5)
