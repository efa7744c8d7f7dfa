"""Setting: where a program runs and how its chunks travel, as every executor is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Wire:
    """The dtypes in which partial sums and results travel; None for the buffer's own."""

    partials: Any = None
    results: Any = None


OWN = Wire()


@dataclass(frozen=True)
class Setting:
    """Where a program runs: along which axis, how chunks travel, and whether a vmap stands in."""

    axis_name: Any
    num_ranks: int
    wire: Wire
    emulated: bool
