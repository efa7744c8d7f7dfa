"""What each kind of fault does to this process, and to other processes of the run."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

_RUN_DIR = b"FTMESH_RUN_DIR="


class InjectedError(RuntimeError):
    """What the fault `raise` raises. ftmesh does not expect it anywhere."""


def perform(kind: str, host: int, run_dir: Path | None) -> None:
    """Perform a fault of this kind in host `host`. Most kinds do not return."""
    _ACTIONS[kind](host, run_dir)


def _kill(host: int, run_dir: Path | None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(host: int, run_dir: Path | None) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _segv(host: int, run_dir: Path | None) -> None:
    import resource  # not available on every system

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)  # another thread may receive the signal


def _hold(host: int, run_dir: Path | None) -> None:
    """Block in C with the interpreter lock held, and all signals masked."""
    pause = ctypes.PyDLL(None).pause

    def hold() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            pause()

    threading.Thread(target=hold, daemon=True).start()
    while True:
        time.sleep(1)  # never returns


def _stuck(host: int, run_dir: Path | None) -> None:
    while True:
        time.sleep(3600)


def _raise(host: int, run_dir: Path | None) -> None:
    raise InjectedError(f"a fault was injected here, in host {host}")


def _keeper(host: int, run_dir: Path | None) -> None:
    _kill_others(run_dir, lambda process: process["kind"] == "keeper" and process["host"] == host)
    _kill(host, run_dir)


def _service(host: int, run_dir: Path | None) -> None:
    _kill_others(run_dir, lambda process: process["kind"] == "service")


def _all(host: int, run_dir: Path | None) -> None:
    _kill_others(run_dir, lambda process: process["kind"] == "worker")
    _kill(host, run_dir)


_ACTIONS: dict[str, Callable[[int, Path | None], None]] = {
    "kill": _kill,
    "stop": _stop,
    "segv": _segv,
    "hold": _hold,
    "stuck": _stuck,
    "raise": _raise,
    "keeper": _keeper,
    "service": _service,
    "all": _all,
}


def _kill_others(run_dir: Path | None, is_target: Callable[[dict[str, Any]], bool]) -> None:
    targets = [process for process in recorded_processes(run_dir) if is_target(process)]
    if not targets:
        # A raw write: Python's own stderr may be blocked.
        os.write(2, b"fault: FTMESH_RUN_DIR/pids has no such process of this run\n")
    for process in targets:
        if process["pid"] != os.getpid():
            os.kill(process["pid"], signal.SIGKILL)


def recorded_processes(run_dir: Path | None) -> list[dict[str, Any]]:
    """List the live processes that the launcher has recorded in ``pids/*.json``.

    Returns:
        Dicts with kind ("worker", "keeper" or "service"), host and pid.
    """
    files = [] if run_dir is None else sorted((run_dir / "pids").glob("*.json"))
    processes = [json.loads(file.read_text()) for file in files]
    return [process for process in processes if _belongs_to_run(process["pid"], run_dir)]


def _belongs_to_run(pid: int, run_dir: Path | None) -> bool:
    """Check a process's environment, on Linux: its pid may have been reused."""
    if not sys.platform.startswith("linux"):
        return True
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return run_dir is not None and any(
        os.path.realpath(os.fsdecode(variable.removeprefix(_RUN_DIR))) == os.path.realpath(run_dir)
        for variable in variables
        if variable.startswith(_RUN_DIR)
    )


def truncate_to_half(file: Path) -> None:
    """Keep the first half of a file."""
    os.truncate(file, file.stat().st_size // 2)


def write_until_full(pieces: Iterable[Any], file: Path) -> Iterator[Any]:
    """Yield the first piece, then raise the OSError of a full disk."""
    yield from islice(pieces, 1)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
