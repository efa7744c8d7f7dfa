"""Board: where processes put up notes for each other, on JAX's coordination service.

A note has a key and is put up once. Nobody is asked twice for the same thing, so a board counts how
often each name was used: all processes use them in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax

_ROOT = "ftmesh"


class Board:
    """The notes of one pod; `client` is JAX's, of its coordination service."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._used: Counter[str] = Counter()

    def turn(self, name: str) -> str:
        """The key of the next use of a name."""
        self._used[name] += 1
        return f"{_ROOT}/{name}/{self._used[name]}"

    def put(self, key: str, note: bytes) -> bool:
        """Put up a note; False where one is there already, which stays."""
        try:
            self._client.key_value_set_bytes(key, note)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" in str(error):
                return False
            raise
        return True

    def get(self, key: str, limit: float) -> bytes | None:
        """A note, waiting for it so many seconds at most; None where it does not come."""
        try:
            found: bytes = self._client.blocking_key_value_get_bytes(key, _milliseconds(limit))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise
        return found

    def look(self, key: str) -> bytes | None:
        """A note, if it is there now."""
        try:
            found: bytes = self._client.key_value_try_get_bytes(key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise
        return found

    def of_processes(self, key: str) -> dict[int, bytes]:
        """The notes that processes have put up under ``key/NUMBER``."""
        notes = self._client.key_value_dir_get_bytes(key)
        return {int(name.rpartition("/")[2]): bytes(note) for name, note in notes}

    def meet(self, key: str, processes: Iterable[int], limit: float) -> bool:
        """Wait until all of these are here; whether they came within so many seconds."""
        try:
            self._client.wait_at_barrier(key, _milliseconds(limit), list(processes))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return False
            raise
        return True


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
