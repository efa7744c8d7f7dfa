"""Files that stay open, for many threads to read at any place."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Lock
from weakref import finalize


class OpenFile:
    """A file that is open until no one holds it any longer; any number of threads may read it."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        finalize(self, os.close, self._handle)
        self._lock = Lock()

    def read(self, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`, or fewer where the file ends before."""
        parts = []
        while start < end and (part := self._read_some(start, end - start)):
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_some(self, start: int, size: int) -> bytes:
        if hasattr(os, "pread"):
            return os.pread(self._handle, size, start)
        with self._lock:  # elsewhere a file has one place at a time
            os.lseek(self._handle, start, os.SEEK_SET)
            return os.read(self._handle, size)


def most_open() -> int:
    """How many files to have open at most: a part of what the system allows."""
    try:
        import resource
    except ImportError:
        return 128
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if allowed < 0 else max(16, min(4096, allowed // 8))
