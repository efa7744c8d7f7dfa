"""Both tiny trainers on emulated pods, beside one process; see scripts/pods.

Each run trains to a checkpoint on one division of the mesh into hosts, and goes on from it on
another; its losses are to be those of one process on the same live chips.
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
WHOLE_HOST = {2: "4x2@0,2", 4: "4x1@0,3", 8: "2x1@2,3"}
THEN = {2: 4, 4: 8, 8: 2}  # who goes on
STEPS, FIRST = 6, 3
CLOSE = 1e-6  # relative, of losses
QUICKLY = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # to compile; all runs alike


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for, print a table; the exit status."""
    parser = Parser(prog="scripts/pods", description=__doc__)
    parser.add_argument("--only", choices=("resnet50", "bert"), help="one of the two models")
    parser.add_argument(
        "--hosts", type=whole_number(1), choices=WHOLE_HOST, help="one division (all)"
    )
    parser.add_argument("--idle", action="store_true", help="failed chips stay in the program")
    args = parser.parse_args(argv)
    models = [args.only] if args.only else ["resnet50", "bert"]
    divisions = [args.hosts] if args.hosts else list(WHOLE_HOST)
    worst = 0.0
    for model in models:
        for hosts in divisions:
            for failed in ("", "2x2@2,2", WHOLE_HOST[hosts], "2x2@0,0"):
                started = time.monotonic()
                found = off(model, hosts, failed, idle=args.idle)
                worst = max(worst, found)
                print(
                    f"{model:9} {hosts} hosts x {DEVICES // hosts} devices, then {THEN[hosts]}: "
                    f"{MESH} less {failed or 'nothing':8} losses differ by {found:.1e}, "
                    f"{time.monotonic() - started:.0f} s",
                    flush=True,
                )
    return int(worst > CLOSE)


def off(model: str, hosts: int, failed: str, *, idle: bool) -> float:
    """The largest relative difference of a pod's losses and accuracies from one process's."""
    wanted = alone(model, failed, idle)
    more = ["--failed", failed, *["--idle"] * idle, "--limit", "120"]
    with tempfile.TemporaryDirectory() as folder:
        more += ["--out", folder, "--checkpoint-dir", f"{folder}/saved"]
        train(model, hosts, [*more, "--steps", str(FIRST)])
        train(model, THEN[hosts], [*more, "--steps", str(STEPS), "--resume"])
        losses, evaluations = read_metrics(Path(folder) / "metrics.jsonl")
    found = [*losses.values(), evaluations[STEPS]["accuracy"]]
    assert len(found) == len(wanted), (found, wanted)
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def train(model: str, hosts: int, more: list[str]) -> None:
    """A run on a pod; an error shows what its processes said."""
    command = [sys.executable, "-m", f"examples.{model}.train", *more]
    done = run_pod(command, hosts, DEVICES // hosts, MESH, env=QUICKLY, timeout=600)
    if any(each.status for each in done):
        raise SystemExit("\n".join(f"[{n}] {each.stderr}" for n, each in enumerate(done)))


@cache
def alone(model: str, failed: str, idle: bool) -> list[float]:
    """The losses and the last accuracy of one process with all devices."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", f"examples.{model}.train", "--emulate", "many"]
        command += ["--mesh", MESH, "--failed", failed, *["--idle"] * idle]
        command += ["--steps", str(STEPS), "--out", folder]
        env = {**os.environ, "JAX_PLATFORMS": "cpu", **QUICKLY}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        losses, evaluations = read_metrics(Path(folder) / "metrics.jsonl")
    return [*losses.values(), evaluations[STEPS]["accuracy"]]


if __name__ == "__main__":
    sys.exit(main())
