"""What every process of an emulated pod finds in its environment.

Place: what the mesh of a pod is, and which part of it each host has.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ftmesh.errors import ArgumentError
from ftmesh.topology.notation import Block, format_shape, parse_shape

LOOPBACK = "127.0.0.1"
PORTS = range(20_000, 30_000)  # below those that systems hand out by themselves
DEVICES = "--xla_force_host_platform_device_count"
MAX_HOSTS, MAX_DEVICES = 256, 4096

# The machine may be a host of a real cluster, and JAX would take the processes for that cluster's.
CLUSTERS = (
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
    "JAX_NUM_CPU_DEVICES",  # would win over the flag
)

Environment = Mapping[str, str]


def check_pod(hosts: int, devices_per_host: int) -> None:
    """Refuse what is no pod, and one that no machine could emulate."""
    if hosts < 1 or devices_per_host < 1:
        raise ArgumentError(
            f"{hosts} hosts of {devices_per_host} devices make no pod: both must be 1 or more"
        )
    if hosts > MAX_HOSTS or hosts * devices_per_host > MAX_DEVICES:
        raise ArgumentError(
            f"{hosts} hosts of {devices_per_host} devices are too many for one machine: each host "
            f"is a process, and there may be {MAX_HOSTS}, with {MAX_DEVICES:,} devices in all"
        )


def environments(
    hosts: int,
    devices_per_host: int,
    *,
    mesh: str | None = None,
    env: Environment | Sequence[Environment] | None = None,
    flags: str = "",
) -> list[dict[str, str]]:
    """The environment of each process: this one's, less clusters, with the pod's, then `env`.

    `env` is for all processes, or one for each; `flags` are more of XLA's.
    """
    check_pod(hosts, devices_per_host)
    devices = hosts * devices_per_host
    if mesh is not None and math.prod(parse_shape(mesh)) != devices:
        raise ArgumentError(
            f"mesh {mesh} has {math.prod(parse_shape(mesh))} chips, and {hosts} hosts of "
            f"{devices_per_host} devices have {devices}: the two must be equal"
        )
    own = [env or {}] * hosts if env is None or isinstance(env, Mapping) else list(env)
    if len(own) != hosts:
        raise ArgumentError(f"{len(own)} environments for {hosts} hosts: give one for each")
    shared = _without_clusters(os.environ)
    flags = f"{shared.get('XLA_FLAGS', '')} {flags}"
    shared |= _pod(hosts, devices_per_host, flags) | _past_proxies(shared)
    if mesh is not None:
        shared["FTMESH_MESH"] = mesh
    return [{**shared, "FTMESH_PROCESS_ID": str(number), **its} for number, its in enumerate(own)]


def free_port() -> int:
    """A port of loopback that nothing uses, and that no outgoing connection will be given."""
    for _ in range(1000):
        port = PORTS[secrets.randbelow(len(PORTS))]
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise ArgumentError(f"no port of {PORTS[0]} to {PORTS[-1]} is free at {LOOPBACK}: end a server")


def _pod(hosts: int, devices_per_host: int, flags: str) -> dict[str, str]:
    """What makes processes a pod, the same for all."""
    coordinator = f"{LOOPBACK}:{free_port()}"
    return {
        "FTMESH_COORDINATOR": coordinator,
        "FTMESH_NUM_PROCESSES": str(hosts),
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_COORDINATOR_BIND_ADDRESS": coordinator,  # JAX listens on every interface otherwise
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": _with_devices(flags, devices_per_host),
        "TPU_SKIP_MDS_QUERY": "1",  # at a TPU host JAX would ask a server which host it is
        "PYTHONUNBUFFERED": "1",
    }


def _without_clusters(env: Environment) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(CLUSTERS)}


def _past_proxies(env: Environment) -> dict[str, str]:
    """Proxies stay, for data from afar; loopback goes past them, or JAX would wait in vain."""
    if not any("_proxy" in name.lower() for name in env):
        return {}
    spared = ",".join(filter(None, [env.get("no_proxy") or env.get("NO_PROXY"), LOOPBACK]))
    return {"no_proxy": spared, "NO_PROXY": spared}


def _with_devices(flags: str, devices: int) -> str:
    """XLA's flags with so many CPU devices."""
    if flags.strip() and not flags.lstrip().startswith("-"):
        raise ArgumentError(f"XLA_FLAGS names a file, {flags}: put the flags themselves there")
    others = [flag for flag in flags.split() if not flag.startswith(f"{DEVICES}=")]
    return " ".join([*others, f"{DEVICES}={devices}"])


@dataclass(frozen=True)
class Place:
    """What the mesh is, and which part of it each host has."""

    mesh: str
    blocks: tuple[Block, ...]

    @staticmethod
    def of(mesh: str, host_shape: str | None, hosts: int, devices_per_host: int) -> Place:
        """Hosts one after another, x first, each with a block of `host_shape`; else of rows."""
        shape = parse_shape(mesh)
        check_pod(hosts, devices_per_host)
        if host_shape is None:
            host = _rows(shape, devices_per_host)
        else:
            host = parse_shape(host_shape)
            host += (1,) * (len(shape) - len(host))
        number, each = 1, 1
        for size, part in zip(shape, host, strict=False):
            number, each = number * (size // part), each * part
            if size % part:
                number = 0
        if len(host) != len(shape) or number != hosts or each != devices_per_host:
            raise ArgumentError(
                f"{hosts} hosts of {format_shape(host)}, each with {devices_per_host} devices, do "
                f"not fill mesh {mesh}: give another --host-shape, such as 2x2"
            )
        grid = [size // part for size, part in zip(shape, host, strict=True)]
        blocks = []
        for index in range(hosts):
            low = []
            for count, part in zip(grid, host, strict=True):
                index, place = divmod(index, count)
                low.append(place * part)
            blocks.append(Block(host, tuple(low)))
        return Place(format_shape(shape), tuple(blocks))


def _rows(shape: Sequence[int], devices: int) -> tuple[int, ...]:
    """The block that so many devices fill, row by row, if there is one."""
    block = []
    for size in shape:
        part = min(size, devices)
        block.append(part)
        devices = -(-devices // part)
    return tuple(block)
