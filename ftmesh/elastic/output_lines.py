"""What several processes write, on one terminal: whole lines, each with its process's number."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TextIO

LONGEST = 1 << 20  # bytes of a line; more are the next
REDRAW_SECONDS = 10.0
COLOURS = (36, 33, 35, 32, 34)

# Every thread of JAX's collectives on CPUs says on stdout that it is connected, all at once.
_GLOO = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. "
    rb"Expected number of connected peer ranks is : \d+"
)
_OF_GLOO = re.compile(
    rb"(\[Gloo\]|Rank|is connected to|Expected number of connected|peer ranks|is :|[\d.\s])+"
)


class Lines:
    """Whole lines of a stream that comes in pieces.

    Of a line that draws itself again, as progress bars do with carriage returns, the last state
    counts, and while that goes on, one every `REDRAW_SECONDS`.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._shown_at = time.monotonic()

    def feed(self, piece: bytes) -> list[bytes]:
        """The lines that a piece completes; one that is empty ends the last."""
        *lines, rest = (self._rest + piece).split(b"\n")
        lines = [_last_state(line) for line in lines]
        if lines:
            self._shown_at = time.monotonic()
        if not piece and rest:
            lines, rest = [_last_state(rest)], b""
        if b"\r" in rest:
            before, _, last = rest.rpartition(b"\r")
            state = _last_state(before)
            if state and time.monotonic() - self._shown_at >= REDRAW_SECONDS:
                self._shown_at = time.monotonic()
                lines.append(state)
            rest = last or state + b"\r"
        while len(rest) > LONGEST:
            lines.append(rest[:LONGEST])
            rest = rest[LONGEST:]
        self._rest = rest
        return lines


class Printer:
    """Writes the lines of processes to stdout and stderr, as ``[2] step 10``.

    Numbers have colours on a terminal. While the reader of the output takes none of it, `idle` is
    called again and again, so that processes can be ended nevertheless.
    """

    def __init__(self, num_processes: int, idle: Callable[[], object]) -> None:
        self._width = len(str(num_processes - 1))
        self._idle = idle
        self._files: dict[int, TextIO] = {1: sys.stdout, 2: sys.stderr}
        self._lines: defaultdict[tuple[int, int], Lines] = defaultdict(Lines)
        self._colour = {
            stream: has_colours(file, os.environ) for stream, file in self._files.items()
        }

    def __call__(self, process: int, stream: int, piece: bytes) -> None:
        """Take a piece of what a process wrote to its stdout (1) or stderr (2)."""
        lines = without_gloo(self._lines[process, stream].feed(piece))
        prefix = f"[{process:{self._width}}]"
        if self._colour[stream]:
            prefix = f"\033[{COLOURS[process % len(COLOURS)]}m{prefix}\033[0m"
        start = f"{prefix} ".encode()
        self._write(self._files[stream].fileno(), b"".join(start + line + b"\n" for line in lines))

    def _write(self, fd: int, text: bytes) -> None:
        """Write all of it, never waiting long in one call."""
        left = memoryview(text)
        while left:
            if select.select([], [fd], [], 0.1)[1]:
                with contextlib.suppress(BlockingIOError):  # another program made it so
                    left = left[os.write(fd, left[: select.PIPE_BUF]) :]
            else:
                self._idle()


def has_colours(file: TextIO, env: Mapping[str, str]) -> bool:
    """Whether colours are wanted there."""
    return file.isatty() and not env.get("NO_COLOR") and env.get("TERM") != "dumb"


def without_gloo(lines: list[bytes]) -> list[bytes]:
    """Lines without what JAX's collectives say when they are connected.

    >>> without_gloo([b"[Gloo] Rank 1[Gloo] Rank 2 is connected to 3 peer ranks. ", b"", b"step 2"])
    [b'', b'step 2']
    """
    kept = []
    for line in lines:
        if b"[Gloo]" not in line and b"peer ranks" not in line:
            kept.append(line)
        elif not _OF_GLOO.fullmatch(own := _GLOO.sub(b" ", line)):
            kept.append(own.rstrip())
    return kept


def _last_state(line: bytes) -> bytes:
    """What a terminal would show of a line in the end."""
    return next((state for state in reversed(line.split(b"\r")) if state), b"")
