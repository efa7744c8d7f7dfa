"""The parent of a self-test: starts workers, watches their journal, and goes on without the dead.

It never creates JAX's devices: a TPU belongs to one process, and a process that waits for a chip
cannot be interrupted, only killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ftmesh.command_line import one_line
from ftmesh.elastic.child_process import ChildProcess, Reaper
from ftmesh.errors import PEER_LOST, RESTART
from ftmesh.planning.profiles import PROFILE_VARIABLE
from ftmesh.selftest.context import Settings
from ftmesh.selftest.journal import DIED, HUNG, LEFT_OUT, NO_TIME, Event, Journal

PARTED, AGAIN = PEER_LOST, RESTART  # of a worker: others did not come; a new one is needed
KILLED = 128 + signal.SIGKILL
MARGIN = 10.0  # seconds for processes that wait for one that was killed
START_SECONDS = 60.0  # for Python, JAX and the devices to start
POLL_SECONDS = 0.1
MAX_OUTSIDE = 2  # workers that end outside of any check
MAX_PARTINGS = 8  # of the processes
LAST_LINES = 8  # of a dead worker's output
_MAX_READ = 65_536
_START = "the start"

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Ending:
    """How a self-test ended: why checks may be missing, and the status for bad arguments."""

    reason: str = ""  # empty if all checks are through
    status: int | None = None  # exit status of a worker that could not start


@dataclass(frozen=True)
class _Phase:
    """What a worker is doing, and for how long it may."""

    check: str
    since: float
    limit: float
    is_waiting: bool = False  # for other processes


def supervise(settings: Settings, log: Path, progress: Progress) -> Ending:
    """Run workers until all checks have a result, or no more can be had."""
    journal, outside, partings = Journal(settings.journal), 0, 0
    join_timeout = settings.join_timeout
    while True:
        own = replace(settings, join_timeout=min(join_timeout, max(1.0, settings.seconds_left)))
        watch = _Watch(own, journal, log, progress)
        status = watch.run()
        join_timeout = settings.timeout + 3 * MARGIN + START_SECONDS  # for those killed later
        last = watch.events[-1]
        if status == 0:
            return Ending()
        if last["event"] == "stopped":
            return Ending(last["reason"], last["status"])
        if settings.seconds_left <= 0:
            return Ending(NO_TIME)
        partings += status == PARTED
        outside += watch.ended_outside and status not in (AGAIN, PARTED)
        if outside >= MAX_OUTSIDE:
            return Ending(_why_no_start(watch.events))
        if partings >= MAX_PARTINGS:
            return Ending("the processes lost contact with each other too often")


def _why_no_start(events: list[Event]) -> str:
    ends = [event for event in events if event["event"] in ("ended", "parted")]
    return f"the worker cannot start: {ends[-1]['text']}" if ends else "the worker cannot start"


class _Watch:
    """One worker, from its start to its end."""

    def __init__(self, settings: Settings, journal: Journal, log: Path, progress: Progress) -> None:
        self._settings, self._journal, self._log, self._progress = settings, journal, log, progress
        self._first = len(journal.read())
        self._log_start = log.stat().st_size if log.exists() else 0
        limit = settings.join_timeout + START_SECONDS
        self._phase = _Phase(_START, time.monotonic(), limit)
        self.events: list[Event] = []  # of this worker
        self._journal.append("worker", number=self._count("worker") + 1)

    @property
    def ended_outside(self) -> bool:
        """True if the worker ended outside of any check."""
        return self._phase.check == _START and not self._phase.is_waiting

    def run(self) -> int:
        """Run the worker to its end, or kill it; record how it ended, and return its status."""
        command = [sys.executable, "-m", "ftmesh.selftest.worker", self._settings.to_json()]
        reaper = Reaper()
        worker = ChildProcess(0, command, _environment(self._settings), kill_after=1.0)
        try:
            reaper.watch(worker)
            worker.release()
            while not worker.poll():
                self._keep_output(worker)
                self._follow()
                if self._is_over():
                    worker.end(signal.SIGKILL)
                    worker.close()
                    self._follow()
                    self._record_kill()
                    return PARTED if self._phase.is_waiting else KILLED
                time.sleep(POLL_SECONDS)
            self._keep_output(worker)
        finally:
            worker.close()
            reaper.close()
        self._follow()
        status = worker.status or 0
        if status in (0, PARTED, AGAIN) or self.events[-1]["event"] == "stopped":
            return status
        words = self._last_words(status)
        if self._phase.is_waiting:  # likely since the process that it waited for has gone
            self._append("parted", "", DIED, words)
            return PARTED
        self._append("ended", self._phase.check, DIED, words)
        return status

    def _is_over(self) -> bool:
        is_late = time.monotonic() > self._phase.since + self._phase.limit
        return is_late or self._settings.seconds_left <= 0

    def _record_kill(self) -> None:
        if self._settings.seconds_left <= 0:
            self._append("ended", self._phase.check, LEFT_OUT, NO_TIME)
        elif self._phase.is_waiting:
            self._append("parted", "", HUNG, "it waited for other processes and was killed")
        else:
            text = f"it did not end within {self._phase.limit:.0f} s"
            self._append("ended", self._phase.check, HUNG, text)

    def _append(self, event: str, check: str, how: str, text: str) -> None:
        seconds = round(min(time.monotonic() - self._phase.since, self._phase.limit), 1)
        check = "" if check == _START else check
        self._journal.append(event, check=check, how=how, text=text, seconds=seconds)
        self._follow()

    def _count(self, event: str) -> int:
        return sum(one["event"] == event for one in self._journal.read())

    def _follow(self) -> None:
        """Read what the worker has written since, and note which phase it is in."""
        events = self._journal.read()
        for event in events[self._first + len(self.events) :]:
            self.events.append(event)
            self._phase = self._next_phase(event)
        names: list[str] = next(
            (e["names"] for e in reversed(events) if e["event"] == "checks"), []
        )
        done = len({e["result"]["name"] for e in events if e["event"] == "result"})
        total = max(len(names), done + 1)
        self._progress(done, total, self._phase.check)

    def _next_phase(self, event: Event) -> _Phase:
        now, old = time.monotonic(), self._phase
        if event["event"] == "begin":
            return _Phase(event["check"], now, event["limit"])
        if event["event"] == "done":
            return _Phase(event["result"]["name"], now, old.limit + 4 * MARGIN, is_waiting=True)
        if event["event"] in ("joined", "checks", "result", "finished"):
            is_waiting = event["event"] != "joined"
            return _Phase(_START, now, self._settings.timeout + START_SECONDS, is_waiting)
        return old

    def _keep_output(self, worker: ChildProcess) -> None:
        """Move what the worker has written to the log."""
        with open(self._log, "ab") as file:
            for stream in worker.streams.values():
                with contextlib.suppress(BlockingIOError):
                    while data := os.read(stream.fileno(), _MAX_READ):
                        file.write(data)

    def _last_words(self, status: int) -> str:
        """How a worker ended: its status or signal, and the last lines that it wrote."""
        how = f"it exited with status {status}"
        if status > 128:
            with contextlib.suppress(ValueError):
                how = f"it was killed by {signal.Signals(status - 128).name}"
        with open(self._log, "rb") as file:
            file.seek(self._log_start)
            text = file.read().decode(errors="replace")
        lines = [one_line(line) for line in text.splitlines() if line.strip()]
        said = " / ".join(lines[-LAST_LINES:])
        return f"{how}; its last lines: {said}" if said else f"{how} and wrote nothing"


def _environment(settings: Settings) -> dict[str, str]:
    # What is measured here does not depend on what was measured before.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", PROFILE_VARIABLE: ""}
    if settings.mesh is not None:
        environment["JAX_PLATFORMS"] = "cpu"
    return environment
