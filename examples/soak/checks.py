"""Check a run under faults: it ended, used each example once, and learned the same weights.

A run leaves these files in its folder:

    events.jsonl            events of the launcher
    run/faults.jsonl        which injected faults struck, and when
    run/used-2-0.jsonl      what process 0 read in generation 2, by step
    out/weights.npz         the last weights
    log                     output of all processes

If an engine starts all hosts again, generations count from 1 again. Here they count on, from 1001
after the first such start, and so on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Relative to a tensor's largest number. On another mesh float32 sums have another order: weights
# differ by up to 3.3e-7 after 60 steps, 8.5e-7 after 600 and 1.7e-6 after 6000 (4x4 less a quarter,
# a half and three quarters, and lax.psum, against 4x4). Replacing one example, in the first step,
# the last or between, changes them by at least 1.1e-2 after 60 steps; after 6000, with a lower
# learning rate, by 2.1e-5 from the middle and 7e-4 from the end.
TOLERANCE = 1e-5
PER_START = 1000  # generations from one start by an engine to the next

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has ended, by itself or not."""

    folder: Path
    status: int | None  # None: timeout
    events: list[Event]
    faults: list[Event]  # that struck
    planted: str = ""  # faults that should have struck
    starts: tuple[float, ...] = (0.0,)  # when an engine has started all hosts

    @staticmethod
    def read(folder: Path, status: int | None, planted: str = "") -> Run:
        """Read the run in a folder."""
        events, starts = _count_on(_lines(folder / "events.jsonl"))
        struck = _lines(folder / "run" / "faults.jsonl")
        return Run(
            folder=folder,
            status=status,
            events=events,
            starts=starts,
            faults=struck or [event for event in events if event["event"] == "fault"],
            planted=planted,
        )

    def named(self, name: str) -> list[Event]:
        """Return the events of a name."""
        return [event for event in self.events if event["event"] == name]

    @property
    def mesh_changed(self) -> bool:
        """True if a generation had other failed chips than the first."""
        return len({str(event.get("failed") or "") for event in self.named("epoch")} | {""}) > 1

    def generations(self) -> list[tuple[int, int]]:
        """Return, in order, each generation that committed a step, and the step it started from.

        The first generation of a start may have committed none: the next one then starts there too.
        """
        continued = {event["epoch"] for event in self.named("goes on")}
        started = {event["epoch"]: event["from_step"] for event in self.named("epoch")}
        return sorted(
            (generation, step)
            for generation, step in {1: 0, **started}.items()
            if generation in continued or generation % PER_START == 1
        )


def check(
    run: Run, *, steps: int, num_examples: int, reference: Path | None, exact: bool = True
) -> list[str]:
    """Return the errors of a run, one line each.

    Args:
        run: The run.
        steps: Number of steps it should have done.
        num_examples: Number of examples it should have used.
        reference: Weights of an undisturbed run.
        exact: The reference is from a pod like this one, so weights must be equal if the mesh did
            not change.
    """
    errors = list(_check_ended(run, steps))
    if errors:
        return errors  # the rest would follow from them
    errors += _check_used_once(run, steps, num_examples)
    if reference is not None:
        errors += _check_weights(run, reference, exact)
    return errors


def _check_ended(run: Run, steps: int) -> Iterator[str]:
    """Check that it ended by itself, with status 0, after all steps."""
    if run.status is None:
        yield "it did not end within its limit"
    elif run.status:
        yield f"it ended with status {run.status}"
    else:
        done = run.named("done")
        if not done or done[-1]["status"] != 0:
            yield "its events do not say that it is done"
        elif done[-1]["steps"] != steps:
            yield f"it did {done[-1]['steps']} steps of {steps}"


def _check_used_once(run: Run, steps: int, num_examples: int) -> Iterator[str]:
    """Check that every example is used once in the committed steps.

    Of a step committed in several generations, the last counts.
    """
    counts = np.zeros(num_examples, np.int64)
    generations = run.generations()
    used = {generation: _used_in(run, generation) for generation, _ in generations}
    for step in range(1, steps + 1):
        generation = max(generation for generation, first in generations if first < step)
        examples = used[generation].get(step, [])
        if not examples:
            yield f"no process read examples for step {step} in generation {generation}"
        np.add.at(counts, examples, 1)
    missing, doubled = np.flatnonzero(counts == 0), np.flatnonzero(counts > 1)
    if len(missing):
        yield f"{len(missing)} examples were not used, the first: {missing[:5].tolist()}"
    if len(doubled):
        yield f"{len(doubled)} examples were used more than once: {doubled[:5].tolist()}"


def _used_in(run: Run, generation: int) -> dict[int, list[int]]:
    """Return the examples that all processes read, by step; of a step read twice, the last."""
    used: dict[int, list[int]] = {}
    start, number = divmod(generation, PER_START)
    begin, end = (*run.starts, float("inf"))[start : start + 2]
    for file in (run.folder / "run").glob(f"used-{number}-*.jsonl"):
        lines = [line for line in _lines(file) if begin <= line.get("time", begin) < end]
        own = {line["step"]: line["examples"] for line in lines}
        for step, examples in own.items():
            used.setdefault(step, []).extend(examples)
    return used


def _count_on(events: list[Event]) -> tuple[list[Event], tuple[float, ...]]:
    """Return events by time, with generations that count on, and the times of starts."""
    starts, counted, started = [0.0], [], False
    for event in sorted(events, key=lambda event: event["time"]):
        if event["event"] == "started" and event["epoch"] == 1:
            if started:
                starts.append(event["time"])
            started = True
        if "epoch" in event:
            event = {**event, "epoch": event["epoch"] + PER_START * (len(starts) - 1)}
        counted.append(event)
    return counted, tuple(starts)


def _check_weights(run: Run, reference: Path, exact: bool) -> Iterator[str]:
    """Check that the last weights are those of an undisturbed run."""
    file = run.folder / "out" / "weights.npz"
    if not file.exists():
        yield "it left no weights"
        return
    error = difference(file, reference)
    allowed = 0.0 if exact and not run.mesh_changed else TOLERANCE
    if not error <= allowed:  # NaN is an error too
        rule = (
            f"{allowed:g} is allowed" if allowed else "the mesh did not change, so none is allowed"
        )
        yield f"its weights differ by {error:.2g} from an undisturbed run's, relatively; {rule}"


def difference(file: Path, reference: Path) -> float:
    """Return the largest difference of two files of weights, relative to each tensor's maximum."""
    with np.load(file) as own, np.load(reference) as wanted:
        errors = [
            np.max(np.abs(own[name] - wanted[name])) / np.max(np.abs(wanted[name]))
            for name in wanted.files
        ]
    return float(np.max(errors))  # NaN if one is, unlike Python's max


def _lines(file: Path) -> list[Event]:
    """Read a file of JSON lines, without a last line cut short."""
    if not file.exists():
        return []
    text = file.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
