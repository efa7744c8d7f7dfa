"""The command line: ``ftmesh plan 16x32 --failed 4x2@6,14``."""

from __future__ import annotations

import argparse
import io
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

import ftmesh
from ftmesh.command_line import EXIT_STATUS_HELP, Parser, run_command, say

_NAMES = (
    "plan", "verify", "draw", "simulate", "limits", "paper", "advise", "compile", "bench",
    "doctor", "selftest", "launch", "run", "view",
)  # fmt: skip
COMMANDS = {name: import_module(f"ftmesh.cli.{name}") for name in _NAMES}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = Parser(
        prog="ftmesh",
        description="All-reduce schedules for TPU meshes with failed chips: plan, verify, draw\n"
        "and simulate them, compile them for a TPU, and run training that survives failures.",
        epilog="Blocks of failed chips are written WxH@x,y and joined by ';': 4x2@6,14 is 4 chips\n"
        "along x and 2 along y, with its low corner at x=6, y=14. In 3D it is\n"
        f"WxHxD@x,y,z.\n\n{EXIT_STATUS_HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ftmesh {ftmesh.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS.values():
        command.add(commands)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.prog = f"{parser.prog} {args.command}"  # whose --help lists the right ones
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return run_command("ftmesh", lambda: _run(args))


def _run(args: argparse.Namespace) -> int | None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals without arrows
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: say(f"ftmesh: warning: {message}")
        status: int | None = COMMANDS[args.command].run(args)
    return status
