"""Train on an emulated pod that loses a host, and on one that does not, and plot both.

    python -m examples.soak.picture --out docs/plots/failure.svg

Both pods have four processes on this machine. The plot has the losses of both, and when each step
of the disturbed run was done. The two are not timed against each other, since the machine may be
doing other things.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.common.report import mark_generations, metrics_lines, read_generations, read_metrics
from examples.soak.pod import FAST_COMPILE
from ftmesh.command_line import Parser, whole_number
from ftmesh.draw.plots import save

POD = "--hosts 4 --devices-per-host 4 --mesh 4x4 --host-shape 2x2 --failures 3 --collective-limit 5"
KILLED_HOST = 2
UNDISTURBED_COLOUR, DISTURBED_COLOUR = "#b0c4d8", "#d55e00"
UNDISTURBED, DISTURBED = "undisturbed", "with a host lost"


@dataclass(frozen=True)
class FinishedRun:
    """The files of a run that has ended."""

    folder: Path

    @property
    def metrics(self) -> Path:
        """The trainer's metrics."""
        return self.folder / "out" / "metrics.jsonl"

    @property
    def losses(self) -> dict[int, float]:
        """Losses by step."""
        return read_metrics(self.metrics)[0]

    @property
    def seconds(self) -> dict[int, float]:
        """When each step was done, in seconds since the first."""
        times = {line["step"]: line["time"] for line in metrics_lines(self.metrics) if "lr" in line}
        first = min(times.values())
        return {step: time - first for step, time in times.items()}

    @property
    def pause(self) -> float:
        """Seconds from the loss of a host to the next committed step."""
        lines = map(json.loads, (self.folder / "events.jsonl").read_text().splitlines())
        return sum(float(line["seconds"]) for line in lines if line["event"] == "goes on")


def main(argv: Sequence[str] | None = None) -> int:
    """Train twice and plot; return the exit status."""
    parser = Parser(prog="python -m examples.soak.picture", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.svg", help="the plot")
    parser.add_argument(
        "--steps",
        type=whole_number(5),
        default=120,
        metavar="N",
        help="steps of each run (default: 120)",
    )
    args = parser.parse_args(argv)
    kill = args.steps * 2 // 5
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = train(Path(folder) / "undisturbed", args.steps)
        faults = f"kill@{KILLED_HOST}:{kill}:collective"
        disturbed = train(Path(folder) / "disturbed", args.steps, faults)
        worst = difference(undisturbed.losses, disturbed.losses)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        save(draw(undisturbed, disturbed, f"kill -9 of a host in step {kill}"), args.out)
    print(f"\nThe losses of both runs differ by at most {worst:.0e}; {args.out} shows them.")
    return 0


def train(folder: Path, steps: int, faults: str = "") -> FinishedRun:
    """Train on a pod, and print the command."""
    launch = f"python -m ftmesh launch {POD} --events {folder}/events.jsonl"
    trainer = f"python -m examples.soak.train --steps {steps} --out {folder}/out"
    print(f"\n$ {f'FTMESH_FAULTS={faults} ' if faults else ''}{launch} -- {trainer}", flush=True)
    words = [*shlex.split(launch), "--", *shlex.split(trainer)]
    folder.mkdir()
    subprocess.run(
        [sys.executable if word == "python" else word for word in words],
        env={**os.environ, **FAST_COMPILE, "FTMESH_FAULTS": faults},
        check=True,
    )
    return FinishedRun(folder)


def difference(losses: dict[int, float], others: dict[int, float]) -> float:
    """Return the largest relative difference of two runs' losses."""
    if losses.keys() != others.keys():
        raise SystemExit(f"a run lacks the losses of steps {sorted(losses.keys() ^ others.keys())}")
    return max(abs(losses[step] - others[step]) / abs(losses[step]) for step in losses)


def draw(undisturbed: FinishedRun, disturbed: FinishedRun, title: str) -> Any:
    """Plot losses by step, a thin line over a wide one, and steps by seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    figure.suptitle(
        f"{title}: 4x4 emulated chips, 4 processes on {cores} cores; measured", fontsize="medium"
    )
    left, right = figure.subplots(1, 2)
    for run, colour, width, label in (
        (undisturbed, UNDISTURBED_COLOUR, 4.0, UNDISTURBED),
        (disturbed, DISTURBED_COLOUR, 1.2, DISTURBED),
    ):
        style: dict[str, Any] = {"color": colour, "linewidth": width, "label": label}
        left.plot(list(run.losses), list(run.losses.values()), **style)
    seconds, generations = disturbed.seconds, read_generations(disturbed.metrics)
    right.plot(list(seconds.values()), list(seconds), color=DISTURBED_COLOUR, label=DISTURBED)
    mark_generations(left, generations)
    left.set(xlabel="step", ylabel="loss")
    right.set(xlabel="seconds since the first step", ylabel="step")
    for generation in generations:
        right.annotate(
            f"{disturbed.pause:.1f} s, then {generation['live']} chips",
            (seconds[generation["step"]] + disturbed.pause / 2, generation["step"]),
            xytext=(0, -14),
            textcoords="offset points",
            ha="center",
            fontsize="small",
        )
    for axes in (left, right):
        axes.grid(True, alpha=0.3)
        axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    sys.exit(main())
