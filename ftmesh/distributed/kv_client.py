"""Key-value client: processes exchange small values through JAX's coordination service."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax


class KvClient:
    """A process's access to the key-value store of its group, by JAX's client of its service.

    A key is written once. Keys carry a counter per name, so all processes must use names in the
    same order.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._used: Counter[str] = Counter()

    def next_key(self, name: str) -> str:
        """Return a fresh key for the next use of `name`."""
        self._used[name] += 1
        return f"ftmesh/{name}/{self._used[name]}"

    def put(self, key: str, value: bytes) -> bool:
        """Write an entry. Returns False, and keeps the old value, if the key exists."""
        with _Suppress("ALREADY_EXISTS"):
            self._client.key_value_set_bytes(key, value)
            return True
        return False

    def get(self, key: str, timeout: float) -> bytes | None:
        """Wait up to `timeout` seconds for an entry. Returns None if it does not appear."""
        with _Suppress("DEADLINE_EXCEEDED"):
            return bytes(self._client.blocking_key_value_get_bytes(key, _milliseconds(timeout)))
        return None

    def try_get(self, key: str) -> bytes | None:
        """Return an entry, or None if it is not there yet."""
        with _Suppress("NOT_FOUND"):
            return bytes(self._client.key_value_try_get_bytes(key))
        return None

    def get_by_process(self, key: str) -> dict[int, bytes]:
        """Return the entries that processes have written as ``key/PROCESS``."""
        entries = self._client.key_value_dir_get_bytes(key)
        return {int(name.rpartition("/")[2]): bytes(value) for name, value in entries}

    def barrier(self, key: str, processes: Iterable[int], timeout: float) -> bool:
        """Wait for all of `processes`. Returns False if they do not arrive within `timeout`."""
        with _Suppress("DEADLINE_EXCEEDED"):
            self._client.wait_at_barrier(key, _milliseconds(timeout), list(processes))
            return True
        return False


@dataclass(frozen=True)
class _Suppress:
    """Suppresses an error of JAX's service with this status."""

    status: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return isinstance(error, jax.errors.JaxRuntimeError) and self.status in str(error)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
