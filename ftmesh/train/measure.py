"""Measure: how many examples a second steps of several programs do, in turns, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

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
