"""The report of a run: a progress bar, metrics as JSON lines, and a plot at the end.

    with Report(folder, total_steps=1000, unit="images") as report:
        for step, batch in ...:
            state, loss = train_step(state, batch)
            report.step(step, loss, examples=4096, lr=0.1)
        report.evaluation(step, accuracy=0.75)

The loss of a step is read once the next step has been dispatched, so that the host does not wait,
or when `settle` is called. A loss that is not finite ends the run.

A process may be killed while it writes to the metrics, and another one continue the file: writers
start on a new line, and readers skip lines that are not JSON.
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
from ftmesh.files import write_atomic

LOSS_COLOUR = "#0072b2"
EVALUATION_COLOURS = ("#d55e00", "#009e73", "#cc79a7", "#e69f00")


class Report:
    """The progress bar, the metrics and the plot of one run.

    Args:
        folder: Gets ``metrics.jsonl``, a line per step, evaluation and generation after the first,
            and ``run.svg``; None writes nothing.
        total_steps: Length of the run.
        first_step: Number of steps done before.
        unit: Name of an example in rates.
        title: Of the plot.
        resume: Append to the metrics.
        show: Show progress on the terminal: true in one process of a run.
        eager: Read a loss at once if it is ready: this process may be lost in the next step.
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
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            disable=not show,
        )
        self._task = self._progress.add_task(
            "training", total=total_steps, completed=first_step, status=""
        )

    def step(self, step: int, loss: Any, *, examples: int, **numbers: float) -> None:
        """Report a dispatched step; `loss` may still be computing, or None without a device."""
        self.settle()
        self._waiting = (step, loss, {"examples": examples, **numbers})
        if self._eager and (loss is None or loss.is_ready()):
            self.settle()

    def evaluation(self, step: int, **numbers: float) -> None:
        """Report the results of an evaluation after `step`."""
        self.settle()
        self.evaluations[step] = {name: float(value) for name, value in numbers.items()}
        self._write({"step": step, "eval": self.evaluations[step]})
        if self._show:
            results = ", ".join(f"{name} {value:.4f}" for name, value in numbers.items())
            self._progress.print(f"after step {step}: {results}")
        self._last = time.perf_counter()

    def generation(self, step: int, number: int, *, live: int, source: str) -> None:
        """Report a new generation: `live` chips continue from the state after `step`.

        `number` is the generation's; `source` is where the state came from.
        """
        if self._metrics is not None:
            done = max(read_metrics(self._metrics.name)[0], default=0)
            facts = {"live": live, "source": source, "repeated": max(done - step, 0)}
            self._write({"step": step, "epoch": number, **facts})

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    def settle(self) -> None:
        """Read the loss of the last step; raise TrainingError if it is not finite."""
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
                f"the loss of step {step} is {value}: try a lower learning rate, a longer warm-up, "
                "or an earlier checkpoint"
            )
        self.losses[step] = value
        self._progress.update(
            self._task,
            completed=step,
            status=f"loss {value:.4f}, {self._rate:.4g} {self._unit}/s",
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
    """Plot the losses, evaluations and generations of a run; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    losses, evaluations = read_metrics(metrics)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    if title:
        axes.set_title(title, fontsize="medium", loc="left")
    axes.plot(list(losses), list(losses.values()), color=LOSS_COLOUR, label="loss")
    axes.set_xlabel("step")
    axes.set_ylabel("loss", color=LOSS_COLOUR)
    names = sorted({name for line in evaluations.values() for name in line})
    if names:
        right: Any = axes.twinx()
        for name, colour in zip(names, itertools.cycle(EVALUATION_COLOURS)):
            curve = {step: line[name] for step, line in evaluations.items() if name in line}
            right.plot(list(curve), list(curve.values()), "o-", color=colour, label=name, ms=3)
        right.set_ylabel(
            ", ".join(names), color=EVALUATION_COLOURS[0] if len(names) == 1 else "black"
        )
        right.legend(frameon=False, loc="center right")
    mark_generations(axes, read_generations(metrics))
    axes.grid(True, alpha=0.3)
    image = io.BytesIO()
    figure.savefig(image, format=Path(out).suffix[1:])
    write_atomic(out, [image.getvalue()])
    return True


def mark_generations(axes: Any, generations: list[dict[str, Any]]) -> None:
    """Draw a vertical line where each generation starts, labelled with its number of chips."""
    for line in generations:
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
    """Open the metrics file, on a new line."""
    file = path.open("a" if append else "w")
    if file.tell():
        with path.open("rb") as before:
            before.seek(-1, os.SEEK_END)
            is_cut = before.read() != b"\n"
        if is_cut:
            print(file=file, flush=True)
    return file


def metrics_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics file, without those cut short."""
    for text in Path(path).read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "step" in line:
            yield line


def read_metrics(path: str | Path) -> tuple[dict[int, float], dict[int, dict[str, float]]]:
    """Return losses and evaluations by step; of repeated steps, the last."""
    losses, evaluations = {}, {}
    for line in metrics_lines(path):
        if "eval" in line:
            evaluations[line["step"]] = line["eval"]
        elif "loss" in line:
            losses[line["step"]] = line["loss"]
    return dict(sorted(losses.items())), dict(sorted(evaluations.items()))


def read_generations(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of generations after the first.

    Each starts with the state after its "step", on "live" chips; "epoch" is its number.
    """
    return [line for line in metrics_lines(path) if "epoch" in line]
