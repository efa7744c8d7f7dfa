"""Report: what a run shows on the terminal, writes as JSON lines, and draws when it ends.

    with Report(folder, total_steps=1000, unit="images") as report:
        for step, batch in ...:
            state, loss = train_step(state, batch)
            report.step(step, loss, examples=4096, lr=0.1)
        report.evaluation(step, accuracy=0.75)

The loss of a step is looked at when the next step is under way, so that the devices are never
waited for, or when `settle` is called; one that is not a number ends the run with its step.

Metrics: the file of JSON lines that a run leaves, written to by one process after another.

A process may be killed while it writes. So the next one begins a line of its own, and readers skip
what is no JSON.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ftmesh.errors import TrainingError
from ftmesh.files import write_whole

LOSS = "#0072b2"
EVALUATIONS = ("#d55e00", "#009e73", "#cc79a7", "#e69f00")


class Report:
    """The progress bar, the metrics and the plot of one run.

    `folder` gets ``metrics.jsonl``, a line per step, per evaluation and per epoch after the first,
    and ``run.svg``, under `title`; without a folder nothing is written. Without `show` the terminal
    is left alone, as is right for all processes of a run but one. If `eager`, a loss that is there
    already is looked at without delay: its step counts, and this process may be lost in the next.
    """

    def __init__(
        self,
        folder: str | Path | None,
        *,
        total_steps: int,
        first_step: int = 0,
        unit: str = "examples",
        title: str = "",
        resume: bool = False,
        show: bool = True,
        eager: bool = False,
    ) -> None:
        self.losses: dict[int, float] = {}
        self.evaluations: dict[int, dict[str, float]] = {}
        self._unit, self._title, self._show, self._eager = unit, title, show, eager
        self._waiting: tuple[int, Any, dict[str, float]] | None = None
        self._folder = None if folder is None else Path(folder)
        self._metrics: TextIO | None = None
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._metrics = open_metrics(self._folder / "metrics.jsonl", append=resume)
        self._started = self._last = time.perf_counter()
        self._rate = 0.0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[says]}"),
            TimeRemainingColumn(),
            disable=not show,
        )
        self._task = self._progress.add_task(
            "training", total=total_steps, completed=first_step, says=""
        )

    def step(self, step: int, loss: Any, *, examples: int, **numbers: float) -> None:
        """A step has been started; `loss` may be an array that is still being computed.

        It is None in a process that has no part in it.
        """
        self.settle()
        self._waiting = (step, loss, {"examples": examples, **numbers})
        if self._eager and (loss is None or loss.is_ready()):
            self.settle()

    def evaluation(self, step: int, **numbers: float) -> None:
        """The result of an evaluation after `step`."""
        self.settle()
        self.evaluations[step] = {name: float(value) for name, value in numbers.items()}
        self._write({"step": step, "eval": self.evaluations[step]})
        says = ", ".join(f"{name} {value:.4f}" for name, value in numbers.items())
        if self._show:
            self._progress.print(f"after step {step}: {says}")
        self._last = time.perf_counter()

    def epoch(self, step: int, number: int, *, live: int, source: str) -> None:
        """Who takes part has changed: `live` chips go on from the state after `step`.

        `number` is the epoch's, and `source` tells where that state was found.
        """
        if self._metrics is not None:
            done = max(read_metrics(self._metrics.name)[0], default=0)
            facts = {"live": live, "source": source, "repeated": max(done - step, 0)}
            self._write({"step": step, "epoch": number, **facts})

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._started

    def settle(self) -> None:
        """Look at the loss of the last step; one that is not a number ends the run."""
        if self._waiting is None:
            return
        step, loss, numbers = self._waiting
        self._waiting = None
        if loss is None:
            return
        value = float(loss)
        now = time.perf_counter()
        rate = numbers["examples"] / max(now - self._last, 1e-9)
        self._rate = rate if not self._rate else 0.9 * self._rate + 0.1 * rate
        self._last = now
        self._write({"step": step, "loss": value, **numbers, "per_second": rate})
        if not math.isfinite(value):
            raise TrainingError(
                f"the loss of step {step} is {value}: the run has stopped there; try a lower "
                "learning rate or a longer warm-up, or go back to a checkpoint before it"
            )
        self.losses[step] = value
        self._progress.update(
            self._task,
            completed=step,
            says=f"loss {value:.4f}, {self._rate:.4g} {self._unit}/s",
        )

    def _write(self, line: dict[str, Any]) -> None:
        if self._metrics is not None:
            timed = {**line, "time": round(time.time(), 3)}
            print(json.dumps(timed), file=self._metrics, flush=True)

    def __enter__(self) -> Report:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.settle()
        finally:
            self._progress.stop()
            if self._metrics is not None:
                self._metrics.close()
        if self._folder is not None and error is None and self.losses:
            metrics, picture = (self._folder / name for name in ("metrics.jsonl", "run.svg"))
            plot_run(metrics, picture, title=self._title)


def plot_run(metrics: str | Path, out: str | Path, *, title: str = "") -> bool:
    """Draw the losses and evaluations of a run, and where epochs begin, with the chips of each.

    False where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    losses, evaluations = read_metrics(metrics)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    if title:
        axes.set_title(title, fontsize="medium", loc="left")
    axes.plot(list(losses), list(losses.values()), color=LOSS, label="loss")
    axes.set_xlabel("step")
    axes.set_ylabel("loss", color=LOSS)
    names = sorted({name for line in evaluations.values() for name in line})
    if names:
        right: Any = axes.twinx()
        for name, colour in zip(names, itertools.cycle(EVALUATIONS)):
            found = {step: line[name] for step, line in evaluations.items() if name in line}
            right.plot(list(found), list(found.values()), "o-", color=colour, label=name, ms=3)
        right.set_ylabel(", ".join(names), color=EVALUATIONS[0] if len(names) == 1 else "black")
        right.legend(frameon=False, loc="center right")
    mark_epochs(axes, read_epochs(metrics))
    axes.grid(True, alpha=0.3)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=Path(out).suffix[1:])
    write_whole(out, [drawn.getvalue()])
    return True


def mark_epochs(axes: Any, epochs: list[dict[str, Any]]) -> None:
    """A vertical line where each epoch begins, with the number of chips that it has."""
    for line in epochs:
        axes.axvline(line["step"] + 0.5, color="black", linestyle=":", linewidth=1)
        axes.annotate(
            f"{line['live']} chips",
            (line["step"] + 0.5, 1),
            xycoords=axes.get_xaxis_transform(),
            xytext=(2, -4),
            textcoords="offset points",
            rotation=90,
            va="top",
            fontsize="small",
        )


def open_metrics(path: Path, *, append: bool) -> TextIO:
    """The file, to write whole lines to."""
    file = path.open("a" if append else "w")
    if file.tell():
        with path.open("rb") as before:
            before.seek(-1, os.SEEK_END)
            is_cut = before.read() != b"\n"
        if is_cut:
            print(file=file, flush=True)
    return file


def metrics_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of a file of metrics, less those that were cut."""
    for text in Path(path).read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "step" in line:
            yield line


def read_metrics(path: str | Path) -> tuple[dict[int, float], dict[int, dict[str, float]]]:
    """Losses by step and evaluations by step, from a file of metrics; the last of each counts."""
    losses, evaluations = {}, {}
    for line in metrics_lines(path):
        if "eval" in line:
            evaluations[line["step"]] = line["eval"]
        elif "loss" in line:
            losses[line["step"]] = line["loss"]
    return dict(sorted(losses.items())), dict(sorted(evaluations.items()))


def read_epochs(path: str | Path) -> list[dict[str, Any]]:
    """The epochs after the first, from a file of metrics: "epoch", "step" and what else is known.

    Each begins with the state after its "step", on "live" chips.
    """
    return [line for line in metrics_lines(path) if "epoch" in line]
