"""Ending: processes leave together, or learn within seconds why one of them does not go on.

A process that waits for a chip cannot be woken. So a thread in each looks for the note of one that
has failed, says its reason, and ends its own process; the same thread hears a signal that the main
thread is too busy for. Process 0 has the coordination service, and goes last.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from ftmesh.cluster.board import Board
from ftmesh.cluster.words import in_seconds, processes
from ftmesh.errors import ClusterError, FtmeshError

INTERVAL = 0.5  # seconds between two looks at the board
GRACE = 10.0  # seconds for the others to have read why, and for what must be finished here
_ABORT, _READ, _LEFT, _END = (f"ftmesh/{name}" for name in ("abort", "read", "left", "end"))
_SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "told to end"}


class Ending:
    """How one process of several ends. `say` gets the line that tells why, if it is not well."""

    def __init__(
        self,
        board: Board,
        process: int,
        num_processes: int,
        *,
        say: Callable[[str], None],
        shutdown: Callable[[], None],
    ) -> None:
        self._board, self._process, self._num_processes = board, process, num_processes
        self._say, self._shutdown = say, shutdown
        self._finish: list[Callable[[], Any]] = []
        self._leaving = threading.Lock()  # held by the thread that ends the process
        self._over = threading.Event()
        self._old_signals: dict[int, Any] = {}
        self._wake, self._woken = socket.socketpair()
        self._watcher = threading.Thread(target=self._watch, name="ftmesh ending", daemon=True)

    def start(self) -> Ending:
        """Begin to watch; in the main thread, signals as well."""
        if threading.current_thread() is threading.main_thread():
            self._wake.setblocking(False)
            signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
            for number in _SIGNALS:
                self._old_signals[number] = signal.signal(number, _interrupt)
        self._watcher.start()
        return self

    def before_leaving(self, finish: Callable[[], Any]) -> None:
        """Have this done before the process ends early: something that others count on."""
        self._finish.append(finish)

    # Well -------------------------------------------------------------------------------------

    def leave(self, limit: float) -> None:
        """All is done: wait for the others, and let JAX's service go."""
        self._board.put(_END, b"")
        self._board.put(f"{_END}/here/{self._process}", b"")
        everyone = range(self._num_processes)
        if not self._board.meet(f"{_END}/meet", everyone, limit):
            missing = set(everyone) - set(self._board.of_processes(f"{_END}/here"))
            who = processes(missing) if missing else "not all processes"
            self.fail(ClusterError(f"{who} did not come to the end within {in_seconds(limit)}"))
        self._take_over()
        self._over.set()
        if self._old_signals:
            signal.set_wakeup_fd(-1)
            for number, handler in self._old_signals.items():
                signal.signal(number, handler)
        self._watcher.join(GRACE)
        self._shutdown()

    def wait(self) -> None:
        """Until the others are done."""
        while self._board.look(_END) is None:
            time.sleep(INTERVAL)

    # Not well ---------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> NoReturn:
        """End all processes because of an error in this one, which is said here as well.

        Where another has failed before, what this one met with may come of that; so that is said.
        """
        self._take_over()
        note = self._looked()
        if note is not None:
            self._follow(note)
        if isinstance(error, SystemExit) and not error.code:
            reason, status = "has left before the end", 1
        elif isinstance(error, KeyboardInterrupt):
            number = error.args[0] if error.args else signal.SIGINT
            reason, status = _SIGNALS.get(number, "interrupted"), 128 + int(number)
        elif isinstance(error, FtmeshError):
            reason, status = " ".join(str(error).split()), 2
        else:
            traceback.print_exception(error)
            reason, status = f"{type(error).__name__}: {' '.join(str(error).split())}", 1
        self._say(reason)
        self._lead(reason, status)

    def abort(self, reason: str, status: int) -> NoReturn:
        """End all processes; the others say the reason."""
        self._take_over()
        self._lead(reason, status)

    def _take_over(self) -> None:
        """End the process from here on; where the watcher does so already, wait for that."""
        if not self._leaving.acquire(blocking=False):
            threading.Event().wait()

    def _lead(self, reason: str, status: int) -> NoReturn:
        """Tell the others why, and go when they have read it."""
        note = {"process": self._process, "reason": reason, "status": status}
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # of a service that is gone
            self._board.put(_ABORT, json.dumps(note).encode())
        self._exit(status, waits=True)

    def _follow(self, note: Any) -> NoReturn:
        """Go because another does."""
        self._say(f"process {note['process']}: {note['reason']}")
        self._exit(note["status"], waits=False)

    def _watch(self) -> None:
        self._woken.settimeout(INTERVAL)
        while not self._over.is_set():
            number = self._signal()
            if number is not None:
                self._over.wait(INTERVAL)  # for the main thread to come to it by itself
                if self._leaving.acquire(blocking=False):
                    self._say(_SIGNALS[number])
                    self._lead(_SIGNALS[number], 128 + number)
            note = self._looked()
            if note is not None and self._leaving.acquire(blocking=False):
                self._follow(note)

    def _signal(self) -> signal.Signals | None:
        try:
            found = self._woken.recv(1)
        except TimeoutError:
            return None
        return next((number for number in _SIGNALS if found and number == found[0]), None)

    def _looked(self) -> Any:
        try:
            note = self._board.look(_ABORT)
        except jax.errors.JaxRuntimeError:
            return None  # JAX ends a process that has lost the service
        return None if note is None else json.loads(note)

    def _exit(self, status: int, *, waits: bool) -> NoReturn:
        """End at once: the main thread may wait for a chip, and an orderly end would, too."""
        finishing = threading.Thread(target=self._finish_all, daemon=True)
        finishing.start()
        finishing.join(GRACE)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._board.put(f"{_READ}/{self._process}", b"")
            if waits:
                self._wait_for(_READ, self._num_processes)
            if self._process == 0:
                self._wait_for(_LEFT, self._num_processes - 1)
                time.sleep(INTERVAL)  # what follows the note is quick, and not done yet
            else:
                self._board.put(f"{_LEFT}/{self._process}", b"")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _wait_for(self, notes: str, number: int) -> None:
        deadline = time.monotonic() + GRACE
        while len(self._board.of_processes(notes)) < number and time.monotonic() < deadline:
            time.sleep(INTERVAL / 10)

    def _finish_all(self) -> None:
        for finish in self._finish:
            try:
                finish()
            except Exception as error:
                self._say(" ".join(str(error).split()))


def _interrupt(number: int, _: Any) -> None:
    raise KeyboardInterrupt(signal.Signals(number))
