"""Running: a case in a process of its own, with limits in time, in memory and in what it leaves."""

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
from ftmesh.errors import NOT_FOUND, PROVED_WRONG, REFUSED, USAGE

WRONG = 99  # the status of a case that was accepted and should not have been
DONE = 0
FINE = {DONE, USAGE, PROVED_WRONG, NOT_FOUND, REFUSED}
CPU_SECONDS, WALL_SECONDS = 20, 120  # a machine may have other work to do
MAX_BYTES = 2 * 2**30
MAX_LINES = 3  # on stderr, of a case that is refused: a warning or two, and the line
_POLL = 0.01  # seconds

Work = Callable[[], int]


class WrongError(BaseException):
    """Something was accepted that is not right. No handler of errors is to catch it."""


@dataclass(frozen=True)
class Ended:
    """How a case ended, and what is wrong with that, if anything is."""

    status: int
    seconds: float
    max_bytes: int
    stderr: str
    problem: str  # "" where all is well


def run(work: Work, folder: Path, outputs: Path) -> Ended:
    """Do `work` in a process whose working folder is `folder`; its output goes to `outputs`."""
    before = _names(folder)
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_the_child(work, folder, outputs)
    status, usage, cut = _watched(child, start)
    stderr = (outputs / "stderr").read_text(errors="replace")
    left = _names(folder) - before
    max_bytes = usage.ru_maxrss * 1024
    problem = cut or problem_of(status, stderr, folder, left, max_bytes)
    return Ended(status, time.monotonic() - start, max_bytes, stderr, problem)


def _be_the_child(work: Work, folder: Path, outputs: Path) -> None:
    """Never returns."""
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
        status = WRONG
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                continue
        os._exit(status)


def _watched(child: int, start: float) -> tuple[int, resource.struct_rusage, str]:
    """Wait for a child, and end it where it goes past a limit; what that was, or ""."""
    cut = ""
    while True:
        ended, code, usage = os.wait4(child, os.WNOHANG)
        if ended:
            break
        if not cut:
            late = time.monotonic() - start > WALL_SECONDS
            cut = "hangs" if late else "memory" if _resident(child) > MAX_BYTES else ""
            if cut:
                os.killpg(child, signal.SIGKILL)
        time.sleep(_POLL)
    if os.WIFSIGNALED(code):
        number = os.WTERMSIG(code)
        cut = cut or ("hangs" if number == signal.SIGXCPU else f"signal {number}")
    return os.waitstatus_to_exitcode(code), usage, cut


def _resident(process: int) -> int:
    """Bytes of memory that a process has."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * resource.getpagesize()


def problem_of(status: int, stderr: str, folder: Path, left: set[str], max_bytes: int) -> str:
    """What is wrong with how a case ended, in a word."""
    if status == WRONG:
        return "accepted"
    if status == BUG or "Traceback (most recent call last)" in stderr:
        return "traceback"
    if status not in FINE:
        return "interrupted" if status == INTERRUPTED else f"status {status}"
    if max_bytes > MAX_BYTES:
        return "memory"
    if any(not character.isprintable() and character != "\n" for character in stderr):
        return "control characters"
    if status != DONE and not 1 <= stderr.count("\n") <= MAX_LINES:
        return "not one line"
    if any(Path(name).name.startswith(".") and ".ftmesh-index" not in name for name in left):
        return "left behind"
    if not all(_is_whole(folder / name) for name in left):
        return "half-written"
    return ""


def _is_whole(path: Path) -> bool:
    """Whether a file that was written is all there, as far as its kind tells."""
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
