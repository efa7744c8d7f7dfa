"""The command line: ``ftmesh plan 16x32 --failed 4x2@6,14``. One file per command.

Bad input ends with exit status 2 and one line that says what was wrong, never a traceback.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import ftmesh
from ftmesh.cli import (
    advise,
    bench,
    compile,
    doctor,
    draw,
    launch,
    limits,
    paper,
    plan,
    simulate,
    verify,
)
from ftmesh.cli.arguments import Parser
from ftmesh.errors import FtmeshError

COMMANDS = {
    "plan": plan,
    "verify": verify,
    "draw": draw,
    "simulate": simulate,
    "limits": limits,
    "paper": paper,
    "advise": advise,
    "compile": compile,
    "bench": bench,
    "doctor": doctor,
    "launch": launch,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = Parser(
        prog="ftmesh",
        description="All-reduce schedules for TPU meshes with failed chips: plan them, prove them "
        "right, look at them, price them, and see what a TPU's compiler makes of them.",
        epilog="Blocks of failed chips are written WxH@x,y and joined by ';': 4x2@6,14 is 4 chips "
        "along x and 2 along y, with its low corner at x=6, y=14.",
    )
    parser.add_argument("--version", action="version", version=f"ftmesh {ftmesh.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS.values():
        command.add(commands)
    args = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # arrows, on a terminal without them
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return COMMANDS[args.command].run(args) or 0
    except FtmeshError as error:
        print(f"ftmesh: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ftmesh: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"ftmesh: {error}", file=sys.stderr)
        return 2


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """One line, as errors are; where in the code it arose says nothing to a user."""
    print(f"ftmesh: warning: {message}", file=sys.stderr)
