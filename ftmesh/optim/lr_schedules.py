"""Learning rates by step, for optax."""

from __future__ import annotations

import optax

from ftmesh.errors import ArgumentError


def poly_decay(
    peak: float, *, warmup_steps: int, total_steps: int, end: float = 1e-4, power: float = 2
) -> optax.Schedule:
    """Up from 0 to `peak` in a line, then down to `end` along a power of the steps that are left.

    >>> lr_schedule = poly_decay(8, warmup_steps=2, total_steps=6, end=0)
    >>> [float(lr_schedule(step)) for step in range(7)]
    [0.0, 4.0, 8.0, 4.5, 2.0, 0.5, 0.0]
    """
    if not 0 <= warmup_steps < total_steps:
        raise ArgumentError(
            f"{warmup_steps} steps of warm-up do not fit in {total_steps} steps; have at least one "
            "step after the warm-up"
        )
    decay = optax.polynomial_schedule(peak, end, power, total_steps - warmup_steps)
    if warmup_steps == 0:
        return decay
    return optax.join_schedules(
        [optax.linear_schedule(0, peak, warmup_steps), decay], [warmup_steps]
    )
