"""Checks of a run in which things failed: it ended well, used each example once, and learned alike.

A run's folder has, when it has ended:

    events.jsonl            what the launcher told
    run/faults.jsonl        which planted faults struck, and when
    run/used-2-0.jsonl      what process 0 read in epoch 2, step by step
    out/weights.npz         the last weights
    log                     what everybody said
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Of a tensor's largest number. On another mesh sums are made in another order, in float32: weights
# then differ by up to 3.3e-7 after 60 steps, 8.5e-7 after 600 and 1.7e-6 after 6000 (4x4 less a
# quarter, a half and three quarters, and lax.psum, beside 4x4). Another example in place of one, in
# the first step, the last or between, changes them by 1.1e-2 or more after 60 steps; after 6000,
# where the rate is lower, by 2.1e-5 from the middle and 7e-4 from the end.
CLOSE = 1e-5

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has ended, by itself or not."""

    folder: Path
    status: int | None  # None: its time was up
    events: list[Event]
    faults: list[Event]  # those that struck
    planted: str = ""  # those that should have

    @staticmethod
    def read(folder: Path, status: int | None, planted: str = "") -> Run:
        """The run in a folder."""
        events = _lines(folder / "events.jsonl")
        struck = _lines(folder / "run" / "faults.jsonl")
        return Run(
            folder=folder,
            status=status,
            events=sorted(events, key=lambda event: event["time"]),
            faults=struck or [event for event in events if event["event"] == "fault"],
            planted=planted,
        )

    def of(self, name: str) -> list[Event]:
        """The events of a name."""
        return [event for event in self.events if event["event"] == name]

    @property
    def mesh_changed(self) -> bool:
        """Whether some epoch had other failed chips than the first."""
        return len({str(event.get("failed") or "") for event in self.of("epoch")} | {""}) > 1

    def epochs(self) -> list[tuple[int, int]]:
        """Each epoch that committed a step, and the step it went on from; in order."""
        went_on = {event["epoch"] for event in self.of("goes on")}
        begun = {event["epoch"]: event["from_step"] for event in self.of("epoch")}
        return sorted(
            (epoch, step)
            for epoch, step in {1: 0, **begun}.items()
            if epoch in went_on or epoch == 1
        )


def check(
    run: Run, *, steps: int, num_examples: int, reference: Path | None, exact: bool = True
) -> list[str]:
    """What is wrong with a run, a line for each thing; none where it is well.

    `reference` are the weights of an undisturbed run, on a pod like this one if they are `exact`.
    """
    wrong = list(_ended(run, steps))
    if wrong:
        return wrong  # the rest follows from that
    wrong += _used_once(run, steps, num_examples)
    if reference is not None:
        wrong += _same_weights(run, reference, exact)
    return wrong


def _ended(run: Run, steps: int) -> Iterator[str]:
    """It ended by itself, with status 0, after all steps."""
    if run.status is None:
        yield "it did not end within its limit"
    elif run.status:
        yield f"it ended with status {run.status}"
    else:
        done = run.of("done")
        if not done or done[-1]["status"] != 0:
            yield "its events do not say that it is done"
        elif done[-1]["steps"] != steps:
            yield f"it did {done[-1]['steps']} steps of {steps}"


def _used_once(run: Run, steps: int, num_examples: int) -> Iterator[str]:
    """Every example is used once in the steps that were committed.

    Of a step that was committed in several epochs, the last counts.
    """
    counts = np.zeros(num_examples, np.int64)
    epochs = run.epochs()
    read = {epoch: _read_in(run.folder / "run", epoch) for epoch, _ in epochs}
    for step in range(1, steps + 1):
        epoch = max(epoch for epoch, first in epochs if first < step)
        examples = read[epoch].get(step, [])
        if not examples:
            yield f"nobody read anything for step {step} in epoch {epoch}"
        np.add.at(counts, examples, 1)
    missing, doubled = np.flatnonzero(counts == 0), np.flatnonzero(counts > 1)
    if len(missing):
        yield f"{len(missing)} examples were not used, the first: {missing[:5].tolist()}"
    if len(doubled):
        yield f"{len(doubled)} examples were used more than once: {doubled[:5].tolist()}"


def _read_in(folder: Path, epoch: int) -> dict[int, list[int]]:
    """What all processes read in an epoch, by step; of what one read twice, the last."""
    found: dict[int, list[int]] = {}
    for file in folder.glob(f"used-{epoch}-*.jsonl"):
        own = {line["step"]: line["examples"] for line in _lines(file)}
        for step, examples in own.items():
            found.setdefault(step, []).extend(examples)
    return found


def _same_weights(run: Run, reference: Path, exact: bool) -> Iterator[str]:
    """The last weights are those of an undisturbed run: to the bit, if the mesh did not change."""
    file = run.folder / "out" / "weights.npz"
    if not file.exists():
        yield "it left no weights"
        return
    off = difference(file, reference)
    most = 0.0 if exact and not run.mesh_changed else CLOSE
    if not off <= most:  # what is not a number is off, too
        allowed = f"{most:g} are allowed" if most else "the mesh did not change: none may be"
        yield f"its weights differ by {off:.2g} of their size from an undisturbed run's; {allowed}"


def difference(file: Path, reference: Path) -> float:
    """The largest difference between two files of weights, by the largest number of each tensor."""
    with np.load(file) as own, np.load(reference) as wanted:
        off = [
            np.max(np.abs(own[name] - wanted[name])) / np.max(np.abs(wanted[name]))
            for name in wanted.files
        ]
    return float(np.max(off))  # which, unlike Python's, is nan where one is


def _lines(file: Path) -> list[Event]:
    """The objects in a file, but for a line that its writer's death cut off."""
    if not file.exists():
        return []
    text = file.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
