"""Key-value client: processes exchange small values through JAX's coordination service."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax

_ROOT = "ftmesh"


class KvClient:
    """A process's access to the key-value store of its group.

    A key is written once. Keys carry a counter per name, so all processes must use names in the
    same order.

    Args:
        client: JAX's client of the coordination service.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._used: Counter[str] = Counter()

    def next_key(self, name: str) -> str:
        """Return a fresh key for the next use of `name`."""
        self._used[name] += 1
        return f"{_ROOT}/{name}/{self._used[name]}"

    def put(self, key: str, value: bytes) -> bool:
        """Write an entry. Returns False, and keeps the old value, if the key exists."""
        try:
            self._client.key_value_set_bytes(key, value)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" in str(error):
                return False
            raise
        return True

    def get(self, key: str, timeout: float) -> bytes | None:
        """Wait up to `timeout` seconds for an entry. Returns None if it does not appear."""
        try:
            value: bytes = self._client.blocking_key_value_get_bytes(key, _milliseconds(timeout))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise
        return value

    def try_get(self, key: str) -> bytes | None:
        """Return an entry, or None if it is not there yet."""
        try:
            value: bytes = self._client.key_value_try_get_bytes(key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise
        return value

    def get_by_process(self, key: str) -> dict[int, bytes]:
        """Return the entries that processes have written as ``key/PROCESS``."""
        entries = self._client.key_value_dir_get_bytes(key)
        return {int(name.rpartition("/")[2]): bytes(value) for name, value in entries}

    def barrier(self, key: str, processes: Iterable[int], timeout: float) -> bool:
        """Wait for all of `processes`. Returns False if they do not arrive within `timeout`."""
        try:
            self._client.wait_at_barrier(key, _milliseconds(timeout), list(processes))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return False
            raise
        return True


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
