"""What each kind of fault does to this process, and to others of the run."""

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


class PlantedError(RuntimeError):
    """What a planted `raise` raises: nothing that ftmesh expects."""


def act(kind: str, host: int, run_dir: Path | None) -> None:
    """Do it; most kinds do not return."""
    _ACTS[kind](host, run_dir)


def _kill(host: int, run_dir: Path | None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(host: int, run_dir: Path | None) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _segv(host: int, run_dir: Path | None) -> None:
    import resource  # which not every system has

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no files are left behind
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)  # it may be taken by another thread


def _hold(host: int, run_dir: Path | None) -> None:
    """A thread calls C without giving the interpreter back, and no signal wakes it."""
    pause = ctypes.PyDLL(None).pause

    def hold() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            pause()

    threading.Thread(target=hold, daemon=True).start()
    while True:
        time.sleep(1)  # comes back never


def _stuck(host: int, run_dir: Path | None) -> None:
    while True:
        time.sleep(3600)


def _raise(host: int, run_dir: Path | None) -> None:
    raise PlantedError(f"a fault was planted here, in host {host}")


def _keeper(host: int, run_dir: Path | None) -> None:
    _kill_others(run_dir, lambda each: each["kind"] == "keeper" and each["host"] == host)
    _kill(host, run_dir)


def _service(host: int, run_dir: Path | None) -> None:
    _kill_others(run_dir, lambda each: each["kind"] == "service")


def _all(host: int, run_dir: Path | None) -> None:
    _kill_others(run_dir, lambda each: each["kind"] == "worker")
    _kill(host, run_dir)


_ACTS: dict[str, Callable[[int, Path | None], None]] = {
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


def _kill_others(run_dir: Path | None, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Kill processes that the launcher has noted in ``pids/*.json``, and no stranger."""
    found = [each for each in noted_processes(run_dir) if wanted(each)]
    if not found:
        _say("fault: the folder pids of FTMESH_RUN_DIR names no such process of this run")
    for each in found:
        if each["pid"] != os.getpid():
            os.kill(each["pid"], signal.SIGKILL)


def noted_processes(run_dir: Path | None) -> list[dict[str, Any]]:
    """The processes of a run that live: kind ("worker", "keeper" or "service"), host and pid."""
    files = [] if run_dir is None else sorted((run_dir / "pids").glob("*.json"))
    noted = [json.loads(file.read_text()) for file in files]
    return [each for each in noted if _is_of_run(each["pid"], run_dir)]


def _is_of_run(pid: int, run_dir: Path | None) -> bool:
    """Whether a process is of this run, by its environment, where the system shows that.

    The one that was noted may have ended, and its number be another's.
    """
    if not sys.platform.startswith("linux"):
        return True
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    told = [each.removeprefix(_RUN_DIR) for each in variables if each.startswith(_RUN_DIR)]
    return run_dir is not None and any(
        os.path.realpath(os.fsdecode(each)) == os.path.realpath(run_dir) for each in told
    )


def halve(file: Path) -> None:
    """Cut a file in half."""
    os.truncate(file, file.stat().st_size // 2)


def until_full(pieces: Iterable[Any], file: Path) -> Iterator[Any]:
    """The first of what is to be written; then no space is left."""
    yield from islice(pieces, 1)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))


def _say(line: str) -> None:
    os.write(2, f"{line}\n".encode())  # at once, also where Python's own is held up
