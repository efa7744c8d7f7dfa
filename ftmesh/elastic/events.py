"""Events: what became of a run, a line for each, and what failures have cost in the end.

Recovery: how long it takes to go on after a failure, part by part, and what was lost by it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from ftmesh.errors import ArgumentError
from ftmesh.files import opened_at_once


class Events:
    """Tells `say` a line for each event and appends it to `path` as JSON, if there is one."""

    def __init__(self, say: Callable[[str], None], path: Path | None = None) -> None:
        self._say_line = say
        self._file = None if path is None else _appended_to(path)
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self.failures = 0
        self.seconds_lost = 0.0
        self.steps = 0

    def say(self, event: str, **facts: Any) -> None:
        """An event has come."""
        with self._lock:
            if event == "failed":
                self.failures += 1
            elif event == "goes on":
                self.seconds_lost += facts["lost"]
            if self._file is not None:
                line = {"time": round(time.time(), 3), "event": event, **facts}
                with contextlib.suppress(OSError):  # of a full disk: the run goes on
                    print(json.dumps(line), file=self._file, flush=True)
            text = in_words(event, facts)
            if text:
                self._say_line(text)

    def done(self, status: int, steps: int) -> None:
        """The run is over."""
        seconds = time.monotonic() - self._started
        goodput = max(0.0, 1 - self.seconds_lost / seconds) if seconds else 1.0
        if status and not steps:
            goodput = 0.0  # nothing came of it
        self.say(
            "done",
            status=status,
            steps=steps,
            failures=self.failures,
            seconds=round(seconds, 3),
            seconds_lost=round(self.seconds_lost, 3),
            goodput=round(goodput, 4),
        )

    def close(self) -> None:
        """No more of them."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what a full disk did not take is lost
                self._file.close()


def _appended_to(path: Path) -> TextIO:
    """A file to append lines to; a pipe that nobody reads is refused rather than waited for."""
    try:
        return open(path, "a", encoding="utf-8", opener=opened_at_once)
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}") from error


def in_words(event: str, facts: dict[str, Any]) -> str:
    """An event as a person reads it; empty where there is nothing to say.

    >>> in_words("restart", {"why": "host 2 is lost", "seconds": 1.0, "hosts": [0, 1, 3]})
    'restarts with hosts 0, 1, 3 in 1 s: host 2 is lost'
    """
    if event == "failed":
        return (
            f"host {facts['host']} is lost (process {facts['process']}, chips {facts['chips']}): "
            f"it {facts['how']}"
        )
    if event == "epoch" and facts["epoch"] > 1:
        how = "in place" if facts["in_place"] else "in new processes"
        less = f" less {facts['failed']}" if facts["failed"] else ""
        return (
            f"epoch {facts['epoch']}: goes on {how} with {facts['live']} chips{less}, from step "
            f"{facts['from_step']} by {_SOURCES[facts['source']]}; {_steps(facts['repeated'])} to "
            "repeat"
        )
    if event == "goes on":
        parts = ", ".join(
            f"{name.replace('_', ' ')} {took:.1f}" for name, took in facts["parts"].items()
        )
        return f"step {facts['step']} is committed {facts['seconds']:.1f} s after that ({parts})"
    if event == "restart":
        hosts = ", ".join(map(str, facts["hosts"]))
        return f"restarts with hosts {hosts} in {facts['seconds']:g} s: {facts['why']}"
    if event == "masked":
        return f"chips {facts['chips']} are left out from now on: {facts['why']}"
    if event == "struck out":
        return f"host {facts['host']} has failed {facts['times']} times, and stays out"
    if event == "gives up":
        return f"gives up: {facts['why']}"
    if event == "done" and facts["failures"]:
        failures = f"{facts['failures']} failure{'s' * (facts['failures'] != 1)}"
        if not facts["steps"]:  # none came, or a loop that does not say so
            return f"{failures} in {facts['seconds']:.1f} s, and no steps that it was told of"
        return (
            f"{facts['steps']} steps, {failures}, "
            f"{facts['seconds_lost']:.1f} of {facts['seconds']:.1f} s lost to that: goodput "
            f"{facts['goodput']:.1%}"
        )
    return ""


_SOURCES = {
    "devices": "what the devices hold",
    "host memory": "copies in the memory of hosts",
    "checkpoint": "a checkpoint",
    "start": "the beginning",
}


def _steps(number: int) -> str:
    return f"{number or 'no'} step{'s' * (number != 1)}"


class Recovery:
    """A clock that runs from a failure to the next step that counts.

    `failed_at` is when it began, if it runs; `last_commit` when a step last counted, if any did, in
    an epoch before too.
    """

    def __init__(self, failed_at: float | None = None, last_commit: float | None = None) -> None:
        self.failed_at, self.last_commit = failed_at, last_commit
        self.repeated = 0  # steps
        self._parts: dict[str, float] = {}

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part so far."""
        return {name: round(took, 3) for name, took in self._parts.items()}

    def begin(self, noticed: float) -> None:
        """Something has failed, so many seconds before it was noticed; perhaps in a recovery."""
        began = time.monotonic() if self.failed_at is None else self.failed_at
        self.failed_at = began - noticed
        self._parts = {"noticed": self._parts.get("noticed", 0.0) + noticed}

    def reach(self, part: str) -> None:
        """All have come so far: a part that goes back to the failure."""
        if self.failed_at is not None:
            self._parts[part] = time.monotonic() - self.failed_at

    def took(self, parts: dict[str, Any]) -> None:
        """What parts took in one process; the slowest counts."""
        for name, seconds in parts.items():
            self._parts[str(name)] = max(self._parts.get(str(name), 0.0), float(seconds))

    def end(self, now: float, usual_step: float) -> dict[str, Any]:
        """A step counts again: what it has taken, and what was lost since the last one before."""
        assert self.failed_at is not None
        seconds = now - self.failed_at
        lost = seconds if self.last_commit is None else now - self.last_commit - usual_step
        first = max(seconds - sum(self._parts.values()), 0)
        facts = {
            "seconds": round(seconds, 3),
            "repeated": self.repeated,
            "lost": round(max(lost, 0) + self.repeated * usual_step, 3),
            "parts": {**self.parts, "first_step": round(first, 3)},
        }
        self.failed_at, self._parts = None, {}
        return facts
