"""Watching progress: who of several processes is stuck, from what each of them was last seen doing.

A process that is alive and does nothing holds up all others, which then wait where they should: in
the middle of a step, or for its commit. So one that waits for others is never to blame while there
is one that does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

TIMES = 10  # a step may take so many times as long as recent ones do
RECENT = 50  # steps whose times count
SLACK = 1.0  # seconds on top of every deadline, for a machine that is busy

# What a process can be doing, and how many seconds it may; None where the deadline of a step holds.
PHASES: dict[str, float | None] = {
    "start": 300.0,
    "plan": 300.0,
    "compile": 3600.0,
    "restore": 600.0,
    "over": None,  # has been told of a new epoch
    "read": None,
    "step": None,
    "save": 600.0,
    "evaluate": 1800.0,
    "examine": 600.0,
    "leave": 60.0,
}
WAITING = ("agree", "commit", "failed")  # for the others, or for a word of the steward


@dataclass(frozen=True)
class Seen:
    """What a process was last seen doing, and how many seconds ago that began."""

    phase: str
    seconds: float


@dataclass
class Deadlines:
    """How long each phase may take; steps, as recent ones did, and no less than `limit` seconds.

    A collective that fails says so within `limit` seconds.
    """

    limit: float
    compile: float = 3600.0
    start: float = 300.0
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def took(self, seconds: float) -> None:
        """Note how long a step has taken."""
        self._steps.append(seconds)

    @property
    def usual_step(self) -> float:
        """Seconds of a step, as a rule; 0 where none is known."""
        return median(self._steps) if self._steps else 0.0

    def of(self, phase: str) -> float:
        """Seconds after which a process that is still in `phase` is late."""
        if phase in WAITING:
            return float("inf")
        fixed = {"compile": self.compile, "start": self.start}.get(phase, PHASES.get(phase))
        return SLACK + (self.limit + TIMES * self.usual_step if fixed is None else fixed)

    def stuck(self, seen: Mapping[int, Seen]) -> set[int]:
        """The processes to blame for no progress; none where there is progress, or all wait.

        Inside a step one cannot see who waits for whom. So of those that are late in a step none is
        to blame while another is late elsewhere, or has not come to the step.

        >>> deadlines = Deadlines(limit=5)
        >>> deadlines.stuck({0: Seen("step", 7), 1: Seen("read", 7), 2: Seen("failed", 2)})
        {1}
        """
        late = {number for number, each in seen.items() if each.seconds > self.of(each.phase)}
        if any(each.phase == "failed" and each.seconds > SLACK for each in seen.values()):
            late |= {  # a step of theirs would have failed, too
                number
                for number, each in seen.items()
                if each.phase in ("read", "step") and each.seconds > self.limit + SLACK
            }
        in_step = {number for number in late if seen[number].phase == "step"}
        if late - in_step:
            return late - in_step
        if any(each.phase not in (*WAITING, "step") for each in seen.values()):
            return set()  # one is on its way there, and has its own deadline
        return in_step
