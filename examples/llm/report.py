"""Prints and writes the metrics of a run: loss, tokens per second, and MFU."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from examples.llm.config import Config
from ftmesh.errors import TrainingError

# Dense bfloat16 products of a device in FLOP/s, by the start of its kind. A chip of 7x is two.
PEAKS = {
    "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12, "TPU v6": 918e12,
    "TPU v4": 275e12, "TPU7x": 1154e12, "NVIDIA H100": 989e12, "NVIDIA H200": 989e12,
}  # fmt: skip


def mfu(config: Config, mesh: Mesh, tokens_per_second: float) -> float | None:
    """Return the model FLOPs utilization, or None if the chip's peak is not known."""
    kind = mesh.devices.flat[0].device_kind
    peak = next((peak for name, peak in PEAKS.items() if kind.startswith(name)), None)
    return peak and tokens_per_second * config.flops_per_token / (peak * mesh.size)


class Report:
    """The metrics of a run, read once the next step is dispatched, so that no step waits.

    Args:
        config: The settings of the run.
        mesh: The devices.
        path: File that gets a line of JSON for each step.
        every: Print a line every `every` steps.
    """

    def __init__(self, config: Config, mesh: Mesh, path: str | None, every: int) -> None:
        self.losses: dict[int, float] = {}
        self._config, self._mesh, self._every = config, mesh, every
        self._path = None if path is None else Path(path)
        self._waiting: tuple[int, Any] | None = None
        self._since, self._last = time.perf_counter(), 0

    def step(self, step: int, metrics: Any) -> None:
        """Report a step that was dispatched, and print what the one before it has computed."""
        self.settle()
        if not self._last:  # the first step, which compiles, is not timed
            self._last = step
        self._waiting = (step, metrics)

    def settle(self) -> None:
        """Wait for the last step, and report it."""
        if self._waiting is None:
            return
        (step, metrics), self._waiting = self._waiting, None
        numbers = {name: float(value) for name, value in metrics.items()}
        self.losses[step] = numbers["loss"]
        if self._path is not None:
            with self._path.open("a") as file:
                print(json.dumps({"step": step, **numbers}), file=file)
        if not math.isfinite(numbers["loss"]):
            raise TrainingError(f"the loss of step {step} is {numbers['loss']}")
        if step == self._last:
            self._since = time.perf_counter()
        if step % self._every == 0:
            print(f"step {step}: loss {numbers['loss']:.4f}{self._speed(step)}", flush=True)

    def _speed(self, step: int) -> str:
        if step == self._last:
            return ""
        now = time.perf_counter()
        tokens = (step - self._last) * self._config.batch * self._config.length
        rate = tokens / (now - self._since)
        self._since, self._last = now, step
        share = mfu(self._config, self._mesh, rate)
        return f", {rate:,.0f} tokens/s" + (f", MFU {share:.1%}" if share else "")
