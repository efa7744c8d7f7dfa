"""The environment variables of a pod's processes, and which block of the mesh each host has."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ftmesh.elastic.rpc import LOOPBACK, free_port
from ftmesh.errors import ArgumentError
from ftmesh.topology.notation import Block, format_shape, parse_shape

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

Environment = Mapping[str, str]


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
    flags: str = "",
) -> list[dict[str, str]]:
    """Return the environment of each process of a pod, with `env` and the XLA flags `flags`."""
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
    shared = {k: v for k, v in os.environ.items() if not k.startswith(CLUSTER_VARIABLES)}
    flags = f"{shared.get('XLA_FLAGS', '')} {flags}"
    shared |= _pod_variables(hosts, devices_per_host, flags) | _proxy_variables(shared)
    if mesh is not None:
        shared["FTMESH_MESH"] = mesh
    return [{**shared, "FTMESH_PROCESS_ID": str(i), **own} for i, own in enumerate(added)]


def _pod_variables(hosts: int, devices_per_host: int, flags: str) -> dict[str, str]:
    coordinator = f"{LOOPBACK}:{free_port()}"
    return {
        "FTMESH_COORDINATOR": coordinator,
        "FTMESH_NUM_PROCESSES": str(hosts),
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_COORDINATOR_BIND_ADDRESS": coordinator,  # by default JAX listens on all interfaces
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": _with_devices(flags, devices_per_host),
        "TPU_SKIP_MDS_QUERY": "1",  # on a TPU host JAX would ask a server which host it is
        "PYTHONUNBUFFERED": "1",
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
        grid = [size // part for size, part in zip(shape, block, strict=False)]
        fits = len(block) == len(shape) and not any(
            s % p for s, p in zip(shape, block, strict=True)
        )
        if not fits or math.prod(grid) != hosts or math.prod(block) != devices_per_host:
            raise ArgumentError(
                f"{hosts} hosts of {format_shape(block)}, each with {devices_per_host} devices, do "
                f"not fill mesh {mesh}: give another --host-shape, such as 2x2"
            )
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
