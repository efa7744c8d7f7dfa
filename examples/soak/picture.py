"""Train on a pod that loses a host on the way, and on one that does not; draw both.

    python -m examples.soak.picture --out docs/plots/failure.svg

Both are emulated pods of four processes on this machine. What they print is passed on, and what
they measure is drawn: the losses of both, and when each step of the disturbed one was done. The two
are not timed against each other: what else the machine does is not the same for both.
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
from ftmesh.command_line import Parser, whole_number
from ftmesh.draw.plots import save

POD = "--hosts 4 --devices-per-host 4 --mesh 4x4 --host-shape 2x2 --failures 3 --collective-limit 5"
HOST = 2  # the one that is killed
QUICKLY = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # to compile; both runs alike
CALM, LOST = "#b0c4d8", "#d55e00"
UNDISTURBED, DISTURBED = "undisturbed", "with a host lost"


@dataclass(frozen=True)
class Trained:
    """A run that has ended."""

    folder: Path

    @property
    def metrics(self) -> Path:
        """What its trainer wrote."""
        return self.folder / "out" / "metrics.jsonl"

    @property
    def losses(self) -> dict[int, float]:
        """By step."""
        return read_metrics(self.metrics)[0]

    @property
    def seconds(self) -> dict[int, float]:
        """When each step was done, since the first one was."""
        times = {line["step"]: line["time"] for line in metrics_lines(self.metrics) if "lr" in line}
        first = min(times.values())
        return {step: time - first for step, time in times.items()}

    @property
    def pause(self) -> float:
        """Seconds from the loss of a host to the next step that counts."""
        lines = map(json.loads, (self.folder / "events.jsonl").read_text().splitlines())
        return sum(float(line["seconds"]) for line in lines if line["event"] == "goes on")


def main(argv: Sequence[str] | None = None) -> int:
    """Train twice and draw; the exit status."""
    parser = Parser(prog="python -m examples.soak.picture", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.svg", help="the picture")
    parser.add_argument(
        "--steps", type=whole_number(5), default=120, metavar="N", help="of each run (120)"
    )
    args = parser.parse_args(argv)
    kill = args.steps * 2 // 5
    with tempfile.TemporaryDirectory() as folder:
        calm = train(Path(folder) / "calm", args.steps)
        lost = train(Path(folder) / "lost", args.steps, f"kill@{HOST}:{kill}:collective")
        worst = difference(calm.losses, lost.losses)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        save(draw(calm, lost, f"kill -9 of a host in step {kill}"), args.out)
    print(f"\nThe losses of both runs differ by {worst:.0e} at most; {args.out} shows them.")
    return 0


def train(folder: Path, steps: int, faults: str = "") -> Trained:
    """A run on a pod, which says what it runs."""
    launch = f"python -m ftmesh launch {POD} --events {folder}/events.jsonl"
    trainer = f"python -m examples.soak.train --steps {steps} --out {folder}/out"
    print(f"\n$ {f'FTMESH_FAULTS={faults} ' if faults else ''}{launch} -- {trainer}", flush=True)
    words = [*shlex.split(launch), "--", *shlex.split(trainer)]
    folder.mkdir()
    subprocess.run(
        [sys.executable if word == "python" else word for word in words],
        env={**os.environ, **QUICKLY, "FTMESH_FAULTS": faults},
        check=True,
    )
    return Trained(folder)


def difference(one: dict[int, float], other: dict[int, float]) -> float:
    """The largest of two runs' losses, relative; both have one for each step."""
    if one.keys() != other.keys():
        raise SystemExit(f"a run lacks the losses of steps {sorted(one.keys() ^ other.keys())}")
    return max(abs(one[step] - other[step]) / abs(one[step]) for step in one)


def draw(calm: Trained, lost: Trained, what: str) -> Any:
    """Losses by step, and steps by seconds; where both runs are the same, both are seen."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    figure.suptitle(
        f"{what}: 4x4 emulated chips, 4 processes on {cores} cores; measured", fontsize="medium"
    )
    left, right = figure.subplots(1, 2)
    for run, colour, width, label in ((calm, CALM, 4.0, UNDISTURBED), (lost, LOST, 1.2, DISTURBED)):
        style: dict[str, Any] = {"color": colour, "linewidth": width, "label": label}
        left.plot(list(run.losses), list(run.losses.values()), **style)
    right.plot(list(lost.seconds.values()), list(lost.seconds), color=LOST, label=DISTURBED)
    mark_generations(left, read_generations(lost.metrics))
    left.set(xlabel="step", ylabel="loss")
    right.set(xlabel="seconds since the first step", ylabel="step")
    for epoch in read_generations(lost.metrics):
        right.annotate(
            f"{lost.pause:.1f} s, then {epoch['live']} chips",
            (lost.seconds[epoch["step"]] + lost.pause / 2, epoch["step"]),
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
