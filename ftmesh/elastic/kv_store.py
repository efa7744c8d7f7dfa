"""Key-value store of one generation, in the controller; `ControllerKvClient` calls it."""

from __future__ import annotations

from typing import Any

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
