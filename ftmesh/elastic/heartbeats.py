"""Heartbeats: the last reported phase of each worker, and which workers are stuck.

A worker that makes no progress blocks all others, which then wait inside a step or for its commit.
So a waiting worker is not to blame while another one does not wait.
"""

from __future__ import annotations

import contextlib
import time
from argparse import ArgumentTypeError
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ftmesh.command_line import number
from ftmesh.elastic.rpc import Channel
from ftmesh.errors import ArgumentError

SLOWDOWN = 10  # a phase may take this many times as long as it did before
STEPS_REMEMBERED = 50
SILENCE_SECONDS = 5.0  # without a heartbeat, plus twice the timeout of a collective
SLACK_SECONDS = 1.0  # added to every timeout, for a busy machine

# The phases of a worker, and the default timeout of each in seconds.
PHASE_TIMEOUTS = {
    "start": 300.0,
    "plan": 300.0,
    "compile": 3600.0,
    "restore": 600.0,
    "read": 60.0,
    "step": 600.0,
    "save": 600.0,
    "evaluate": 1800.0,
    "examine": 600.0,
    "over": 120.0,  # a new generation has begun, and it is still in a step of the old one
    "leave": 60.0,
}
WAITING_PHASES = ("agree", "commit", "failed")  # for the other workers or the controller


@dataclass(frozen=True)
class Activity:
    """The last phase that a worker reported, and for how many seconds."""

    phase: str
    seconds: float
    step: int = 0


@dataclass
class Member:
    """A worker. Times are those of `time.monotonic`."""

    process: int
    host: int
    chips: str  # its block of the mesh; empty if only its devices know
    channel: Channel | None = None
    pid: int | None = None
    phase: str = "start"
    step: int = 0
    since: float = field(default_factory=time.monotonic)  # when the phase began
    last_heard: float = field(default_factory=time.monotonic)
    closed_at: float | None = None  # when its connection closed
    error: str = ""
    has_left: bool = False  # it is done
    is_idle: bool = False  # it has no chip in the program
    stacks_at: float | None = None  # when its stacks were written

    def activity(self, now: float) -> Activity:
        """Return its last reported phase."""
        return Activity(self.phase, now - self.since, self.step)

    def send(self, message: dict[str, Any], data: bytes = b"") -> None:
        """Send it a message. A closed connection is noticed elsewhere."""
        if self.channel is not None:
            with contextlib.suppress(OSError):
                self.channel.send(message, data)

    def __str__(self) -> str:
        chips = f", chips {self.chips}" if self.chips else ""
        return f"host {self.host} (process {self.process}{chips})"


@dataclass(frozen=True)
class Verdict:
    """What happens to all workers: "restart" or "end"."""

    action: str
    reason: str
    is_orderly: bool = False  # the workers exit by themselves


@dataclass
class ProgressMonitor:
    """Computes the timeout of each phase, and which workers are stuck.

    A phase that is not in `phase_timeouts` has the seconds in `PHASE_TIMEOUTS` or ten times the
    longest that it took. Once a step was seen, steps have ten times their median.
    """

    collective_timeout: float
    phase_timeouts: Mapping[str, float] = field(default_factory=dict)
    _durations: dict[str, deque[float]] = field(default_factory=dict)

    def record(self, phase: str, seconds: float) -> None:
        """Remember how long a phase took."""
        self._durations.setdefault(phase, deque(maxlen=STEPS_REMEMBERED)).append(seconds)

    @property
    def typical_step(self) -> float:
        """Median seconds of a step; 0 if none was seen."""
        return median(self._durations["step"]) if "step" in self._durations else 0.0

    @property
    def silence_timeout(self) -> float:
        """Seconds without a heartbeat after which a worker counts as stuck."""
        return SILENCE_SECONDS + 2 * self.collective_timeout

    def timeout(self, phase: str) -> float:
        """Return the seconds after which a worker is late in `phase`."""
        if phase in WAITING_PHASES:
            return float("inf")
        has_steps = phase in ("read", "step") and "step" in self._durations
        if phase in self.phase_timeouts and not (phase == "step" and has_steps):
            return SLACK_SECONDS + self.phase_timeouts[phase]
        if has_steps:
            return SLACK_SECONDS + self.collective_timeout + SLOWDOWN * self.typical_step
        longest = max(self._durations.get(phase, (0.0,)))
        first = PHASE_TIMEOUTS.get(phase, self.collective_timeout)
        return SLACK_SECONDS + max(first, self.collective_timeout + SLOWDOWN * longest)

    def find_stuck(self, activities: Mapping[int, Activity]) -> set[int]:
        """Return the workers that block the run; none if there is progress or all wait.

        Inside a step it is unknown who waits for whom. So a worker that is late in a step is not
        to blame while another is late elsewhere or has not reached the step. Once a collective of a
        step has failed, a worker that has not reached that step is late.
        """
        late = {p for p, a in activities.items() if a.seconds > self.timeout(a.phase)}
        failed = [a for a in activities.values() if a.phase == "failed"]
        failed_steps = [a.step for a in failed if a.seconds > SLACK_SECONDS]
        if failed_steps:
            late |= {
                process
                for process, a in activities.items()
                if a.phase not in WAITING_PHASES
                and a.seconds > self.collective_timeout + SLACK_SECONDS
                and (a.step, a.phase != "read") < (max(failed_steps), True)
            }
        in_step = {process for process in late if activities[process].phase == "step"}
        if late > in_step:
            return late - in_step
        if any(a.phase not in (*WAITING_PHASES, "step") for a in activities.values()):
            return set()  # one is on its way to the step, and has its own timeout
        return in_step


def parse_phase_timeouts(text: str) -> dict[str, float]:
    """Parse timeouts of phases, as in "compile=60,save=30"."""
    timeouts, parse_seconds = {}, number(0.001)
    for part in filter(None, text.split(",")):
        phase, _, seconds = (word.strip() for word in part.partition("="))
        try:
            timeouts[phase] = parse_seconds(seconds)
        except ArgumentTypeError:
            phase = ""
        if phase not in PHASE_TIMEOUTS:
            raise ArgumentError(
                f"{part!r} is not a timeout: give a phase of {', '.join(PHASE_TIMEOUTS)} and its "
                "seconds, as in compile=60"
            )
    return timeouts
