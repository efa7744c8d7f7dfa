"""Blobs: bytes by name in memory, whole, with their checksums, up to a limit."""

from __future__ import annotations

import re
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from ftmesh.errors import ClusterError

MOST_NAME = 200
_PLAIN = re.compile(rf"[a-z0-9./-]{{0,{MOST_NAME}}}")


class Refused(ClusterError):  # noqa: N818
    """A keeper will not do what it was asked for."""


class Blobs:
    """What a keeper holds; any thread may use it.

    `limit` is for all bytes together, those included that are on their way.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held: dict[str, tuple[bytes, int]] = {}
        self._taken = 0  # of the limit
        self._lock = threading.Lock()

    @contextmanager
    def room(self, name: str, size: int) -> Iterator[None]:
        """Room for a blob that is to come and be `put` meanwhile; given back if that fails."""
        _check_name(name)
        if not name or size < 0:
            raise Refused(f"{name!r} of {size} bytes can be no blob")
        with self._lock:
            if self._taken + size > self.limit:
                raise Refused(
                    f"{name} has {size} bytes, and {max(self.limit - self._taken, 0)} of "
                    f"{self.limit} are free: drop some, or give the keeper more"
                )
            self._taken += size
        try:
            yield
        except BaseException:
            with self._lock:
                self._taken -= size
            raise

    def put(self, name: str, data: bytes, crc32: int) -> None:
        """Hold a blob for which there is room, in place of an older one of that name."""
        if zlib.crc32(data) != crc32:
            raise Refused(f"{name} was damaged on its way")
        with self._lock:
            self._taken -= self._size(name)
            self._held[name] = data, crc32

    def get(self, name: str) -> tuple[bytes, int]:
        """A blob and its checksum, as it was when it came."""
        with self._lock:
            if name not in self._held:
                raise Refused(f"it has no {name}")
            return self._held[name]

    def names(self, prefix: str) -> list[str]:
        """Those that begin so, in order."""
        _check_name(prefix)
        with self._lock:
            return sorted(name for name in self._held if name.startswith(prefix))

    def drop(self, prefix: str) -> int:
        """Forget all that begin so; how many there were."""
        names = self.names(prefix)
        with self._lock:
            for name in names:
                self._taken -= self._size(name)
                self._held.pop(name, None)
        return len(names)

    def _size(self, name: str) -> int:
        return len(self._held[name][0]) if name in self._held else 0


def _check_name(name: str) -> None:
    if not _PLAIN.fullmatch(name) or ".." in name:
        raise Refused(
            f"{name[:MOST_NAME]!r} is no plain name: those have up to {MOST_NAME} of a-z, 0-9, "
            "'.', '/' and '-', and no '..'"
        )
