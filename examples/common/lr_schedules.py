"""Learning-rate schedules, for optax and for logs that must not wait for a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ftmesh.errors import ArgumentError


def poly_decay(
    peak: float, *, warmup_steps: int, total_steps: int, end: float = 1e-4, power: float = 2
) -> Callable[[Any], Any]:
    """Return a schedule with linear warm-up to `peak`, then polynomial decay to `end`.

    Called with an array, as optax does, it returns an array. Called with a plain number it returns
    a plain number and uses no device.

    >>> lr_schedule = poly_decay(8, warmup_steps=2, total_steps=6, end=0)
    >>> [lr_schedule(step) for step in range(7)]
    [0.0, 4.0, 8.0, 4.5, 2.0, 0.5, 0.0]
    """
    if not 0 <= warmup_steps < total_steps:
        raise ArgumentError(
            f"{warmup_steps} steps of warm-up do not fit in {total_steps} steps: at least one step "
            "must follow the warm-up"
        )

    def rate(step: Any, xp: Any) -> Any:
        decayed_steps = xp.clip(step - warmup_steps, 0, total_steps - warmup_steps)
        left = 1 - decayed_steps / (total_steps - warmup_steps)
        decayed = (peak - end) * left**power + end
        if warmup_steps == 0:
            return decayed
        return xp.where(step < warmup_steps, peak * (step / warmup_steps), decayed)

    def lr_schedule(step: Any) -> Any:
        return rate(step, jnp) if isinstance(step, jax.Array) else float(rate(step, np))

    return lr_schedule
