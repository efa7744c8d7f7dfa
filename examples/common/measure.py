"""Measure: how many examples a second steps of several programs do, in turns, in one run."""

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

Turn = Callable[[int], None]  # does so many steps, and returns when they are done


def measure(
    turns: Mapping[str, Turn], batch: int, steps: int, repeats: int = 3
) -> dict[str, float]:
    """Examples per second of each, the best of `repeats` turns of `steps` steps of `batch`."""
    for turn in turns.values():
        turn(5)  # compiles
    rates = dict.fromkeys(turns, 0.0)
    for _ in range(repeats):
        for name, turn in turns.items():
            start = time.perf_counter()
            turn(steps)
            rates[name] = max(rates[name], batch * steps / (time.perf_counter() - start))
    return rates


def trainer_turn(trainer: Trainer, state: State, batch: Any) -> Turn:
    """Steps of a trainer, over and over on one batch, of which this process has read its rows."""
    batch = trainer.parallel.feed(batch)

    def turn(steps: int) -> None:
        nonlocal state
        for _ in range(steps):
            state, loss = trainer.step(state, batch)
        if not np.isfinite(float(loss)):
            raise TrainingError(f"the loss is {float(loss)}, and a step that fails is not measured")

    return turn


def read_arguments(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    presets: Iterable[str],
    *,
    preset: str,
    batch: int,
    steps: int,
) -> argparse.Namespace:
    """The arguments that every measurement of a step takes, after those that `parser` has.

    With `--torch` JAX takes GPU memory as it needs it, and leaves the rest to PyTorch. Otherwise it
    takes most of the card when it first looks at it; so this comes before.
    """
    parser.add_argument("--preset", choices=tuple(presets), default=preset, help="(%(default)s)")
    parser.add_argument(
        "--batch", type=whole_number(1), default=batch, help="of all devices together (%(default)s)"
    )
    parser.add_argument(
        "--steps", type=whole_number(1), default=steps, help="in a turn (%(default)s)"
    )
    parser.add_argument("--torch", action="store_true", help="measure PyTorch as well")
    parser.add_argument("--json", action="store_true", help="print the rates as JSON")
    args = parser.parse_args(argv)
    if args.torch:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return args
