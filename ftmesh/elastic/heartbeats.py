"""Watching progress: who of several processes is stuck, from what each of them was last seen doing.

A process that is alive and does nothing holds up all others, which then wait where they should: in
the middle of a step, or for its commit. So one that waits for others is never to blame while there
is one that does not.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from ftmesh.command_line import number
from ftmesh.errors import ArgumentError

TIMES = 10  # what has been seen to take a while may take so many times as long
RECENT = 50  # steps whose times count
SILENCE = 5.0  # seconds, and twice the limit of a collective
SLACK = 1.0  # seconds on top of every deadline, for a machine that is busy

# What a process can be doing, and for how many seconds where it has not been seen to do it before.
PHASES = {
    "start": 300.0,
    "plan": 300.0,
    "compile": 3600.0,
    "restore": 600.0,
    "read": 60.0,
    "step": 600.0,
    "save": 600.0,
    "evaluate": 1800.0,
    "examine": 600.0,
    "over": 120.0,  # has been told of a new epoch, and is still in the middle of something
    "leave": 60.0,
}
WAITING = ("agree", "commit", "failed")  # for the others, or for a word of the steward


@dataclass(frozen=True)
class Seen:
    """What a process was last seen doing, and how many seconds ago that began."""

    phase: str
    seconds: float
    step: int = 0


@dataclass
class Deadlines:
    """How long each phase may take: what is `given`, or `PHASES` and ten times as long as it did.

    Steps have ten times their usual time, and `limit` seconds: within these a collective says that
    it has failed. What is given for a step counts until one has been seen.
    """

    limit: float
    given: Mapping[str, float] = field(default_factory=dict)
    _took: dict[str, deque[float]] = field(default_factory=dict)

    def took(self, phase: str, seconds: float) -> None:
        """Note how long a phase has taken."""
        self._took.setdefault(phase, deque(maxlen=RECENT)).append(seconds)

    @property
    def usual_step(self) -> float:
        """Seconds of a step, as a rule; 0 where none is known."""
        return median(self._took["step"]) if "step" in self._took else 0.0

    @property
    def silence(self) -> float:
        """Seconds without any sign of life after which a process counts as stuck."""
        return SILENCE + 2 * self.limit

    def of(self, phase: str) -> float:
        """Seconds after which a process that is still in `phase` is late."""
        if phase in WAITING:
            return float("inf")
        is_known = phase in ("read", "step") and "step" in self._took
        if phase in self.given and not (phase == "step" and is_known):
            return SLACK + self.given[phase]
        if is_known:
            return SLACK + self.limit + TIMES * self.usual_step
        longest = max(self._took.get(phase, (0.0,)))
        return SLACK + max(PHASES.get(phase, self.limit), self.limit + TIMES * longest)

    def stuck(self, seen: Mapping[int, Seen]) -> set[int]:
        """The processes to blame for no progress; none where there is progress, or all wait.

        Inside a step one cannot see who waits for whom. So of those that are late in a step none is
        to blame while another is late elsewhere, or has not come to the step. Where a collective of
        a step has failed, whoever has not come to that step by then has had its time.

        >>> deadlines = Deadlines(limit=5)
        >>> deadlines.stuck({0: Seen("step", 3, 9), 1: Seen("save", 7, 8), 2: Seen("failed", 2, 9)})
        {1}
        """
        late = {number for number, each in seen.items() if each.seconds > self.of(each.phase)}
        failed = [e.step for e in seen.values() if e.phase == "failed" and e.seconds > SLACK]
        if failed:
            late |= {
                number
                for number, each in seen.items()
                if each.phase not in WAITING
                and each.seconds > self.limit + SLACK
                and (each.step, each.phase != "read") < (max(failed), True)
            }
        in_step = {number for number in late if seen[number].phase == "step"}
        if late - in_step:
            return late - in_step
        if any(each.phase not in (*WAITING, "step") for each in seen.values()):
            return set()  # one is on its way there, and has its own deadline
        return in_step


def parse_limits(text: str) -> dict[str, float]:
    """Limits of phases, as they are written.

    >>> parse_limits("compile=60,save=30")
    {'compile': 60.0, 'save': 30.0}
    """
    limits, seconds = {}, number(0.001)
    for part in filter(None, text.split(",")):
        phase, _, text = (word.strip() for word in part.partition("="))
        try:
            limits[phase] = seconds(text)
        except ArgumentTypeError:
            phase = ""
        if phase not in PHASES:
            raise ArgumentError(
                f"{part!r} is no limit: give a phase of {', '.join(PHASES)} and its seconds, as "
                "compile=60"
            )
    return limits
