"""Prints the output of several processes: whole lines, each with the index of its process."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TextIO

MAX_LINE_BYTES = 1 << 20  # a longer line is split
REDRAW_SECONDS = 10.0  # between two states of a progress bar
COLOURS = (36, 33, 35, 32, 34)

# Every thread of JAX's collectives on CPUs prints that it is connected, all at once.
_GLOO = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. "
    rb"Expected number of connected peer ranks is : \d+"
)
_GLOO_FRAGMENTS = re.compile(
    rb"(\[Gloo\]|Rank|is connected to|Expected number of connected|peer ranks|is :|[\d.\s])+"
)


class OutputPrinter:
    """Writes the lines of processes to stdout and stderr, as in ``[2] step 10``.

    `while_blocked` is called repeatedly while nobody reads the output, so that processes can be
    ended nevertheless. On a terminal, each process has a colour.
    """

    def __init__(self, num_processes: int, while_blocked: Callable[[], object]) -> None:
        self._width = len(str(num_processes - 1))
        self._while_blocked = while_blocked
        self._files: dict[int, TextIO] = {1: sys.stdout, 2: sys.stderr}
        self._splitters: defaultdict[tuple[int, int], LineSplitter] = defaultdict(LineSplitter)
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        self._has_colour = {s: file.isatty() and not plain for s, file in self._files.items()}

    def __call__(self, process: int, stream: int, data: bytes) -> None:
        """Take output that a process wrote to its stdout (1) or stderr (2)."""
        lines = without_gloo(self._splitters[process, stream].feed(data))
        prefix = f"[{process:{self._width}}]"
        if self._has_colour[stream]:
            prefix = f"\033[{COLOURS[process % len(COLOURS)]}m{prefix}\033[0m"
        start = f"{prefix} ".encode()
        self._write(self._files[stream].fileno(), b"".join(start + line + b"\n" for line in lines))

    def _write(self, fd: int, text: bytes) -> None:
        """Write everything, without ever blocking for long."""
        left = memoryview(text)
        while left:
            if select.select([], [fd], [], 0.1)[1]:
                with contextlib.suppress(BlockingIOError):  # another program made it non-blocking
                    left = left[os.write(fd, left[: select.PIPE_BUF]) :]
            else:
                self._while_blocked()


class LineSplitter:
    """Splits a stream that comes in pieces into lines.

    Of a line that is redrawn with carriage returns, as progress bars do, the last state counts, and
    one state every `REDRAW_SECONDS` while that goes on.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._shown_at = time.monotonic()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes; empty data ends the last line."""
        *lines, rest = (self._rest + data).split(b"\n")
        lines = [_last_state(line) for line in lines]
        if lines:
            self._shown_at = time.monotonic()
        if not data and rest:
            lines, rest = [_last_state(rest)], b""
        if b"\r" in rest:
            before, _, last = rest.rpartition(b"\r")
            state = _last_state(before)
            if state and time.monotonic() - self._shown_at >= REDRAW_SECONDS:
                self._shown_at = time.monotonic()
                lines.append(state)
            rest = last or state + b"\r"
        while len(rest) > MAX_LINE_BYTES:
            lines.append(rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
        self._rest = rest
        return lines


def without_gloo(lines: list[bytes]) -> list[bytes]:
    """Remove what JAX's CPU collectives print when they are connected.

    >>> without_gloo([b"[Gloo] Rank 1[Gloo] Rank 2 is connected to 3 peer ranks. ", b"", b"step 2"])
    [b'', b'step 2']
    """
    kept = []
    for line in lines:
        if b"[Gloo]" not in line and b"peer ranks" not in line:
            kept.append(line)
        elif not _GLOO_FRAGMENTS.fullmatch(rest := _GLOO.sub(b" ", line)):
            kept.append(rest.rstrip())
    return kept


def _last_state(line: bytes) -> bytes:
    """Return what a terminal shows of a line in the end."""
    return next((state for state in reversed(line.split(b"\r")) if state), b"")
