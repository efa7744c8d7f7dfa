"""The key-value store by which processes exchange small values.

`KvClient` calls the one of JAX's coordination service. `KvStore` is a store of our own, without
JAX, for the controller of a run that survives failures; `ControllerKvClient` calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


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

    def drop_old(self, key: str, process: int) -> None:
        """Delete the entry of this process for the use of a name two before `key`.

        A process comes to a use once all have come to the one before it, and so have read that.
        """
        name, _, count = key.rpartition("/")
        with _Suppress("NOT_FOUND"):
            self._client.key_value_delete(f"{name}/{int(count) - 2}/{process}")

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
        import jax  # here, since the controller runs without it

        return isinstance(error, jax.errors.JaxRuntimeError) and self.status in str(error)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


Reply = tuple[int, dict[str, Any], bytes]  # process, message, data


class KvStore:
    """Entries that are written once, and barriers."""

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}
        self._waiting: dict[str, list[tuple[int, int]]] = {}  # key -> (process, call id)
        self._latest: dict[str, int] = {}  # name -> highest counter in a key
        self._at_barrier: dict[str, dict[int, int]] = {}  # key -> process -> call id

    def handle(self, process: int, message: dict[str, Any], data: bytes) -> list[Reply]:
        """Handle a call of a process; return the replies that are due, to it and to others."""
        call, operation, key = int(message["call"]), message["operation"], str(message["key"])
        if operation == "put":
            return self._put(process, call, key, data)
        if operation == "get" and key not in self._entries:
            self._waiting.setdefault(key, []).append((process, call))
            return []
        if operation in ("get", "try_get"):
            value = self._entries.get(key)
            return [(process, {"reply": call, "exists": value is not None}, value or b"")]
        if operation == "get_by_process":
            prefix = f"{key}/"
            entries = {k: value for k, value in self._entries.items() if k.startswith(prefix)}
            sizes = {k.removeprefix(prefix): len(value) for k, value in entries.items()}
            return [(process, {"reply": call, "sizes": sizes}, b"".join(entries.values()))]
        if operation == "barrier":
            arrived = self._at_barrier.setdefault(key, {})
            arrived[process] = call
            if not arrived.keys() >= set(map(int, message["processes"])):
                return []
            del self._at_barrier[key]
            return [(p, {"reply": call_id}, b"") for p, call_id in arrived.items()]
        raise ValueError(operation)

    def _put(self, process: int, call: int, key: str, value: bytes) -> list[Reply]:
        self._drop_old(key)
        is_new = key not in self._entries
        replies: list[Reply] = [(process, {"reply": call, "is_new": is_new}, b"")]
        if is_new:
            self._entries[key] = value
            for waiting, call_id in self._waiting.pop(key, []):
                replies.append((waiting, {"reply": call_id, "exists": True}, value))
        return replies

    def _drop_old(self, key: str) -> None:
        """Drop the entries of the same name that all processes have read.

        Keys are ``NAME/COUNTER/PROCESS``. A process uses counter n only after all have used n - 1,
        so nobody reads n - 2 any more.
        """
        name, _, counter = key.rpartition("/")[0].rpartition("/")
        if counter.isdecimal() and int(counter) > self._latest.get(name, 0):
            self._latest[name] = int(counter)
            prefix = f"{name}/{int(counter) - 2}/"
            for old in [k for k in self._entries if k.startswith(prefix)]:
                del self._entries[old]
