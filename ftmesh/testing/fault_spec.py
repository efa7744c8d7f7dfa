"""Fault: what goes wrong in which process, and when; its text form; faults drawn at random.

    kill@2:30              process 2 is killed before step 30
    stop@0:12:collective   process 0 is stopped in the middle of step 12
    kill@*:t=120           whichever process comes first, 120 seconds after the start of the run
    slow@1:30,0.5,20       20 steps of process 1, from the 30th on, take half a second more
    random:7               one to three faults, drawn with seed 7; random:7:2 draws two

Several are joined by ``;``. The kinds:

    kill, segv        the process ends by that signal
    stop              it is stopped (SIGSTOP), and its connections stay open
    hold              a thread holds the interpreter for good: no Python runs any more
    stuck             the thread that is there waits for ever, and the others go on
    raise             an error that nothing expects
    keeper            the process and the keeper of its host are killed
    service, all      JAX's coordination service is killed; all workers are
    slow              some steps take so many seconds more
    wrong             the first chip of the process computes a wrong gradient
    torn              a file of a checkpoint is cut in half, and the process killed
    full              no space is left for a checkpoint

The moments: `start` (before joining), `compile`, `step` (before it is dispatched), `collective` (a
few milliseconds later, or so many seconds), `commit` (results are ready), `checkpoint`, `evaluate`,
`recovery` (while an epoch after the first is made ready). At `start`, `compile` and `recovery` the
step does not count, and a fault strikes at the first chance.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from ftmesh.errors import ArgumentError

ENDS = ("kill", "stop", "segv", "hold", "keeper", "service", "all")  # of whole processes
MOMENTS = (
    "start",
    "compile",
    "step",
    "collective",
    "commit",
    "checkpoint",
    "evaluate",
    "recovery",
)
WITHOUT_STEP = ("start", "compile", "recovery")
# The moments at which each kind can be; a step, where that is one of them and none is given.
KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(ENDS, MOMENTS),
    **dict.fromkeys(("stuck", "raise"), tuple(each for each in MOMENTS if each != "collective")),
    "slow": ("step",),
    "wrong": ("step",),
    "torn": ("checkpoint",),
    "full": ("checkpoint",),
}
ANY = -1  # in place of a process: whichever comes first
EXAMPLES = "kill@2:30, stop@0:12:collective, kill@*:t=120, slow@1:30,0.5,20 or random:7"
_WHOLE = r"[0-9]{1,9}"
_SOME = rf"{_WHOLE}(\.{_WHOLE})?"
_FORM = re.compile(
    rf"(?P<kind>[a-z]+)@(?P<process>{_WHOLE}|\*):(?P<when>{_WHOLE}|t={_SOME})"
    rf"(:(?P<moment>[a-z]+))?(,(?P<seconds>{_SOME}))?(,(?P<num_steps>{_WHOLE}))?"
)
_RANDOM = re.compile(rf"random:(?P<seed>{_WHOLE})(:(?P<number>[1-9][0-9]{{0,2}}))?")
_SECONDS = {"slow": 0.5}  # more for each step; elsewhere, into a collective
_INTO_COLLECTIVE = 0.003
_NUM_STEPS = {"slow": 10}  # that are slow, or wrong

HARMLESS = tuple(KINDS)  # after which a run should end with the weights of an undisturbed one


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong once in a run, at the first chance from its step or time on."""

    kind: str
    process: int
    step: int = 0
    after: float | None = None  # seconds since the start of the run, in place of a step
    moment: str = ""
    seconds: float = 0.0
    num_steps: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError(f"{self.kind} is no fault: give one of {', '.join(KINDS)}")
        moments = KINDS[self.kind]
        defaults = {
            "moment": self.moment or ("step" if "step" in moments else moments[0]),
            "seconds": self.seconds or _SECONDS.get(self.kind, _INTO_COLLECTIVE),
            "num_steps": self.num_steps or _NUM_STEPS.get(self.kind, 1),
        }
        for name, value in defaults.items():
            object.__setattr__(self, name, value)
        if self.moment not in moments:
            raise ArgumentError(
                f"the fault {self.kind} cannot be at the moment {self.moment!r}: give "
                f"{' or '.join(moments)}"
            )

    def __str__(self) -> str:
        process = "*" if self.process == ANY else self.process
        when = self.step if self.after is None else f"t={self.after:g}"
        return f"{self.kind}@{process}:{when}:{self.moment},{self.seconds:g},{self.num_steps}"


def parse(text: str, *, hosts: int = 1, steps: int = 40) -> list[Fault]:
    """The faults of a text; those at random hit one of so many hosts within so many steps.

    >>> [str(fault) for fault in parse("kill@2:30; torn@*:t=9")]
    ['kill@2:30:step,0.003,1', 'torn@*:t=9:checkpoint,0.003,1']
    """
    found: list[Fault] = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        if at_random := _RANDOM.fullmatch(part):
            number = at_random["number"] and int(at_random["number"])
            found += draw(int(at_random["seed"]), number or None, hosts=hosts, steps=steps)
            continue
        given = _FORM.fullmatch(part)
        if given is None:
            raise ArgumentError(
                f"{part!r:.60} is no fault: the form is KIND@PROCESS:STEP[:MOMENT][,SECONDS"
                f"[,STEPS]], as in {EXAMPLES}"
            )
        when = given["when"]
        found.append(
            Fault(
                kind=given["kind"],
                process=ANY if given["process"] == "*" else int(given["process"]),
                step=0 if when.startswith("t=") else int(when),
                after=float(when[2:]) if when.startswith("t=") else None,
                moment=given["moment"] or "",
                seconds=float(given["seconds"] or 0),
                num_steps=int(given["num_steps"] or 0),
            )
        )
    return found


def draw(seed: int, number: int | None = None, *, hosts: int = 1, steps: int = 40) -> list[Fault]:
    """Faults at random, one to three unless told; the same seed draws the same.

    Those that wait for a recovery come after another, which has one follow.
    """
    chance = random.Random(seed)
    found: list[Fault] = []
    for place in range(number or chance.randint(1, 3)):
        kind = chance.choice(HARMLESS)
        moments = [each for each in KINDS[kind] if place or each != "recovery"]
        moment = chance.choice(moments)
        found.append(
            Fault(
                kind=kind,
                process=chance.randrange(hosts),
                step=0 if moment in WITHOUT_STEP else chance.randint(1, steps),
                moment=moment,
            )
        )
    return found


def draw_by_time(seed: int, every: float, seconds: float) -> list[Fault]:
    """A fault every so many seconds in a run of so many, in whichever process comes first.

    They are such that a run cannot go on as if nothing had happened.
    """
    chance = random.Random(seed)
    kinds = [*ENDS, "stuck", "raise"]
    return [
        Fault(kind=chance.choice(kinds), process=ANY, after=every * place)
        for place in range(1, int(seconds / every) + 1)
    ]
