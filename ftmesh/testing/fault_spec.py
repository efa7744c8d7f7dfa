"""Faults to inject into a run: which process fails how and when, in text form or at random.

    kill@2:30              kill process 2 before step 30
    stop@0:12:collective   stop process 0 in the middle of step 12
    kill@*:t=120           kill whichever process gets there first, 120 s after the run started
    slow@1:30,0.5,20       add 0.5 s to each of 20 steps of process 1, from step 30 on
    random:7               one to three faults drawn with seed 7; random:7:2 draws two

Join several with ``;``. The kinds:

    kill, segv        the process ends by that signal
    stop              the process is stopped (SIGSTOP); its connections stay open
    hold              a thread holds the interpreter forever, so no Python code runs
    stuck             the calling thread blocks forever; other threads continue
    raise             an unexpected exception
    store             the process and the peer store of its host are killed
    service, all      JAX's coordination service is killed; all workers are killed
    slow              some steps take longer, by the seconds given
    wrong             the first chip of the process computes a wrong gradient
    torn              a checkpoint file is truncated to half, and the process killed
    full              no disk space is left for a checkpoint

The moments: `start` (before joining), `compile`, `step` (before dispatch), `collective` (a few
milliseconds after dispatch, or the seconds given), `commit` (results are ready), `checkpoint`,
`evaluate`, `recovery` (while a generation after the first starts). At `start`, `compile` and
`recovery` the step is ignored: the fault fires the first time that moment is reached.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from ftmesh.errors import ArgumentError

FATAL_KINDS = ("kill", "stop", "segv", "hold", "store", "service", "all")
MOMENTS = (
    "start", "compile", "step", "collective", "commit", "checkpoint", "evaluate", "recovery",
)  # fmt: skip
STEPLESS_MOMENTS = ("start", "compile", "recovery")
# The moments each kind allows. The default is "step" where that is allowed, else the first.
KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(FATAL_KINDS, MOMENTS),
    **dict.fromkeys(("stuck", "raise"), tuple(m for m in MOMENTS if m != "collective")),
    "slow": ("step",),
    "wrong": ("step",),
    "torn": ("checkpoint",),
    "full": ("checkpoint",),
}
ANY_PROCESS = -1  # whichever process gets there first
EXAMPLES = "kill@2:30, stop@0:12:collective, kill@*:t=120, slow@1:30,0.5,20 or random:7"
_INT = r"[0-9]{1,9}"
_DECIMAL = rf"{_INT}(\.{_INT})?"
_FORMAT = re.compile(
    rf"(?P<kind>[a-z]+)@(?P<process>{_INT}|\*):((?P<step>{_INT})|t=(?P<after>{_DECIMAL}))"
    rf"(:(?P<moment>[a-z]+))?(,(?P<seconds>{_DECIMAL}))?(,(?P<num_steps>{_INT}))?"
)
_RANDOM = re.compile(rf"random:(?P<seed>{_INT})(:(?P<count>[1-9][0-9]{{0,2}}))?")
_SECONDS, _NUM_STEPS = {"slow": 0.5}, {"slow": 10}  # defaults
_COLLECTIVE_DELAY = 0.003  # seconds after dispatch


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that fires once in a run, at the first chance from its step or time on.

    Raises:
        ArgumentError: The kind is unknown, or cannot happen at that moment.
    """

    kind: str  # one of `KINDS`
    process: int  # or `ANY_PROCESS`
    step: int = 0
    after: float | None = None  # seconds since the start of the run, instead of a step
    moment: str = ""  # one of `MOMENTS`
    seconds: float = 0.0  # how much slower a step gets, or the delay into the collective
    num_steps: int = 0  # that are slow or wrong

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError(f"unknown fault {self.kind}: give one of {', '.join(KINDS)}")
        moments = KINDS[self.kind]
        defaults = {
            "moment": self.moment or ("step" if "step" in moments else moments[0]),
            "seconds": self.seconds or _SECONDS.get(self.kind, _COLLECTIVE_DELAY),
            "num_steps": self.num_steps or _NUM_STEPS.get(self.kind, 1),
        }
        for name, value in defaults.items():
            object.__setattr__(self, name, value)
        if self.moment not in moments:
            raise ArgumentError(
                f"fault {self.kind} cannot happen at the moment {self.moment!r}: give "
                f"{' or '.join(moments)}"
            )

    def __str__(self) -> str:
        process = "*" if self.process == ANY_PROCESS else self.process
        when = self.step if self.after is None else f"t={self.after:g}"
        return f"{self.kind}@{process}:{when}:{self.moment},{self.seconds:g},{self.num_steps}"


def parse_faults(text: str, *, hosts: int = 1, steps: int = 40) -> list[Fault]:
    """Parse the text form; random faults choose from `hosts` hosts and steps 1 to `steps`.

    >>> [str(fault) for fault in parse_faults("kill@2:30; torn@*:t=9")]
    ['kill@2:30:step,0.003,1', 'torn@*:t=9:checkpoint,0.003,1']
    """
    faults: list[Fault] = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        if match := _RANDOM.fullmatch(part):
            count = int(match["count"]) if match["count"] else None
            faults += draw_faults(int(match["seed"]), count, hosts=hosts, steps=steps)
            continue
        match = _FORMAT.fullmatch(part)
        if match is None:
            raise ArgumentError(
                f"{part!r:.60} is not a fault: the form is KIND@PROCESS:STEP[:MOMENT][,SECONDS"
                f"[,STEPS]], as in {EXAMPLES}"
            )
        fault = Fault(
            kind=match["kind"],
            process=ANY_PROCESS if match["process"] == "*" else int(match["process"]),
            step=int(match["step"] or 0),
            after=float(match["after"]) if match["after"] else None,
            moment=match["moment"] or "",
            seconds=float(match["seconds"] or 0),
            num_steps=int(match["num_steps"] or 0),
        )
        faults.append(fault)
    return faults


def draw_faults(
    seed: int, count: int | None = None, *, hosts: int = 1, steps: int = 40
) -> list[Fault]:
    """Draw `count` faults at random, by default one to three."""
    rng = random.Random(seed)
    faults: list[Fault] = []
    for index in range(count or rng.randint(1, 3)):
        kind = rng.choice(tuple(KINDS))
        # Only a fault causes a recovery, so the first fault cannot wait for one.
        moment = rng.choice([m for m in KINDS[kind] if index or m != "recovery"])
        process = rng.randrange(hosts)
        step = 0 if moment in STEPLESS_MOMENTS else rng.randint(1, steps)
        faults.append(Fault(kind=kind, process=process, step=step, moment=moment))
    return faults


def draw_timed_faults(seed: int, interval: float, seconds: float) -> list[Fault]:
    """Draw a fault every `interval` seconds of a run of `seconds`, for any process."""
    rng = random.Random(seed)
    kinds = [*FATAL_KINDS, "stuck", "raise"]  # those that force a recovery
    return [
        Fault(kind=rng.choice(kinds), process=ANY_PROCESS, after=interval * index)
        for index in range(1, int(seconds / interval) + 1)
    ]
