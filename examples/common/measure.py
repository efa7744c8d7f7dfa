"""Measure the throughput of several programs' steps, interleaved in one run."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from examples.common.trainer import State, Trainer
from ftmesh.command_line import whole_number
from ftmesh.errors import TrainingError

RunSteps = Callable[[int], object]  # runs a number of steps and waits for them


def measure(
    programs: Mapping[str, RunSteps], batch: int, steps: int, repeats: int = 3
) -> dict[str, float]:
    """Return each program's examples per second: the best of `repeats` runs of `steps` steps."""
    for run_steps in programs.values():
        run_steps(5)  # compiles
    rates = dict.fromkeys(programs, 0.0)
    for _ in range(repeats):
        for name, run_steps in programs.items():
            start = time.perf_counter()
            run_steps(steps)
            rates[name] = max(rates[name], batch * steps / (time.perf_counter() - start))
    return rates


def trainer_steps(trainer: Trainer, state: State, batch: Any) -> RunSteps:
    """Return the steps of a trainer on one batch, given this process's rows of it."""
    batch = trainer.parallel.feed(batch)

    def run_steps(steps: int) -> None:
        nonlocal state
        for _ in range(steps):
            state, loss = trainer.step(state, batch)
        if not np.isfinite(float(loss)):
            raise TrainingError(f"the loss is {float(loss)}: failed steps are not measured")

    return run_steps


def read_arguments(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    presets: Iterable[str],
    *,
    preset: str,
    batch: int,
    steps: int,
) -> argparse.Namespace:
    """Add the arguments of a step benchmark to `parser`, and parse.

    With `--torch`, JAX must not preallocate the GPU's memory; call this before JAX starts.
    """
    parser.add_argument(
        "--preset", choices=tuple(presets), default=preset, help="default: %(default)s"
    )
    parser.add_argument(
        "--batch",
        type=whole_number(1),
        default=batch,
        help="global batch size (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=whole_number(1),
        default=steps,
        help="steps per repeat (default: %(default)s)",
    )
    parser.add_argument("--torch", action="store_true", help="measure PyTorch as well")
    parser.add_argument("--json", action="store_true", help="print the rates as JSON")
    args = parser.parse_args(argv)
    if args.torch:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return args
