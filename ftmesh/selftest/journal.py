"""The journal of a self-test: what has begun and what came of it.

A line of JSON for each event, flushed to the disk before the next thing is tried, so that it says
what a process was doing when it was killed. The parent and its worker write to the same file:

    worker   a worker was started               checks   what there is to check
    joined   it has met the other processes     begin    a check has begun, with its time limit
    stopped  it cannot start, and why           done     the result of this process alone
    ended    a check hung, or its process died  result   the result of all processes
    parted   other processes did not come       finished all checks are through
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

PASSED, FAILED, HUNG, DIED, LEFT_OUT = STATUSES = ("passed", "failed", "hung", "died", "left out")
NO_TIME = "no time left"
MAX_BEGINNINGS = 2  # of a check that no process is known to have ended
SAME_TIME = 1.0  # seconds between the clocks of two parents
Event = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """What is wrong, and what to do about it."""

    text: str
    advice: str = ""


@dataclass(frozen=True)
class CheckResult:
    """The result of a check.

    Attributes:
        name: The check.
        status: One of `STATUSES`.
        problems: What is wrong; empty if it passed.
        notes: What else to know, such as why something was left out.
        data: Values for the report and for later checks, as JSON holds them.
        seconds: How long it took.
    """

    name: str = ""
    status: str = PASSED
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_bad(self) -> bool:
        """True if something is wrong."""
        return self.status in (FAILED, HUNG, DIED)

    def to_json(self) -> Event:
        """Return the result as values for `json.dumps`."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> CheckResult:
        """Return the result that `to_json` wrote."""
        problems = tuple(Problem(**problem) for problem in values["problems"])
        return CheckResult(**{**values, "problems": problems, "notes": tuple(values["notes"])})


class Journal:
    """An append-only file of events."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def append(self, event: str, **facts: Any) -> None:
        """Write an event, on a line of its own even if the last writer was killed in one."""
        line = json.dumps({"event": event, "time": round(time.time(), 3), **facts}).encode() + b"\n"
        with open(self.path, "ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read() == b"\n" else b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[Event]:
        """Return the events so far, without a line that was cut short."""
        events = []
        try:
            lines = self.path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return []
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and "event" in event:
                events.append(event)
        return events


# What came of each check ------------------------------------------------------------------------


def history(events: Iterable[Event]) -> Event:
    """Sum up a journal for the other processes: results, ends, and how often checks began."""
    summary: Event = {"result": {}, "ended": {}, "done": {}}
    begun: Counter[str] = Counter()
    for event in events:
        if event["event"] in ("result", "done"):
            summary[event["event"]][event["result"]["name"]] = event["result"]
        elif event["event"] == "ended" and event["check"]:
            summary["ended"][event["check"]] = event
        elif event["event"] == "begin":
            begun[event["check"]] += 1
    return {**summary, "begun": dict(begun)}


def merge_histories(by_process: Mapping[int, Event]) -> dict[str, CheckResult]:
    """Return the results that any process knows of, those of checks that never ended included."""
    names = dict.fromkeys(
        name
        for own in by_process.values()
        for key in ("result", "ended", "begun")
        for name in own[key]
    )
    results: dict[str, CheckResult] = {}
    for name in names:
        known = [own["result"][name] for own in by_process.values() if name in own["result"]]
        ends = {i: own["ended"][name] for i, own in by_process.items() if name in own["ended"]}
        done = {
            i: CheckResult.from_json(own["done"][name])
            for i, own in by_process.items()
            if name in own["done"] and name not in own["ended"]
        }
        begun = max(own["begun"].get(name, 0) for own in by_process.values())
        if known:
            results[name] = CheckResult.from_json(known[0])
        elif ends:
            results[name] = _unfinished(name, ends, done, len(by_process))
        elif begun >= MAX_BEGINNINGS:
            text = f"the processes parted in each of {begun} attempts, and none says why"
            advice = "look into worker.log and journal.jsonl of every host"
            results[name] = CheckResult(name, FAILED, (Problem(text, advice),))
    return results


def _unfinished(
    name: str, ends: Mapping[int, Event], done: Mapping[int, CheckResult], num_processes: int
) -> CheckResult:
    """The result of a check that hung or ended its process somewhere."""
    if all(end["how"] == LEFT_OUT for end in ends.values()):
        return CheckResult(name, LEFT_OUT, notes=(NO_TIME,))
    from ftmesh.distributed.process_group import format_processes  # loads JAX

    ends = dict(sorted(ends.items(), key=lambda item: _when(item[1])))
    first, end = next(iter(ends.items()))  # what comes later may follow from it
    seconds = float(end["seconds"])
    hung = [i for i, one in ends.items() if one["how"] == HUNG]
    died = [i for i, one in ends.items() if one["how"] == DIED and i != first]
    is_one = num_processes == 1
    if end["how"] == DIED:
        who = "the process" if is_one else f"process {first}"
        text = f"{who} died while it ran this check: {end['text']}"
        problems, status = [Problem(text, _DIED_ADVICE)], DIED
        notes = [f"{format_processes(hung)} waited for it and had to be killed"] if hung else []
    else:
        where = "" if is_one else f", in {format_processes(hung)}"
        text = f"it did not end within {seconds:.0f} s and was killed{where}"
        problems, status, notes = [Problem(text, hung_advice(name))], HUNG, []
        problems += merge_results(done).problems if done else ()
    notes += [f"{format_processes(died)} died after that"] if died else []
    return CheckResult(name, status, tuple(problems), tuple(notes), {}, seconds)


def _when(end: Event) -> float:
    """When a process ended; of two at about the same time, the death follows from the kill."""
    return float(end["seconds"]) + (SAME_TIME if end["how"] == DIED else 0.0)


def merge_results(by_process: Mapping[int, CheckResult]) -> CheckResult:
    """Return the result of all processes: the worst status, and what any of them found.

    The data are those of the first process that has any.
    """
    from ftmesh.distributed.process_group import format_processes  # loads JAX

    first = by_process[min(by_process)]
    severity = (LEFT_OUT, PASSED, FAILED)
    status = max((one.status for one in by_process.values()), key=severity.index)
    everyone = list(by_process.values())
    problems: dict[Problem, list[int]] = {}
    for process, one in by_process.items():
        for problem in one.problems:
            problems.setdefault(problem, []).append(process)
    named = [
        problem
        if len(where) == len(by_process)
        else replace(problem, text=f"{format_processes(where)}: {problem.text}")
        for problem, where in problems.items()
    ]
    notes = tuple(dict.fromkeys(note for one in everyone for note in one.notes))
    data = next((one.data for one in everyone if one.data), {})
    seconds = max(one.seconds for one in everyone)
    return CheckResult(first.name, status, tuple(named), notes, data, seconds)


_DIED_ADVICE = (
    "this is a bug in ftmesh, JAX or the driver, or the system killed it, for example for want of "
    "memory (see dmesg): send worker.log and journal.jsonl along when you report it"
)


def hung_advice(name: str) -> str:
    """What to do about a check that does not end."""
    advice = (
        "a chip or a link may be silent, or a program may wait for ever: run `ftmesh doctor`; if "
        "all are healthy, report it with journal.jsonl; if it was only slow, give a longer "
        "--timeout"
    )
    parts = name.removeprefix("right: ").split()
    if name.startswith("right: ") and len(parts) == 2:
        advice += f". Until then do not plan with executor={parts[0]!r} and {parts[1]!r}"
    return advice


def final_results(events: Sequence[Event], reason: str) -> list[CheckResult]:
    """Return a result for every check; those that never ran are left out, for `reason`."""
    known = merge_histories({0: history(events)})
    names = [name for event in events if event["event"] == "checks" for name in event["names"]]
    return [
        known.get(name, CheckResult(name, LEFT_OUT, notes=(reason or NO_TIME,)))
        for name in dict.fromkeys([*names, *known])
    ]
