"""Commands: how each of them begins, with numbers in bounds, and how it ends, in a line.

What a user can cause has an exit status of its own; a traceback is a bug.

The command-line arguments that say which processes take part, the same wherever they are.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, TextIO

from ftmesh.errors import NOT_FOUND, REFUSED, FtmeshError
from ftmesh.optional_deps import missing

MOST = 2**31 - 1  # of anything that is counted
MOST_SEED = 2**32 - 1
BUG = 70
INTERRUPTED = 130
CLOSED = 141  # 128 + SIGPIPE, as launch and other programs have it
STATUSES = """\
exit status:
  0    done
  1    doctor: a chip or a link is not well
  2    the command line is wrong: an argument, a mesh, an output that cannot be written
  65   proved wrong: a schedule breaks one of its promises
  66   not found: there is no such file or folder
  69   refused: there is no such plan, a file is damaged, the data or the memory does not suffice
  70   a bug in ftmesh, with a traceback to report
  130  interrupted
  141  whoever read the output has gone
"""

_LONGEST = 600  # characters of a line; what is longer is cut in the middle
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]{1,3})?", re.IGNORECASE)


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where help is, and exit with status 2."""
        self.exit(2, f"{one_line(f'{self.prog}: {message}')} (see '{self.prog} --help')\n")


def whole_number(least: int, most: int = MOST) -> Callable[[str], int]:
    """The type of an argument that is a whole number, from `least` to `most`."""

    def parse(text: str) -> int:
        digits = text.strip()
        if len(digits) > len(str(most)) + 1 or not re.fullmatch(r"[+-]?[0-9]+", digits):
            raise argparse.ArgumentTypeError(
                f"{text!r:.40} is not a whole number from {least:,} to {most:,}"
            )
        if not least <= int(digits) <= most:
            raise argparse.ArgumentTypeError(f"{digits} is not from {least:,} to {most:,}")
        return int(digits)

    return parse


def number(least: float, most: float = 1e6) -> Callable[[str], float]:
    """The type of an argument that is a number from `least` to `most`: neither nan nor inf is."""

    def parse(text: str) -> float:
        given = float(text) if _NUMBER.fullmatch(text.strip()) else math.nan
        if not least <= given <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r:.40} is not a number from {least:,g} to {most:,g}"
            )
        return given

    return parse


def ended(name: str, work: Callable[[], int | None], *, interrupted: str = "interrupted") -> int:
    """Do `work`, all of a command, and say in a line what went wrong; the exit status."""
    if _is_closed(sys.stdout):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        status = work() or 0
        _flush()
        return status
    except FtmeshError as error:
        return _said(name, str(error), error.status)
    except KeyboardInterrupt:
        return _said(name, interrupted, INTERRUPTED)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        _forget_stdout()
        return CLOSED
    except MemoryError:
        return _said(name, "there is not enough memory for that: ask for less", REFUSED)
    except ModuleNotFoundError as error:
        extra = missing(error)
        return _is_a_bug(name) if extra is None else _said(name, str(extra), extra.status)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        status = NOT_FOUND if isinstance(error, FileNotFoundError) else REFUSED
        return _said(name, f"{where}{error.strerror or error}", status)
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return _said(name, f"there is not enough memory for that: {error}", REFUSED)
        return _is_a_bug(name)


def one_line(text: str) -> str:
    r"""Text of any origin as one line that is safe to print, and not too long.

    >>> one_line("a\nred \x1b[31m")
    'a red \\x1b[31m'
    """
    line = " ".join(text.split())
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    if len(safe) <= _LONGEST:
        return safe
    half = _LONGEST // 2
    return f"{safe[:half]} ... {safe[-half:]}"


def say(text: str) -> None:
    """Print a line on stderr, if there is one."""
    if not _is_closed(sys.stderr):
        print(one_line(text), file=sys.stderr, flush=True)


def _is_closed(stream: TextIO | None) -> bool:
    """Whether a shell has closed it; then there is none."""
    return stream is None


def _said(name: str, text: str, status: int) -> int:
    say(f"{name}: {text}")
    return status


def _is_a_bug(name: str) -> int:
    """What nobody meant to happen keeps its traceback."""
    traceback.print_exc()
    return _said(
        name,
        "this is a bug in ftmesh: please report it, with the command and the lines above",
        BUG,
    )


def _flush() -> None:
    """Now, while there is somebody to say that it cannot be."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _forget_stdout()
        raise FtmeshError(f"cannot write to stdout: {error.strerror}") from error


def _forget_stdout() -> None:
    """Python flushes it once more at the end, and would complain."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError, io.UnsupportedOperation):
        sys.stdout = io.StringIO()


def add_processes(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add them; where JAX finds that out by itself, nothing is to be given."""
    group = parser.add_argument_group(
        "several processes",
        "one for each host; nothing need be given on Cloud TPU, Slurm and GKE, nor under 'ftmesh "
        "launch'",
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 is to be found")
    group.add_argument(
        "--num-processes", type=whole_number(1), metavar="N", help="how many there are"
    )
    group.add_argument(
        "--process-id", type=whole_number(0), metavar="I", help="which this one is, from 0 on"
    )
    return group
