"""Report: what a run shows on the terminal, writes as JSON lines, and draws when it ends.

    with Report(folder, total_steps=1000, unit="images") as report:
        for step, batch in ...:
            state, loss = train_step(state, batch)
            report.step(step, loss, examples=4096, lr=0.1)
        report.evaluation(step, accuracy=0.75)

The loss of a step is looked at when the next step is under way, so that the devices are never
waited for, or when `settle` is called; one that is not a number ends the run with its step.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ftmesh.errors import TrainingError


class Report:
    """The progress bar, the metrics and the plot of one run.

    `folder` gets ``metrics.jsonl``, a line per step and per evaluation, and ``run.svg``; without a
    folder nothing is written. Without `show` the terminal is left alone, as is right for all
    processes of a run but one.
    """

    def __init__(
        self,
        folder: str | Path | None,
        *,
        total_steps: int,
        first_step: int = 0,
        unit: str = "examples",
        resume: bool = False,
        show: bool = True,
    ) -> None:
        self.losses: dict[int, float] = {}
        self.evaluations: dict[int, dict[str, float]] = {}
        self._unit, self._show = unit, show
        self._waiting: tuple[int, Any, dict[str, float]] | None = None
        self._folder = None if folder is None else Path(folder)
        self._metrics = None
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._metrics = (self._folder / "metrics.jsonl").open("a" if resume else "w")
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

    def evaluation(self, step: int, **numbers: float) -> None:
        """The result of an evaluation after `step`."""
        self.settle()
        self.evaluations[step] = {name: float(value) for name, value in numbers.items()}
        self._write({"step": step, "eval": self.evaluations[step]})
        says = ", ".join(f"{name} {value:.4f}" for name, value in numbers.items())
        if self._show:
            self._progress.print(f"after step {step}: {says}")
        self._last = time.perf_counter()

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
            print(json.dumps(line), file=self._metrics, flush=True)

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
            plot_run(self._folder / "metrics.jsonl", self._folder / "run.svg")


def read_metrics(path: str | Path) -> tuple[dict[int, float], dict[int, dict[str, float]]]:
    """Losses by step and evaluations by step, from a file of metrics; the last of each counts."""
    losses, evaluations = {}, {}
    for text in Path(path).read_text().splitlines():
        line = json.loads(text)
        if "eval" in line:
            evaluations[line["step"]] = line["eval"]
        else:
            losses[line["step"]] = line["loss"]
    return losses, evaluations


def plot_run(metrics: str | Path, out: str | Path) -> bool:
    """Draw the losses and evaluations of a run; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    losses, evaluations = read_metrics(metrics)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(list(losses), list(losses.values()), color="#0072b2", label="loss")
    axes.set(xlabel="step", ylabel="loss")
    names = sorted({name for line in evaluations.values() for name in line})
    if names:
        right: Any = axes.twinx()
        for name in names:
            steps = [step for step, line in evaluations.items() if name in line]
            right.plot(steps, [evaluations[s][name] for s in steps], "o-", label=name, markersize=3)
        right.set_ylabel(", ".join(names))
        right.legend(frameon=False, loc="center right")
    axes.grid(True, alpha=0.3)
    figure.savefig(out)
    return True
