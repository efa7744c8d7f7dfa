"""Events of a run: a line for people, a line of JSON, and what failures cost in the end."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from ftmesh.errors import ArgumentError
from ftmesh.files import open_nonblocking

_SOURCES = {
    "devices": "the state on the devices",
    "host memory": "the in-memory checkpoint",
    "checkpoint": "a checkpoint",
    "start": "the beginning",
}


class EventLog:
    """Counts failures and writes events: by `say` for people, as JSON lines to the file `path`."""

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
    try:
        return open(path, "a", encoding="utf-8", opener=open_nonblocking)
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}") from error


def describe_event(event: str, facts: dict[str, Any]) -> str:
    """Return the line that a person reads; empty for events that concern programs only."""
    if event == "failed":
        return (
            f"host {facts['host']} is lost (process {facts['process']}, chips {facts['chips']}): "
            f"it {facts['how']}"
        )
    if event == "epoch" and facts["epoch"] > 1:
        how = "in place" if facts["in_place"] else "in new processes"
        without = f" without {facts['failed']}" if facts["failed"] else ""
        repeated = facts["repeated"]
        return (
            f"generation {facts['epoch']}: continues {how} with {facts['live']} chips{without}, "
            f"from step {facts['from_step']} by {_SOURCES[facts['source']]}; {repeated or 'no'} "
            f"step{'s' * (repeated != 1)} to repeat"
        )
    if event == "goes on":
        parts = ", ".join(f"{k.replace('_', ' ')} {s:.1f}" for k, s in facts["parts"].items())
        seconds = f"{facts['seconds']:.1f} s"
        return f"step {facts['step']} committed {seconds} after the failure ({parts})"
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
        """Record what parts took in one worker; the slowest worker counts."""
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
