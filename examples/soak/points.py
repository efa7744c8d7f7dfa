"""Synthetic points, generated from their index, and batches that record what was read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from threading import local
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from examples.common.reader import Batches

SIZE, CLASSES = 8, 4


class Points(NamedTuple):
    """Rows of points; label -1 is padding."""

    x: Any
    label: Any


class PointBatches(Batches[Points]):
    """Batches of points; the file `used` gets a line per step with the points read.

    The class of a point is its side of two curved surfaces.
    """

    unit = "points"

    def __init__(self, num_examples: int, *, used: Path | None = None, **settings: Any) -> None:
        super().__init__(num_examples, **settings)
        self._used, self._read = used, local()

    def padding(self, num_rows: int) -> Points:
        """Return points at 0 with label -1."""
        return Points(np.zeros((num_rows, SIZE), np.float32), np.full(num_rows, -1, np.int32))

    def example(self, index: int, position: int) -> Iterable[Any]:
        """Return the coordinates and class of a point."""
        self._read.points.append(index)
        x = np.random.default_rng(index).normal(size=SIZE)
        return x, 2 * (x[0] * x[1] > x[2]) + (x[3] + x[4] ** 2 > 1)

    def name(self, index: int) -> str:
        """Name a point in messages."""
        return f"point {index}"

    def __getitem__(self, step: int) -> tuple[Points, NDArray[np.int64]]:
        """Return the batch of a step, which counts from 0 here and from 1 in the file."""
        self._read.points = []
        batch = super().__getitem__(step)
        if self._used is not None:
            read = {"step": step + 1, "examples": self._read.points, "time": time.time()}
            line = json.dumps(read)
            with open(self._used, "ab", buffering=0) as file:  # one atomic write
                file.write(f"{line}\n".encode())
        return batch


def used_file(folder: str | Path, generation: int, process: int) -> Path:
    """Return the file in which a process records what it reads in a generation."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder) / f"used-{generation}-{process}.jsonl"
