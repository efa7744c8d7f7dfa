"""Train both tiny models on emulated pods, and compare with one process; see scripts/pods.

Each run trains to a checkpoint with one number of hosts, and resumes from it with another. Its
losses must be those of one process on the same live chips.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from examples.common.report import read_metrics
from ftmesh.command_line import Parser, whole_number
from ftmesh.elastic.local_pod import run_pod

MESH, DEVICES = "4x4", 16
ONE_HOST = {2: "4x2@0,2", 4: "4x1@0,3", 8: "2x1@2,3"}
NEXT_HOSTS = {2: 4, 4: 8, 8: 2}  # the number of hosts that resumes
STEPS, FIRST_STEPS = 6, 3
TOLERANCE = 1e-6  # relative
ENVIRONMENT = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiles faster; the same in all runs


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected combinations, print a table, and return the exit status."""
    parser = Parser(prog="scripts/pods", description=__doc__)
    parser.add_argument("--only", choices=("resnet50", "bert"), help="only this model")
    parser.add_argument(
        "--hosts",
        type=whole_number(1),
        choices=ONE_HOST,
        help="only this number of hosts (default: all)",
    )
    parser.add_argument(
        "--idle", action="store_true", help="keep the devices of failed chips in the program"
    )
    args = parser.parse_args(argv)
    models = [args.only] if args.only else ["resnet50", "bert"]
    host_counts = [args.hosts] if args.hosts else list(ONE_HOST)
    worst = 0.0
    for model in models:
        for hosts in host_counts:
            for failed in ("", "2x2@2,2", ONE_HOST[hosts], "2x2@0,0"):
                start = time.monotonic()
                difference = max_difference(model, hosts, failed, idle=args.idle)
                worst = max(worst, difference)
                print(
                    f"{model:9} {hosts} hosts x {DEVICES // hosts} devices, then "
                    f"{NEXT_HOSTS[hosts]}: {MESH} less {failed or 'nothing':8} losses "
                    f"differ by {difference:.1e}, {time.monotonic() - start:.0f} s",
                    flush=True,
                )
    return int(worst > TOLERANCE)


def max_difference(model: str, hosts: int, failed: str, *, idle: bool) -> float:
    """The largest relative difference between losses and accuracies of a pod and one process."""
    expected = train_alone(model, failed, idle)
    options = ["--failed", failed, *["--idle"] * idle, "--limit", "120"]
    with tempfile.TemporaryDirectory() as folder:
        options += ["--out", folder, "--checkpoint-dir", f"{folder}/saved"]
        train(model, hosts, [*options, "--steps", str(FIRST_STEPS)])
        train(model, NEXT_HOSTS[hosts], [*options, "--steps", str(STEPS), "--resume"])
        losses, evaluations = read_metrics(Path(folder) / "metrics.jsonl")
    actual = [*losses.values(), evaluations[STEPS]["accuracy"]]
    assert len(actual) == len(expected), (actual, expected)
    return max(abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True))


def train(model: str, hosts: int, options: list[str]) -> None:
    """Train on a pod; on failure, exit with the stderr of its processes."""
    command = [sys.executable, "-m", f"examples.{model}.train", *options]
    done = run_pod(command, hosts, DEVICES // hosts, MESH, env=ENVIRONMENT, timeout=600)
    if any(process.status for process in done):
        raise SystemExit("\n".join(f"[{i}] {process.stderr}" for i, process in enumerate(done)))


@cache
def train_alone(model: str, failed: str, idle: bool) -> list[float]:
    """Train in one process with all devices; return the losses and the last accuracy."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", f"examples.{model}.train", "--emulate", "many"]
        command += ["--mesh", MESH, "--failed", failed, *["--idle"] * idle]
        command += ["--steps", str(STEPS), "--out", folder]
        env = {**os.environ, "JAX_PLATFORMS": "cpu", **ENVIRONMENT}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        losses, evaluations = read_metrics(Path(folder) / "metrics.jsonl")
    return [*losses.values(), evaluations[STEPS]["accuracy"]]


if __name__ == "__main__":
    sys.exit(main())
