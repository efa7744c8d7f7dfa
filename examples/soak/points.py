"""Points that are made up, each by its number, and batches of them that are written down."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from threading import local
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from examples.common.reader import Batches

SIZE, CLASSES = 8, 4


class Points(NamedTuple):
    """Rows of points; a label of -1 stands for padding."""

    x: Any
    label: Any


class PointBatches(Batches[Points]):
    """Batches of points, and of each step a line in the file `used`: which points were read.

    A class is the side of two curved faces on which a point lies.
    """

    unit = "points"

    def __init__(self, num_examples: int, *, used: Path | None = None, **settings: Any) -> None:
        super().__init__(num_examples, **settings)
        self._used, self._read = used, local()

    def padding(self, num_rows: int) -> Points:
        """Points at 0, without a label."""
        return Points(np.zeros((num_rows, SIZE), np.float32), np.full(num_rows, -1, np.int32))

    def example(self, index: int, position: int) -> Iterable[Any]:
        """Where the point is, and its class."""
        self._read.points.append(index)
        x = np.random.default_rng(index).normal(size=SIZE)
        return x, 2 * (x[0] * x[1] > x[2]) + (x[3] + x[4] ** 2 > 1)

    def name(self, index: int) -> str:
        """Its number."""
        return f"point {index}"

    def __getitem__(self, step: int) -> tuple[Points, NDArray[np.int64]]:
        """The batch of a step, counted from 0 here and from 1 in the file."""
        self._read.points = []
        batch = super().__getitem__(step)
        if self._used is not None:
            line = json.dumps({"step": step + 1, "examples": self._read.points})
            with open(self._used, "ab", buffering=0) as file:  # at once, and never half of it
                file.write(f"{line}\n".encode())
        return batch


def used_file(folder: str | Path, epoch: int, process: int) -> Path:
    """Where a process writes what it reads in an epoch of the run."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder) / f"used-{epoch}-{process}.jsonl"
