"""On a line to the steward: the board of notes, and the end of a process that others outlive."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from ftmesh.distributed.kv_client import Board
from ftmesh.distributed.shutdown import GRACE, Ending, within
from ftmesh.elastic.controller_client import RESTARTS, Line
from ftmesh.errors import ClusterError

ANSWER = 30.0  # seconds for the steward to answer what needs no one else
LEAVE = 3600.0  # for all to be done
SHUTDOWN = 5.0  # for JAX to let go of its service
ON_RESTART = 1.5  # for what must be finished, when all are ended to be started anew


class LineBoard(Board):
    """The notes of an epoch, with the steward."""

    def __init__(self, line: Line) -> None:
        super().__init__(client=None)
        self._line = line

    def put(self, key: str, note: bytes) -> bool:
        """As `Board.put`."""
        return bool(self._answer("put", key, note)[0]["is_new"])

    def get(self, key: str, limit: float) -> bytes | None:
        """As `Board.get`."""
        found = self._line.call("get", key, limit=limit)
        return None if found is None else found[1]

    def look(self, key: str) -> bytes | None:
        """As `Board.look`."""
        message, note = self._answer("look", key)
        return note if message["found"] else None

    def of_processes(self, key: str) -> dict[int, bytes]:
        """As `Board.of_processes`."""
        message, notes = self._answer("of", key)
        found, start = {}, 0
        for name, size in message["sizes"].items():
            found[int(name)] = notes[start : start + size]
            start += size
        return found

    def meet(self, key: str, processes: Iterable[int], limit: float) -> bool:
        """As `Board.meet`."""
        return self._line.call("meet", key, limit=limit, who=sorted(processes)) is not None

    def _answer(self, do: str, key: str, note: bytes = b"") -> tuple[dict[str, Any], bytes]:
        found = self._line.call(do, key, note, limit=ANSWER)
        if found is None:
            raise TimeoutError(f"the steward did not answer within {ANSWER:g} s")
        return found


class OwnEnding(Ending):
    """How a process ends that others outlive: it tells the steward why, and nobody follows it."""

    def __init__(
        self, process: int, *, say: Callable[[str], None], shutdown: Callable[[], None]
    ) -> None:
        super().__init__(None, process, 1, say=say, shutdown=shutdown)
        self._line: Line | None = None

    def on(self, line: Line) -> OwnEnding:
        """With the line, once there is one."""
        self._line = line
        return self

    def leave(self) -> None:
        """All is done here: wait until it is everywhere."""
        assert self._line is not None
        self._line.leave(LEAVE)
        self._let_go()
        within(SHUTDOWN, self._shutdown)

    def fail(self, error: BaseException) -> NoReturn:
        """As `Ending.fail`; what others are to blame for may go well the next time."""
        if isinstance(error, ClusterError):
            self._take_over()
            self._say(str(error))
            self._lead(str(error), 1)
        super().fail(error)

    def over(self, reason: str) -> NoReturn:
        """All are ended, to be started anew or not; also from a thread."""
        self._take_over()
        within(ON_RESTART, self._finish_all)
        self._flush()
        os._exit(RESTARTS)

    def _looked(self) -> Any:
        return None

    def _exit(self, status: int, note: Any) -> NoReturn:
        try:
            if self._line is not None:
                self._line.failing(note["reason"])
            within(GRACE, self._finish_all)
            self._flush()
        finally:
            os._exit(status)


def write_stacks_to(folder: Path, name: str) -> None:
    """Have SIGUSR1 write where all threads are, whatever they do, to a file; else to stderr."""
    try:
        file = (folder / f"stacks-{name}.txt").open("w")
    except OSError:
        file = sys.stderr  # type: ignore[assignment]
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=False)
