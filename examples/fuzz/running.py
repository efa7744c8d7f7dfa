"""Runs a case in its own process, with limits on time, memory and the files it leaves."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import traceback
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ftmesh.command_line import BUG, INTERRUPTED
from ftmesh.errors import NOT_FOUND, UNAVAILABLE, USAGE, VERIFICATION_FAILED

ACCEPTED_WRONG = 99  # exit status of a case that accepted wrong input
SUCCESS = 0
ALLOWED = {SUCCESS, USAGE, VERIFICATION_FAILED, NOT_FOUND, UNAVAILABLE}
CPU_SECONDS, WALL_SECONDS = 20, 120  # the machine may be busy
MAX_BYTES = 2 * 2**30
MAX_LINES = 3  # on stderr of a rejected case: up to two warnings, and the error
_POLL = 0.01  # seconds

Work = Callable[[], int]


class WrongError(BaseException):
    """Wrong input was accepted. A BaseException, so that no error handler catches it."""


@dataclass(frozen=True)
class CaseResult:
    """How a case ended; `problem` is what is wrong with that, or ""."""

    status: int
    seconds: float
    max_bytes: int
    stderr: str
    problem: str


def run(work: Work, folder: Path, outputs: Path) -> CaseResult:
    """Run `work` in a child process in `folder`; its output goes to files in `outputs`."""
    before = _names(folder)
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _run_child(work, folder, outputs)
    status, usage, limit = _wait_for(child, start)
    stderr = (outputs / "stderr").read_text(errors="replace")
    left = _names(folder) - before
    max_bytes = usage.ru_maxrss * 1024
    problem = limit or problem_of(status, stderr, folder, left, max_bytes)
    return CaseResult(status, time.monotonic() - start, max_bytes, stderr, problem)


def _run_child(work: Work, folder: Path, outputs: Path) -> None:
    """Run `work` and exit; never returns."""
    status = BUG
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(folder)
        for name, handle in (("stdout", 1), ("stderr", 2)):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(outputs / name, flags, 0o600), handle)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        status = work()
    except SystemExit as stop:  # argparse
        status = stop.code if isinstance(stop.code, int) else USAGE
    except WrongError as error:
        print(f"WRONG: {error}", file=sys.stderr)
        status = ACCEPTED_WRONG
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                continue
        os._exit(status)


def _wait_for(child: int, start: float) -> tuple[int, resource.struct_rusage, str]:
    """Wait for a child, and kill it if it exceeds a limit; the last result is that limit or ""."""
    limit = ""
    while True:
        pid, code, usage = os.wait4(child, os.WNOHANG)
        if pid:
            break
        if not limit:
            late = time.monotonic() - start > WALL_SECONDS
            limit = "hangs" if late else "memory" if _resident(child) > MAX_BYTES else ""
            if limit:
                os.killpg(child, signal.SIGKILL)
        time.sleep(_POLL)
    if os.WIFSIGNALED(code):
        number = os.WTERMSIG(code)
        limit = limit or ("hangs" if number == signal.SIGXCPU else f"signal {number}")
    return os.waitstatus_to_exitcode(code), usage, limit


def _resident(process: int) -> int:
    """Return the resident memory of a process in bytes."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * resource.getpagesize()


def problem_of(status: int, stderr: str, folder: Path, left: set[str], max_bytes: int) -> str:
    """Name what is wrong with how a case ended, or return ""."""
    if status == ACCEPTED_WRONG:
        return "accepted"
    if status == BUG or "Traceback (most recent call last)" in stderr:
        return "traceback"
    if status not in ALLOWED:
        return "interrupted" if status == INTERRUPTED else f"status {status}"
    if max_bytes > MAX_BYTES:
        return "memory"
    if any(not character.isprintable() and character != "\n" for character in stderr):
        return "control characters"
    if status != SUCCESS and not 1 <= stderr.count("\n") <= MAX_LINES:
        return "not one line"
    if any(Path(name).name.startswith(".") and ".ftmesh-index" not in name for name in left):
        return "left behind"
    if not all(_is_complete(folder / name) for name in left):
        return "half-written"
    return ""


def _is_complete(path: Path) -> bool:
    """Check that an output file is complete, as far as its format shows."""
    if path.suffix not in (".npz", ".svg", ".png"):
        return True
    raw = path.read_bytes()
    if raw.startswith(b"<"):
        return raw.rstrip().endswith(b"</svg>")
    if raw.startswith(b"\x89PNG"):
        return raw.endswith(b"IEND\xaeB`\x82")
    return zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip() is None


def _names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
