"""The processes that a launcher starts: workers, the reaper and sidecars, and what they are given.

Workers get environment variables, and each host has a block of the mesh.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftmesh.elastic import reaper
from ftmesh.elastic.rpc import LOOPBACK, free_port
from ftmesh.errors import ArgumentError, ClusterError
from ftmesh.topology.notation import Block, format_shape, parse_shape

Environment = Mapping[str, str]

RECHECK_SECONDS = 0.01  # after a kill
POLL_SECONDS = 0.05  # for changes that no file descriptor reports
PORT_ATTEMPTS = 5  # to find a port for the service
SIDECAR_EXIT_SECONDS = 1.0  # before a sidecar is killed

# The command waits for a line, so that the reaper knows of it first; without one it never runs.
_GATE = 'read -r go && exec "$@" </dev/null'

# JAX's service in a process that outlives workers, and has only jaxlib to import. The controller
# notices lost workers long before its heartbeats do.
_SERVICE = """
import sys
from jaxlib import _jax
service = _jax.get_distributed_runtime_service(
    sys.argv[1], int(sys.argv[2]), heartbeat_timeout=100, shutdown_timeout=5, recoverable=True
)
print("up", flush=True)
sys.stdin.read()
service.shutdown()
"""


class ChildProcess:
    """A command in its own session: signals sent to it reach all its processes; Ctrl-C does not."""

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
        """Kill it once its time to end is over; repeat while any of its processes is left."""
        if not self.is_gone and time.monotonic() >= self._kill_at:
            reaper.send(self.pid, signal.SIGKILL)

    def poll(self) -> bool:
        """Update `status` and `is_gone`; return True if the command has just exited."""
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
        """Return the seconds until `poll` is due, unless `exit_fd` is readable before."""
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
    """Kills the processes that it watches if this process ends first."""

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
        """Make it kill all processes that it watches, and wait for that."""
        self._stdin.close()
        self._popen.wait()

    def _send(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the reaper was killed: continue without
            self._stdin.write(line.encode())


class Sidecar:
    """A process that prints a line when it is up, and exits when its stdin closes."""

    name = "a peer store"
    exit_seconds = SIDECAR_EXIT_SECONDS

    def __init__(self, command: list[str], env: Environment, *, shows_errors: bool = False) -> None:
        self._popen = subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if shows_errors else subprocess.DEVNULL,
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
            raise ClusterError(f"{self.name} exited during start: is its port or address free?")

    @property
    def has_exited(self) -> bool:
        """True once the process has exited."""
        return self._popen.poll() is not None

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._popen.wait(self.exit_seconds)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._stdout.close()


class CoordinationService(Sidecar):
    """JAX's coordination service for `num_processes` workers."""

    name = "JAX's coordination service"

    def __init__(self, num_processes: int, env: Environment, host: str = LOOPBACK) -> None:
        for attempts_left in reversed(range(PORT_ATTEMPTS)):
            self.address = f"{host}:{free_port(host)}"
            command = [sys.executable, "-c", _SERVICE, self.address, str(num_processes)]
            try:
                super().__init__(command, env)
                break
            except ClusterError:  # another process took the port
                if not attempts_left:
                    raise


def record_pid(run_dir: Path, kind: str, host: int, pid: int) -> None:
    """Write the pid of a process to `run_dir`, for people and fault injection."""
    name = kind if kind == "service" else f"{kind}-{host}"
    record = {"kind": kind, "host": host, "pid": pid}
    with contextlib.suppress(OSError):  # a full disk must not end the run
        (run_dir / "pids" / f"{name}.json").write_text(json.dumps(record))


def _open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process exits, on Linux."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:  # a sandbox that does not allow it
        return None


# Environments and blocks of the mesh ------------------------------------------------------------

DEVICES_FLAG = "--xla_force_host_platform_device_count"
MAX_HOSTS, MAX_DEVICES = 256, 4096

# On a host of a real cluster JAX would take the processes for that cluster's.
CLUSTER_VARIABLES = (
    "SLURM_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "KUBERNETES_SERVICE_HOST",
    "TPU_",
    "MEGASCALE_",
    "JAX_COORDINATOR_PORT",
    "JAX_LOCAL_DEVICE_IDS",
    "JAX_PARTITION_INDEX",
    "JAX_SLICE_INDEX",
    "JAX_NUM_CPU_DEVICES",  # would override the flag
)


def check_pod(hosts: int, devices_per_host: int) -> None:
    """Raise ArgumentError for a pod without devices, or one too large to emulate."""
    if hosts < 1 or devices_per_host < 1:
        raise ArgumentError(
            f"a pod of {hosts} hosts with {devices_per_host} devices: both must be 1 or more"
        )
    if hosts > MAX_HOSTS or hosts * devices_per_host > MAX_DEVICES:
        raise ArgumentError(
            f"{hosts} hosts with {devices_per_host} devices are too many for one machine: each "
            f"host is a process; at most {MAX_HOSTS} hosts and {MAX_DEVICES:,} devices in all"
        )


def environments(
    hosts: int,
    devices_per_host: int,
    *,
    mesh: str | None = None,
    env: Environment | Sequence[Environment] | None = None,
) -> list[dict[str, str]]:
    """Return the environment of each process of a pod, with the variables `env`."""
    check_pod(hosts, devices_per_host)
    num_devices = hosts * devices_per_host
    if mesh is not None and math.prod(parse_shape(mesh)) != num_devices:
        raise ArgumentError(
            f"mesh {mesh} has {math.prod(parse_shape(mesh))} chips, but {hosts} hosts with "
            f"{devices_per_host} devices have {num_devices}: both must be equal"
        )
    added = [env or {}] * hosts if env is None or isinstance(env, Mapping) else list(env)
    if len(added) != hosts:
        raise ArgumentError(f"{len(added)} environments for {hosts} hosts: give one for each")
    coordinator = f"{LOOPBACK}:{free_port()}"
    shared = {
        "FTMESH_COORDINATOR": coordinator,
        "FTMESH_NUM_PROCESSES": str(hosts),
        "JAX_COORDINATOR_BIND_ADDRESS": coordinator,  # by default JAX listens on all interfaces
        **({} if mesh is None else {"FTMESH_MESH": mesh}),
    }
    return [
        emulated_environment(devices_per_host, {**shared, "FTMESH_PROCESS_ID": str(i), **own})
        for i, own in enumerate(added)
    ]


def emulated_environment(devices: int, env: Environment, flags: str = "") -> dict[str, str]:
    """Return the environment of a process with CPU devices, `env` and the XLA flags `flags`."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(CLUSTER_VARIABLES)}
    flags = f"{own.get('XLA_FLAGS', '')} {flags}"
    return {
        **own,
        **_proxy_variables(own),
        "JAX_COORDINATOR_ADDRESS": env["FTMESH_COORDINATOR"],
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": _with_devices(flags, devices),
        "TPU_SKIP_MDS_QUERY": "1",  # on a TPU host JAX would ask a server which host it is
        "PYTHONUNBUFFERED": "1",
        **env,
    }


def _proxy_variables(env: Environment) -> dict[str, str]:
    """Exclude loopback from proxies, which would make JAX wait for ever."""
    if not any("_proxy" in name.lower() for name in env):
        return {}
    excluded = ",".join(filter(None, [env.get("no_proxy") or env.get("NO_PROXY"), LOOPBACK]))
    return {"no_proxy": excluded, "NO_PROXY": excluded}


def _with_devices(flags: str, devices: int) -> str:
    if flags.strip() and not flags.lstrip().startswith("-"):
        raise ArgumentError(f"XLA_FLAGS names a file, {flags}: put the flags themselves there")
    others = [flag for flag in flags.split() if not flag.startswith(f"{DEVICES_FLAG}=")]
    return " ".join([*others, f"{DEVICES_FLAG}={devices}"])


@dataclass(frozen=True)
class HostLayout:
    """A mesh and the block of it that each host has."""

    mesh: str
    blocks: tuple[Block, ...]

    @staticmethod
    def create(mesh: str, host_shape: str | None, hosts: int, devices_per_host: int) -> HostLayout:
        """Lay hosts out one after another, x first; without `host_shape`, each has rows."""
        shape = parse_shape(mesh)
        check_pod(hosts, devices_per_host)
        if host_shape is None:
            block = _row_block(shape, devices_per_host)
        else:
            block = parse_shape(host_shape)
            block += (1,) * (len(shape) - len(block))
        if math.prod(shape) != hosts * devices_per_host:
            raise ArgumentError(
                f"{hosts} hosts of {devices_per_host} devices each do not fill mesh {mesh}, which "
                f"has {math.prod(shape)} chips"
            )
        if math.prod(block) != devices_per_host:
            if host_shape is None:
                raise ArgumentError(
                    f"{devices_per_host} devices of a host do not fill whole rows of mesh {mesh}: "
                    f"give a --host-shape of {devices_per_host} chips"
                )
            raise ArgumentError(
                f"each host has {devices_per_host} devices, and --host-shape "
                f"{format_shape(block)} is a block of {math.prod(block)}"
            )
        if len(block) != len(shape) or any(s % p for s, p in zip(shape, block, strict=True)):
            raise ArgumentError(
                f"mesh {mesh} cannot be cut into blocks of {format_shape(block)}: give a "
                f"--host-shape of {devices_per_host} chips whose sides divide those of the mesh"
            )
        grid = [size // part for size, part in zip(shape, block, strict=True)]
        blocks = []
        for index in range(hosts):
            corner = []
            for count, part in zip(grid, block, strict=True):
                index, position = divmod(index, count)
                corner.append(position * part)
            blocks.append(Block(block, tuple(corner)))
        return HostLayout(format_shape(shape), tuple(blocks))


def _row_block(shape: Sequence[int], devices: int) -> tuple[int, ...]:
    """Return the block that `devices` fill row by row, if there is one."""
    block = []
    for size in shape:
        part = min(size, devices)
        block.append(part)
        devices = -(-devices // part)
    return tuple(block)
