"""Checks that a task fits in the memory of this process or of a device."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

from ftmesh.errors import ArgumentError
from ftmesh.units import format_bytes

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Return the bytes that this process may still use, or None if that is unknown."""
    available = _read_field(_MEMINFO, "MemAvailable:")
    limits = [available and available * 1024, _cgroup_memory(), _address_space()]
    return min((limit for limit in limits if limit is not None), default=None)


def check_memory(task: str, num_bytes: float, advice: str) -> None:
    """Raise ArgumentError, which ends with `advice`, if `task` needs more memory than is free."""
    free = free_memory()
    if free is not None and num_bytes > free:
        raise ArgumentError(
            f"{task} would take about {format_bytes(num_bytes)} of memory, and "
            f"{format_bytes(free)} are free: {advice}"
        )


def check_device_memory(device: Any, task: str, num_bytes: float, advice: str) -> None:
    """Raise ArgumentError if `task` needs more of a JAX device's memory than is free.

    Devices that do not say how much they have, such as CPUs, are taken to have enough.
    """
    stats = device.memory_stats() or {}
    free = stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0)
    if num_bytes > free:
        raise ArgumentError(
            f"{task} would take about {format_bytes(num_bytes)} of the memory of {device}, and "
            f"{format_bytes(free)} are free: {advice}"
        )


def _read_field(file: Path, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in file.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return None


def _cgroup_memory() -> int | None:
    """What is left of a container's limit."""
    with contextlib.suppress(OSError, ValueError):
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            used = int((_CGROUP / "memory.current").read_text())
            reclaimable = _read_field(_CGROUP / "memory.stat", "inactive_file ") or 0
            return max(0, int(limit) - used + reclaimable)
    return None


def _address_space() -> int | None:
    """What ``ulimit -v`` leaves."""
    with contextlib.suppress(ImportError, OSError, ValueError, IndexError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit >= 0 and limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            return max(0, limit - pages * resource.getpagesize())
    return None
