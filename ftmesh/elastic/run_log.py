"""The log of a run: its events, what failures cost, and the lines that its processes print.

An event is a line for people and a line of JSON. Output is printed in whole lines, each with the
index of its process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from ftmesh.command_line import say
from ftmesh.errors import ArgumentError
from ftmesh.files import check_local, open_nonblocking

_SOURCES = {
    "devices": "the state on the devices",
    "host memory": "the in-memory checkpoint",
    "checkpoint": "a checkpoint",
    "start": "the beginning",
}


class EventLog:
    """Counts failures and writes events: as text by `say`, as JSON lines to the file `path`."""

    def __init__(self, say: Callable[[str], None], path: Path | None = None) -> None:
        self._say = say
        self._file = None if path is None else _open_for_append(path)
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self.failures = 0
        self.seconds_lost = 0.0

    def log(self, event: str, **facts: Any) -> None:
        """Log an event."""
        with self._lock:
            if event == "failed":
                self.failures += 1
            elif event == "goes on":
                self.seconds_lost += facts["lost"]
            if self._file is not None:
                line = {"time": round(time.time(), 3), "event": event, **facts}
                with contextlib.suppress(OSError):  # a full disk must not end the run
                    print(json.dumps(line), file=self._file, flush=True)
            if text := describe_event(event, facts):
                self._say(text)

    def done(self, status: int, steps: int) -> None:
        """Log the end of the run, with its goodput."""
        seconds = time.monotonic() - self._started
        goodput = max(0.0, 1 - self.seconds_lost / seconds) if seconds else 1.0
        if status and not steps:
            goodput = 0.0
        times = {"seconds": round(seconds, 3), "seconds_lost": round(self.seconds_lost, 3)}
        facts = {**times, "goodput": round(goodput, 4)}
        self.log("done", status=status, steps=steps, failures=self.failures, **facts)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk
                self._file.close()


def _open_for_append(path: Path) -> TextIO:
    """Open a file; a pipe that nobody reads is an error, not a wait."""
    check_local(path)
    try:
        return open(path, "a", encoding="utf-8", opener=open_nonblocking)
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}") from error


def describe_event(event: str, facts: dict[str, Any]) -> str:
    """Return an event as text; empty for events that only programs read."""
    if event == "failed":
        return (
            f"host {facts['host']} is lost (process {facts['process']}"
            f"{f', chips {chips}' if (chips := facts['chips']) else ''}): it {facts['how']}"
        )
    if event == "epoch" and facts["epoch"] > 1:
        how = "in place" if facts["in_place"] else "in new processes"
        without = f" without {facts['failed']}" if facts["failed"] else ""
        repeated, live = facts["repeated"], facts["live"]
        return (
            f"generation {facts['epoch']}: continues {how} with {live} chip{'s' * (live != 1)}"
            f"{without}, "
            f"from step {facts['from_step']} by {_SOURCES[facts['source']]}; {repeated or 'no'} "
            f"step{'s' * (repeated != 1)} to repeat"
        )
    if event == "goes on":
        parts = ", ".join(f"{k.replace('_', ' ')} {s:.1f}" for k, s in facts["parts"].items())
        seconds = f"{facts['seconds']:.1f} s"
        return f"step {facts['step']} committed {seconds} after the failure ({parts})"
    if event == "takes over":
        return (
            f"another controller continues the run with hosts {', '.join(map(str, facts['hosts']))}"
        )
    if event == "restart":
        hosts = ", ".join(map(str, facts["hosts"]))
        return f"restarts with hosts {hosts} in {facts['seconds']:g} s: {facts['why']}"
    if event == "masked":
        return f"chips {facts['chips']} are quarantined: {facts['why']}"
    if event == "struck out":
        return f"host {facts['host']} has failed {facts['times']} times and is excluded"
    if event == "gives up":
        return f"gives up: {facts['why']}"
    if event == "done" and facts["failures"]:
        failures = f"{facts['failures']} failure{'s' * (facts['failures'] != 1)}"
        if not facts["steps"]:
            return f"{failures} in {facts['seconds']:.1f} s; no step was reported"
        return (
            f"{facts['steps']} steps, {failures}, {facts['seconds_lost']:.1f} of "
            f"{facts['seconds']:.1f} s lost: goodput {facts['goodput']:.1%}"
        )
    return ""


class Recovery:
    """A clock that runs from a failure to the next committed step."""

    def __init__(self, failed_at: float | None = None, last_commit: float | None = None) -> None:
        self.failed_at = failed_at  # None if it does not run
        self.last_commit = last_commit  # also in an earlier generation
        self.repeated_steps = 0
        self._parts: dict[str, float] = {}

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part so far."""
        return {name: round(seconds, 3) for name, seconds in self._parts.items()}

    def begin(self, noticed_after: float) -> None:
        """Start the clock, or go on if it runs, for a failure that was noticed late."""
        began = time.monotonic() if self.failed_at is None else self.failed_at
        self.failed_at = began - noticed_after
        self._parts = {"noticed": self._parts.get("noticed", 0.0) + noticed_after}

    def reach(self, part: str) -> None:
        """Record the end of a part that began with the failure."""
        if self.failed_at is not None:
            self._parts[part] = time.monotonic() - self.failed_at

    def record(self, parts: dict[str, Any]) -> None:
        """Record the seconds of parts in one worker; the slowest worker counts."""
        for name, seconds in parts.items():
            self._parts[str(name)] = max(self._parts.get(str(name), 0.0), float(seconds))

    def end(self, now: float, typical_step: float) -> dict[str, Any]:
        """Stop the clock at a committed step; return the facts of the "goes on" event."""
        assert self.failed_at is not None
        seconds = now - self.failed_at
        lost = seconds if self.last_commit is None else now - self.last_commit - typical_step
        first_step = max(seconds - sum(self._parts.values()), 0)
        facts = {
            "seconds": round(seconds, 3),
            "repeated": self.repeated_steps,
            "lost": round(max(lost, 0) + self.repeated_steps * typical_step, 3),
            "parts": {**self.parts, "first_step": round(first_step, 3)},
        }
        self.failed_at, self._parts = None, {}
        return facts


# The output of processes ------------------------------------------------------------------------

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
    ended nevertheless; if `is_ending` then returns a true value, the output is dropped. What cannot
    be written, to a full disk or a closed stream, is dropped too. On a terminal, each process has a
    colour. Without `prefix`, lines are written as they are.
    """

    def __init__(
        self,
        num_processes: int,
        while_blocked: Callable[[], object],
        *,
        is_ending: Callable[[], object] = lambda: False,
        prefix: bool = True,
    ) -> None:
        self._width, self._has_prefix = len(str(num_processes - 1)), prefix
        self._while_blocked, self._is_ending = while_blocked, is_ending
        self._has_dropped = False
        streams: dict[int, TextIO | None] = {1: sys.stdout, 2: sys.stderr}  # None if it is closed
        self._files = {stream: file for stream, file in streams.items() if file is not None}
        self._splitters: defaultdict[tuple[int, int], LineSplitter] = defaultdict(LineSplitter)
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        self._has_colour = {s: file.isatty() and not plain for s, file in self._files.items()}

    def __call__(self, process: int, stream: int, data: bytes) -> None:
        """Take output that a process wrote to its stdout (1) or stderr (2)."""
        if stream not in self._files:
            return
        lines = without_gloo(self._splitters[process, stream].feed(data))
        prefix = f"[{process:{self._width}}]"
        if self._has_colour[stream]:
            prefix = f"\033[{COLOURS[process % len(COLOURS)]}m{prefix}\033[0m"
        start = f"{prefix} ".encode() if self._has_prefix else b""
        self._write(self._files[stream].fileno(), b"".join(start + line + b"\n" for line in lines))

    def _write(self, fd: int, text: bytes) -> None:
        """Write everything, without ever blocking for long."""
        left = memoryview(text)
        while left:
            if select.select([], [fd], [], 0.1)[1]:
                try:
                    left = left[os.write(fd, left[: select.PIPE_BUF]) :]
                except BlockingIOError:  # another program made it non-blocking
                    pass
                except BrokenPipeError:
                    raise
                except OSError as error:
                    self._drop(error)
                    return
            else:
                self._while_blocked()
                if self._is_ending():
                    return

    def _drop(self, error: OSError) -> None:
        if not self._has_dropped:
            self._has_dropped = True
            say(f"ftmesh: output is lost: {error.strerror}")


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
