"""Room: how much memory there is for what is about to be done."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ftmesh.errors import ArgumentError
from ftmesh.units import format_bytes

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Bytes that this process may still take; None where nobody knows."""
    found = [_available(), _left_in_group(), _left_by_limit()]
    return min((each for each in found if each is not None), default=None)


def check_memory(what: str, num_bytes: float, instead: str) -> None:
    """Refuse what takes more memory than there is."""
    free = free_memory()
    if free is not None and num_bytes > free:
        raise ArgumentError(
            f"{what} would take about {format_bytes(num_bytes)} of memory, and there are "
            f"{format_bytes(free)}: {instead}"
        )


def _available() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _left_in_group() -> int | None:
    """Of what a container may take."""
    with contextlib.suppress(OSError, ValueError):
        most = (_GROUP / "memory.max").read_text().strip()
        if most != "max":
            used = int((_GROUP / "memory.current").read_text()) - _cached()
            return max(0, int(most) - used)
    return None


def _cached() -> int:
    """Of what a container has, what is a copy of files and given up when memory is wanted."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (_GROUP / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    return 0


def _left_by_limit() -> int | None:
    """Of the address space, where ``ulimit -v`` says how much."""
    with contextlib.suppress(ImportError, OSError, ValueError, IndexError):
        import resource

        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        if most >= 0 and most != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            return max(0, most - pages * resource.getpagesize())
    return None
