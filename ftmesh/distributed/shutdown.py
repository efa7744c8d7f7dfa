"""Shutdown: processes exit together, within seconds after one of them fails, with its reason.

A thread that waits for a chip cannot be interrupted. So a watcher thread in each process polls the
key-value store for the entry of a process that has failed, prints its reason and ends its own
process; it also handles signals while the main thread is busy. A failed process exits once the
others have read why. Process 0 runs the coordination service and exits last.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self

from ftmesh.distributed.kv_store import KvClient
from ftmesh.distributed.peer_monitor import PeerMonitor
from ftmesh.errors import PEER_LOST, FtmeshError

POLL_SECONDS = 0.5  # between two reads of the key-value store
KV_TIMEOUT = 2.0  # for one read or write of it
GRACE_SECONDS = 10.0  # for others to read why, and for the callbacks of `before_exit`
VERDICT_SECONDS = 2.0  # after an error, for the news of a lost process
_ABORT, _READ, _LEFT, _DONE = (f"ftmesh/{name}" for name in ("abort", "read", "left", "end"))
_SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "received SIGTERM"}


class Shutdown:
    """How one process of several exits.

    `log` is called with the line that says why this process exits early, `disconnect` last in an
    orderly exit, to disconnect from JAX's service. `peers` notices lost processes.
    """

    def __init__(
        self,
        kv: KvClient | None,
        process: int,
        num_processes: int,
        *,
        log: Callable[[str], None],
        disconnect: Callable[[], None],
        peers: PeerMonitor | None = None,
    ) -> None:
        self._peers = peers
        self._shared_kv, self._process, self._num_processes = kv, process, num_processes
        self._log_line, self._disconnect = log, disconnect
        self.on_sigterm: Callable[[], None] | None = None  # called instead of an early exit
        self._callbacks: list[Callable[[], Any]] = []
        self._exit_lock = threading.Lock()  # held by the thread that ends the process
        self._stopped = threading.Event()
        self._blocks_main_thread = False
        self._old_handlers: dict[int, Any] = {}
        self._wakeup, self._woken = socket.socketpair()
        self._watcher = threading.Thread(target=self._watch, name="ftmesh shutdown", daemon=True)

    def start(self) -> Self:
        """Start the watcher. In the main thread, also handle signals that are not ignored."""
        if threading.current_thread() is threading.main_thread():
            self._wakeup.setblocking(False)
            signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
            for number in _SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._old_handlers[number] = signal.signal(number, self._on_signal)
        atexit.register(self._at_exit)
        self._watcher.start()
        if self._peers is not None:
            self._peers.on_lost = self.lose
            self._peers.expect_beats()
        return self

    def before_exit(self, callback: Callable[[], Any]) -> None:
        """Call `callback` before the process exits early."""
        self._callbacks.append(callback)

    # Orderly exit -----------------------------------------------------------------------------

    def leave(self) -> None:
        """Wait until all processes are done, then disconnect. A failure still ends this process."""
        self._kv.put(f"{_DONE}/{self._process}", b"")
        while len(self._kv.get_by_process(_DONE)) < self._num_processes:
            time.sleep(POLL_SECONDS)
        self._stop_watching()
        self._disconnect()

    def _stop_watching(self) -> None:
        self._claim_exit()
        self._stopped.set()
        if self._peers is not None:
            self._peers.stop()
        atexit.unregister(self._at_exit)
        if self._old_handlers:
            signal.set_wakeup_fd(-1)
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
        self._watcher.join(GRACE_SECONDS)

    # Early exit -------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> NoReturn:
        """End all processes because of an error in this one, and print it.

        If another process failed before, its reason is printed: this error is likely a consequence.
        """
        self._await_verdict(error)
        self._claim_exit()
        abort = self._read_abort()
        if abort is not None:
            self._follow(abort)
        reason, status = describe(error)
        if _is_foreign(error):
            with contextlib.suppress(Exception):
                traceback.print_exception(error)
        self._log(reason)
        self._lead(reason, status)

    def _await_verdict(self, error: BaseException) -> None:
        """Wait: if a collective failed since a peer was lost, the monitor exits meanwhile."""
        if self._peers is not None and _is_foreign(error):
            time.sleep(VERDICT_SECONDS)

    def abort(self, reason: str, status: int) -> NoReturn:
        """End all processes; the others print `reason`."""
        self._claim_exit()
        self._lead(reason, status)

    def lose(self, lost: frozenset[int], reason: str) -> None:
        """Exit because processes were lost; called by the peer monitor, in its thread."""
        if self._exit_lock.acquire(blocking=False):
            self._block_main_thread()
            self._log(reason)
            abort = {"process": self._process, "reason": reason, "lost": sorted(lost)}
            self._exit(PEER_LOST, {**abort, "status": PEER_LOST})

    def _claim_exit(self) -> None:
        """Become the thread that ends the process, or block if another thread is."""
        if not self._exit_lock.acquire(blocking=False):
            threading.Event().wait()

    def _lead(self, reason: str, status: int) -> NoReturn:
        """Tell the others why, and exit once they have read it."""
        self._exit(status, {"process": self._process, "reason": reason, "status": status})

    def _follow(self, abort: Any) -> NoReturn:
        leader = "" if "lost" in abort else f"process {abort['process']}: "
        self._log(f"{leader}{abort['reason']}")
        self._exit(abort["status"], abort)

    def _exit(self, status: int, abort: Any) -> NoReturn:
        """Exit without the interpreter's cleanup, which could wait for a chip for ever."""
        lost = set(abort.get("lost", ()))
        try:
            if 0 not in lost:
                entry = json.dumps(abort).encode()
                run_with_timeout(KV_TIMEOUT, lambda: self._kv.put(_ABORT, entry))
            run_with_timeout(GRACE_SECONDS, self._run_callbacks)
            if 0 not in lost:
                wait = functools.partial(self._wait_for_turn, abort["process"], lost)
                run_with_timeout(2 * GRACE_SECONDS, wait)
            self._flush()
        finally:
            os._exit(status)

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()

    def _wait_for_turn(self, leader: int, lost: set[int]) -> None:
        """Wait for those that exit first: the leader, and before process 0 everyone."""
        self._kv.put(f"{_READ}/{self._process}", b"")
        processes = set(range(self._num_processes)) - lost
        if self._process == leader:
            self._wait_for(_READ, processes)
        elif leader != 0:
            self._wait_for(_LEFT, {leader})
        if self._process == 0:
            self._wait_for(_LEFT, processes - {0})
            time.sleep(POLL_SECONDS)  # they exit right after that entry
        else:
            self._kv.put(f"{_LEFT}/{self._process}", b"")

    def _wait_for(self, key: str, processes: set[int]) -> None:
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and processes - set(self._kv.get_by_process(key)):
            time.sleep(POLL_SECONDS / 10)

    def _run_callbacks(self) -> None:
        for callback in self._callbacks:
            try:
                callback()
            except Exception as error:
                self._log(" ".join(str(error).split()))

    def _log(self, line: str) -> None:
        with contextlib.suppress(Exception):  # a closed terminal, a full disk
            self._log_line(line)

    @property
    def _kv(self) -> KvClient:
        assert self._shared_kv is not None
        return self._shared_kv

    # Watcher and signals ----------------------------------------------------------------------

    def _watch(self) -> None:
        self._woken.settimeout(POLL_SECONDS)
        while not self._stopped.is_set():
            number = self._next_signal()
            if number is not None and not self._defers(number):
                self._stopped.wait(POLL_SECONDS)  # the main thread may handle it by itself
                if self._exit_lock.acquire(blocking=False):
                    self._block_main_thread()
                    self._log(_SIGNALS[number])
                    self._lead(_SIGNALS[number], 128 + number)
            abort = self._read_abort()
            if abort is not None and self._exit_lock.acquire(blocking=False):
                self._block_main_thread()
                self._follow(abort)

    def _next_signal(self) -> signal.Signals | None:
        try:
            data = self._woken.recv(1)
        except TimeoutError:
            return None
        return next((number for number in _SIGNALS if data and number == data[0]), None)

    def _read_abort(self) -> Any:
        """Return the entry of a failed process; None if there is none, or no answer."""
        entry = run_with_timeout(KV_TIMEOUT, lambda: self._kv.try_get(_ABORT))
        return None if entry is None else json.loads(entry)

    def _block_main_thread(self) -> None:
        """Have the main thread block as soon as it runs Python code again."""
        if self._old_handlers:
            self._blocks_main_thread = True
            _thread.interrupt_main()

    def _on_signal(self, number: int, _: Any) -> None:
        if self._blocks_main_thread:
            self._blocks_main_thread = False
            threading.Event().wait()
        if self._defers(number) and self.on_sigterm is not None:
            self.on_sigterm()
            return
        if self._exit_lock.locked():  # a second signal: exit at once
            os._exit(128 + number)
        raise KeyboardInterrupt(signal.Signals(number))

    def _defers(self, number: int) -> bool:
        return number == signal.SIGTERM and self.on_sigterm is not None

    def _at_exit(self) -> None:
        """Handle an interpreter that ends outside of the group's `with` block."""
        if not self._stopped.is_set():
            error = getattr(sys, "last_value", None)
            if error is not None:
                self._await_verdict(error)
            self._claim_exit()
            self._lead(*(("exited before the end", 1) if error is None else describe(error)))


def describe(error: BaseException) -> tuple[str, int]:
    """Return what to tell the others of an error, and the exit status."""
    if isinstance(error, SystemExit):
        if isinstance(error.code, int) or error.code is None:
            return f"exited before the end, with status {error.code or 0}", error.code or 1
        return str(error.code), 1
    if isinstance(error, KeyboardInterrupt):
        number = error.args[0] if error.args else signal.SIGINT
        return _SIGNALS.get(number, "interrupted"), 128 + int(number)
    message = " ".join(str(error).split())
    if isinstance(error, FtmeshError):
        return message, error.status
    return f"{type(error).__name__}: {message}", 1


def _is_foreign(error: BaseException) -> bool:
    return not isinstance(error, (FtmeshError, KeyboardInterrupt, SystemExit))


def run_with_timeout(seconds: float, function: Callable[[], Any]) -> Any:
    """Return what `function` returns; None if it fails or takes longer than `seconds`."""
    results: list[Any] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            results.append(function())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


@contextlib.contextmanager
def deferred_sigterm(shutdown: Shutdown | None, then: Callable[[], None]) -> Iterator[None]:
    """Call `then` at SIGTERM, in the main thread, instead of exiting."""
    before = None
    if shutdown is not None:
        shutdown.on_sigterm = then
    elif threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, lambda *_: then())
    try:
        yield
    finally:
        if shutdown is not None:
            shutdown.on_sigterm = None
        elif before is not None:
            signal.signal(signal.SIGTERM, before)
