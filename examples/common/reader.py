"""Reading: batches of examples for training and evaluation, made ahead by threads or processes.

The batch of a step is a function of the seed and the step alone: a run that is resumed, on as many
chips as before or on fewer, sees the examples it would have seen. Every epoch has an order of its
own and each example once; the epochs follow each other without a gap, whatever the batch.

A trainer says in a class under `Batches` how to read an example, and `Reader` reads ahead:

    with Reader(batches, first_step=100) as reader:
        for batch in reader:
            ...
"""

from __future__ import annotations

import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import grain
import jax
import numpy as np
from absl import flags
from numpy.typing import NDArray

from examples.common.shuffle import shuffled
from ftmesh.errors import DataError, RecordError
from ftmesh.memory_limits import check_memory

MAX_DAMAGED = 0.01  # of all examples
FEW = 10

Batch = TypeVar("Batch", bound=tuple[Any, ...])  # arrays with a row for each example


class Batches(ABC, Generic[Batch]):
    """The rows that a process reads of every batch, to be had by step in any order.

    `rows` are positions in the global batch, all of them unless given; -1 stands for padding. With
    `num_steps`, examples are shuffled, for training; without, each comes once, in order, for
    evaluation, and the last batch is filled up with padding.
    """

    unit = "examples"  # what they are called where some are damaged

    def __init__(
        self,
        num_examples: int,
        *,
        batch: int,
        num_steps: int | None = None,
        seed: int = 0,
        rows: Iterable[int] | None = None,
    ) -> None:
        self.num_examples, self.batch, self.seed = num_examples, batch, seed
        self.rows = np.array(range(batch) if rows is None else [*rows], np.int64)
        self.train = num_steps is not None
        self._num_steps = math.ceil(num_examples / batch) if num_steps is None else num_steps

    @abstractmethod
    def padding(self, num_rows: int) -> Batch:
        """So many rows without an example."""

    @abstractmethod
    def example(self, index: int, place: int) -> Iterable[Any]:
        """What goes into a row of each array, or a `RecordError`; `place` counts all epochs."""

    @abstractmethod
    def name(self, index: int) -> str:
        """How to tell a person which example this is."""

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: int) -> tuple[Batch, NDArray[np.int64]]:
        """A batch, and the index of the example that should be in each row and is damaged."""
        batch = self.padding(len(self.rows))
        damaged = np.full(len(self.rows), -1)
        places = step * self.batch + self.rows
        (rows,) = np.nonzero((self.rows >= 0) & (self.train | (places < self.num_examples)))
        places = indices = places[rows]
        if self.train:
            indices = shuffled(places, self.num_examples, seed=self.seed)
        for row, place, index in zip(rows, places.tolist(), indices.tolist(), strict=True):
            try:
                values = self.example(index, place)
            except RecordError:
                damaged[row] = index
                continue
            for array, value in zip(batch, values, strict=True):
                array[row] = value
        return batch, damaged

    def num_rows(self, step: int) -> int:
        """How many rows of a batch are to have an example."""
        is_real = self.rows >= 0
        if not self.train:
            is_real &= step * self.batch + self.rows < self.num_examples
        return int(is_real.sum())

    def check_room(self) -> None:
        """Refuse batches that the memory of this process has no room for."""
        row = sum(array.nbytes for array in self.padding(1))
        ahead = _num_threads() + 2  # those made, and the one in use
        check_memory(
            f"{ahead} batches of {len(self.rows):,} {self.unit}",
            ahead * len(self.rows) * row,
            "take a smaller --batch",
        )

    def why_damaged(self, index: int) -> str:
        """What is wrong with an example, by reading it again."""
        try:
            self.example(index, 0)
        except RecordError as error:
            return str(error)
        return f"{self.name(index)}: it could not be read, and now it can"


def _num_threads() -> int:
    return os.cpu_count() or 1


class Reader(Iterator[Batch]):
    """Batches one after another from `first_step` on, made ahead of their use.

    Threads suffice where the cores are few, or where reading does not hold Python's lock; beyond
    some eight cores, `num_workers` processes do better. Damaged examples are left out and are to be
    found in `skipped`, with the reason. More than the share `max_damaged` of those that this reader
    has, or more than `max_skipped` where that is given, are an error, and so is nothing else. Close
    it when done, or use it in a `with` statement.
    """

    def __init__(
        self,
        batches: Batches[Batch],
        *,
        first_step: int = 0,
        num_threads: int | None = None,
        num_workers: int = 0,
        max_damaged: float = MAX_DAMAGED,
        max_skipped: int | None = None,
    ) -> None:
        self._batches, self._num_workers = batches, num_workers
        own = batches.num_examples * int((batches.rows >= 0).sum()) // max(1, batches.batch)
        few = min(max(int(max_damaged * own), FEW), own // 2)  # of a small set, a few; never all
        self._max_skipped = few if max_skipped is None else max_skipped
        self.skipped: dict[int, str] = {}
        self._step, self._seen, self._lost = first_step, 0, 0  # rows
        threads = num_threads or _num_threads()
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads + 1)
        dataset: Any = grain.MapDataset.source(batches)[first_step:].to_iter_dataset(options)
        if num_workers:
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()  # grain asks them, and no one here has any
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=num_workers))
        self._iterator = iter(dataset)

    def __next__(self) -> Batch:
        batch, damaged = next(self._iterator)
        lost = damaged[damaged >= 0].tolist()
        self._seen += self._batches.num_rows(self._step)
        self._lost += len(lost)
        self._step += 1
        for index in lost:
            self._skip(index)
        if self._seen >= FEW:
            self._refuse_if_all_is_lost()
        if self._num_workers:  # give the memory that is shared with the processes back
            batch = jax.tree.map(np.array, batch)
        made: Batch = batch
        return made

    def close(self) -> None:
        """End the threads and processes."""
        self._iterator.close()

    def __enter__(self) -> Reader[Batch]:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()
        if error is None:
            self._refuse_if_all_is_lost()

    def _refuse_if_all_is_lost(self) -> None:
        """Nothing is learned from nothing, however few it is."""
        if self._seen and self._lost == self._seen:
            reason = next(reversed(self.skipped.values()))
            count = f"{self._seen} {self._batches.unit}"
            raise DataError(f"all of the first {count} are damaged; the last: {reason}")

    def _skip(self, index: int) -> None:
        if index in self.skipped:
            return
        self.skipped[index] = reason = self._batches.why_damaged(index)
        if len(self.skipped) > self._max_skipped:
            raise DataError(
                f"{len(self.skipped)} {self._batches.unit} are damaged, and at most "
                f"{self._max_skipped} may be left out (--max-damaged); the last: {reason}"
            )
        logging.getLogger(__name__).warning("left out %s", reason)
