"""Bounds for numeric arguments, errors in one line, and exit statuses; a traceback is a bug."""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from ftmesh.errors import NOT_FOUND, UNAVAILABLE, FtmeshError
from ftmesh.optional_deps import missing_extra

MAX_COUNT = 2**31 - 1
MAX_SEED = 2**32 - 1
BUG = 70
INTERRUPTED = 130
BROKEN_PIPE = 141  # 128 + SIGPIPE
EXIT_STATUS_HELP = """\
exit status:
  0    success
  1    doctor, selftest: a chip or a link is unhealthy, or a check failed
  2    bad command line: an argument, a mesh, or an output that cannot be written
  65   verification failed: a schedule or a sum is wrong
  66   no such file or folder
  69   rejected: no such plan, a damaged file, or not enough data or memory
  70   a bug in ftmesh, with a traceback to report
  75   start it again
  76   another process of the run was lost or is missing: start all again
  77   too few hosts are left
  130  interrupted
  141  the output pipe was closed
"""

_MAX_LINE = 600  # characters
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]{1,3})?", re.IGNORECASE)


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and where to find help, and exit with status 2."""
        self.exit(2, f"{one_line(f'{self.prog}: {message}')} (see '{self.prog} --help')\n")


def whole_number(least: int, most: int = MAX_COUNT) -> Callable[[str], int]:
    """Return an argparse type for integers from `least` to `most`."""

    def parse(text: str) -> int:
        digits = text.strip()
        if len(digits) > len(str(most)) + 1 or not re.fullmatch(r"[+-]?[0-9]+", digits):
            message = f"{text!r:.40} is not a whole number from {least:,} to {most:,}"
            raise argparse.ArgumentTypeError(message)
        if not least <= int(digits) <= most:
            raise argparse.ArgumentTypeError(f"{digits} is not from {least:,} to {most:,}")
        return int(digits)

    return parse


def number(least: float, most: float = 1e6) -> Callable[[str], float]:
    """Return an argparse type for numbers from `least` to `most`, without nan and inf."""

    def parse(text: str) -> float:
        value = float(text) if _NUMBER.fullmatch(text.strip()) else math.nan
        if not least <= value <= most:
            message = f"{text!r:.40} is not a number from {least:,g} to {most:,g}"
            raise argparse.ArgumentTypeError(message)
        return value

    return parse


def add_process_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add --coordinator, --num-processes and --process-id, for runs with several processes."""
    text = "one per host; not needed under engines that say which process this is"
    group = parser.add_argument_group("several processes", text)
    add = group.add_argument
    add("--coordinator", metavar="HOST:PORT", help="address of process 0")
    add("--num-processes", type=whole_number(1), metavar="N", help="number of processes")
    add("--process-id", type=whole_number(0), metavar="I", help="id of this process, from 0")
    return group


def run_command(
    name: str, work: Callable[[], int | None], *, interrupted: str = "interrupted"
) -> int:
    """Run a command, report errors in one line on stderr, and return the exit status.

    Args:
        name: The name of the command, which starts every error line.
        work: The whole command; returns its exit status, or None for 0.
        interrupted: What to print on Ctrl-C.
    """
    if sys.stdout is None:  # the shell has closed it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        status = work() or 0
        _flush_stdout()
        return status
    except FtmeshError as error:
        return _report(name, str(error), error.status)
    except KeyboardInterrupt:
        return _report(name, interrupted, INTERRUPTED)
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        _discard_stdout()
        return BROKEN_PIPE
    except MemoryError:
        return _report(name, "not enough memory: ask for less", UNAVAILABLE)
    except ModuleNotFoundError as error:
        extra = missing_extra(error)
        return _report_bug(name) if extra is None else _report(name, str(extra), extra.status)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        status = NOT_FOUND if isinstance(error, FileNotFoundError) else UNAVAILABLE
        return _report(name, f"{where}{error.strerror or error}", status)
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return _report(name, f"not enough memory: {error}", UNAVAILABLE)
        return _report_bug(name)


def one_line(text: str) -> str:
    r"""Make any text one line that is safe to print; long text is shortened in the middle.

    >>> one_line("a\nred \x1b[31m")
    'a red \\x1b[31m'
    """
    line = " ".join(text.split())
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    half = _MAX_LINE // 2
    return safe if len(safe) <= _MAX_LINE else f"{safe[:half]} ... {safe[-half:]}"


def say(text: str) -> None:
    """Print one line on stderr, unless that is closed or its disk is full: no run may end by it."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(one_line(text), file=sys.stderr, flush=True)


def _report(name: str, text: str, status: int) -> int:
    say(f"{name}: {text}")
    return status


def _report_bug(name: str) -> int:
    traceback.print_exc()
    text = "this is a bug in ftmesh: please report it, with the command and the lines above"
    return _report(name, text, BUG)


def _flush_stdout() -> None:
    """Flush while an error can still be reported."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard_stdout()
        raise FtmeshError(f"cannot write to stdout: {error.strerror}") from error


def _discard_stdout() -> None:
    """Redirect stdout to nowhere, since Python flushes it once more at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError, io.UnsupportedOperation):
        sys.stdout = io.StringIO()
