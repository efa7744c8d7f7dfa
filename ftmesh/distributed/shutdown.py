"""Ending: processes leave together, or learn within seconds why one of them does not go on.

A process that waits for a chip cannot be woken. So a thread in each looks for the note of one that
has failed, says its reason, and ends its own process; the same thread hears a signal that the main
thread is too busy for. Whoever takes the lock ends the process, whatever comes. One that has failed
goes when the others have read why; process 0 has the coordination service, and goes last.
"""

from __future__ import annotations

import _thread
import atexit
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

from ftmesh.errors import FtmeshError

INTERVAL = 0.5  # seconds between two looks at the board
PATIENCE = 2.0  # seconds for the board to answer
GRACE = 10.0  # seconds for the others to read why, and for what must be finished here
_ABORT, _READ, _LEFT, _END = (f"ftmesh/{name}" for name in ("abort", "read", "left", "end"))
_SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "told to end"}


class Ending:
    """How one process of several ends. `say` gets the line that tells why, if it is not well."""

    def __init__(
        self,
        board: Any,
        process: int,
        num_processes: int,
        *,
        say: Callable[[str], None],
        shutdown: Callable[[], None],
    ) -> None:
        self._board, self._process, self._num_processes = board, process, num_processes
        self._say_aloud, self._shutdown = say, shutdown
        self._finish: list[Callable[[], Any]] = []
        self._leaving = threading.Lock()  # held by the thread that ends the process
        self._over = threading.Event()
        self._holds_main = False
        self._old_signals: dict[int, Any] = {}
        self._wake, self._woken = socket.socketpair()
        self._watcher = threading.Thread(target=self._watch, name="ftmesh ending", daemon=True)

    def start(self) -> Ending:
        """Begin to watch; in the main thread, signals as well, unless they are ignored."""
        if threading.current_thread() is threading.main_thread():
            self._wake.setblocking(False)
            signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
            for number in _SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._old_signals[number] = signal.signal(number, self._interrupt)
        atexit.register(self._at_exit)
        self._watcher.start()
        return self

    def before_leaving(self, finish: Callable[[], Any]) -> None:
        """Have this done before the process ends early: something that others count on."""
        self._finish.append(finish)

    # Well -------------------------------------------------------------------------------------

    def leave(self) -> None:
        """All is done here: wait until it is everywhere, and let JAX's service go.

        That may take as long as the run. Whoever fails meanwhile is heard of.
        """
        self._board.put(f"{_END}/{self._process}", b"")
        while len(self._board.of_processes(_END)) < self._num_processes:
            time.sleep(INTERVAL)
        self._let_go()
        self._shutdown()

    def _let_go(self) -> None:
        """Watch no more, and leave signals as they were."""
        self._take_over()
        self._over.set()
        atexit.unregister(self._at_exit)
        if self._old_signals:
            signal.set_wakeup_fd(-1)
            for number, handler in self._old_signals.items():
                signal.signal(number, handler)
        self._watcher.join(GRACE)

    # Not well ---------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> NoReturn:
        """End all processes because of an error in this one, which is said here as well.

        Where another has failed before, what this one met with may come of that; so that is said.
        """
        self._take_over()
        note = self._looked()
        if note is not None:
            self._follow(note)
        reason, status = _described(error)
        if not isinstance(error, (FtmeshError, KeyboardInterrupt, SystemExit)):
            with contextlib.suppress(Exception):
                traceback.print_exception(error)
        self._say(reason)
        self._lead(reason, status)

    def abort(self, reason: str, status: int) -> NoReturn:
        """End all processes; the others say the reason."""
        self._take_over()
        self._lead(reason, status)

    def _take_over(self) -> None:
        """End the process from here on; where another thread does so already, wait for that."""
        if not self._leaving.acquire(blocking=False):
            threading.Event().wait()

    def _lead(self, reason: str, status: int) -> NoReturn:
        """Tell the others why, and go when they have read it."""
        note = {"process": self._process, "reason": reason, "status": status}
        self._exit(status, note)

    def _follow(self, note: Any) -> NoReturn:
        """Go because another does, and after it."""
        self._say(f"process {note['process']}: {note['reason']}")
        self._exit(note["status"], note)

    def _exit(self, status: int, note: Any) -> NoReturn:
        """End at once: the main thread may wait for a chip, and an orderly end would, too."""
        try:
            within(PATIENCE, lambda: self._board.put(_ABORT, json.dumps(note).encode()))
            within(GRACE, self._finish_all)
            within(2 * GRACE, lambda: self._go(note["process"]))
            self._flush()
        finally:
            os._exit(status)

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()

    def _go(self, leader: int) -> None:
        """Wait for those who must read or go before: the leader, and all before process 0."""
        self._board.put(f"{_READ}/{self._process}", b"")
        everyone = set(range(self._num_processes))
        if self._process == leader:
            self._wait_for(_READ, everyone)
        elif leader != 0:
            self._wait_for(_LEFT, {leader})
        if self._process == 0:
            self._wait_for(_LEFT, everyone - {0})
            time.sleep(INTERVAL)  # what follows that note is quick, and not done yet
        else:
            self._board.put(f"{_LEFT}/{self._process}", b"")

    def _wait_for(self, notes: str, processes: set[int]) -> None:
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and processes - set(self._board.of_processes(notes)):
            time.sleep(INTERVAL / 10)

    def _finish_all(self) -> None:
        for finish in self._finish:
            try:
                finish()
            except Exception as error:
                self._say(" ".join(str(error).split()))

    def _say(self, line: str) -> None:
        with contextlib.suppress(Exception):  # of a terminal that is gone, or a disk that is full
            self._say_aloud(line)

    # The watcher, and signals -----------------------------------------------------------------

    def _watch(self) -> None:
        self._woken.settimeout(INTERVAL)
        while not self._over.is_set():
            number = self._signal()
            if number is not None:
                self._over.wait(INTERVAL)  # for the main thread to come to it by itself
                if self._leaving.acquire(blocking=False):
                    self._hold_main()
                    self._say(_SIGNALS[number])
                    self._lead(_SIGNALS[number], 128 + number)
            note = self._looked()
            if note is not None and self._leaving.acquire(blocking=False):
                self._hold_main()
                self._follow(note)

    def _signal(self) -> signal.Signals | None:
        try:
            found = self._woken.recv(1)
        except TimeoutError:
            return None
        return next((number for number in _SIGNALS if found and number == found[0]), None)

    def _looked(self) -> Any:
        """The note of one that has failed; None also of a service that does not answer."""
        note = within(PATIENCE, lambda: self._board.look(_ABORT))
        return None if note is None else json.loads(note)

    def _hold_main(self) -> None:
        """Have the main thread do no more, as soon as it comes back from where it is."""
        if self._old_signals:
            self._holds_main = True
            _thread.interrupt_main()

    def _interrupt(self, number: int, _: Any) -> None:
        if self._holds_main:
            self._holds_main = False
            threading.Event().wait()
        if self._leaving.locked():  # the second: at once
            os._exit(128 + number)
        raise KeyboardInterrupt(signal.Signals(number))

    def _at_exit(self) -> None:
        """The interpreter ends, and nobody has left or failed: outside of `with`, then."""
        if not self._over.is_set():
            error = getattr(sys, "last_value", None)
            self._take_over()
            reason, status = ("has left before the end", 1) if error is None else _described(error)
            self._lead(reason, status)


def _described(error: BaseException) -> tuple[str, int]:
    """What to tell the others of an error, and with which status to end."""
    if isinstance(error, SystemExit):
        if isinstance(error.code, int) or error.code is None:
            return f"has left before the end, with status {error.code or 0}", error.code or 1
        return str(error.code), 1
    if isinstance(error, KeyboardInterrupt):
        number = error.args[0] if error.args else signal.SIGINT
        return _SIGNALS.get(number, "interrupted"), 128 + int(number)
    words = " ".join(str(error).split())
    if isinstance(error, FtmeshError):
        return words, error.status
    return f"{type(error).__name__}: {words}", 1


def within(seconds: float, do: Callable[[], Any]) -> Any:
    """What `do` gives, if it does in time; None where it fails, or goes on elsewhere."""
    found: list[Any] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            found.append(do())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
