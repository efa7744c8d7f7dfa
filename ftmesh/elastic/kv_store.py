"""Notes that processes put up for each other, and places where they meet."""

from __future__ import annotations

from typing import Any

Reply = tuple[int, dict[str, Any], bytes]  # to whom, what, and a note


class Notes:
    """The notes of one epoch. A note has a key, and is put up once."""

    def __init__(self) -> None:
        self._notes: dict[str, bytes] = {}
        self._waiting: dict[str, list[tuple[int, int]]] = {}  # key -> process, number of its call
        self._turns: dict[str, int] = {}  # the latest of each name
        self._met: dict[str, dict[int, int]] = {}  # key -> process -> number of its call

    def asked(self, process: int, message: dict[str, Any], data: bytes) -> list[Reply]:
        """What to reply to whom, when a process calls; perhaps nothing yet."""
        call, do, key = int(message["call"]), str(message["do"]), str(message["key"])
        if do == "put":
            return self._put(process, call, key, data)
        if do == "get" and key not in self._notes:
            self._waiting.setdefault(key, []).append((process, call))
            return []
        if do in ("get", "look"):
            note = self._notes.get(key)
            return [(process, {"reply": call, "found": note is not None}, note or b"")]
        if do == "of":
            prefix = f"{key}/"
            found = {k: note for k, note in self._notes.items() if k.startswith(prefix)}
            sizes = {k.removeprefix(prefix): len(note) for k, note in found.items()}
            return [(process, {"reply": call, "sizes": sizes}, b"".join(found.values()))]
        if do == "meet":
            here = self._met.setdefault(key, {})
            here[process] = call
            if not here.keys() >= set(map(int, message["who"])):
                return []
            return [(who, {"reply": number}, b"") for who, number in self._met.pop(key).items()]
        raise ValueError(do)

    def _drop_before(self, key: str) -> None:
        """Drop the notes of the turn before the last of the same name: all have read them.

        Keys are ``NAME/TURN/PROCESS``, and nobody begins a turn before all have come to the last.
        """
        name, _, turn = key.rpartition("/")[0].rpartition("/")
        if turn.isdecimal() and int(turn) > self._turns.get(name, 0):
            self._turns[name] = int(turn)
            old = f"{name}/{int(turn) - 2}/"
            for each in [each for each in self._notes if each.startswith(old)]:
                del self._notes[each]

    def _put(self, process: int, call: int, key: str, note: bytes) -> list[Reply]:
        self._drop_before(key)
        is_new = key not in self._notes
        replies: list[Reply] = [(process, {"reply": call, "is_new": is_new}, b"")]
        if is_new:
            self._notes[key] = note
            for who, number in self._waiting.pop(key, []):
                replies.append((who, {"reply": number, "found": True}, note))
        return replies
