"""Batches of examples for training and evaluation, prefetched by threads or processes.

The batch of a step depends only on the seed and the step, so a resumed run sees the examples it
would have seen, on any number of chips. Every epoch has its own order and uses each example once.
Epochs follow each other without a gap: a batch may span two of them.

Subclass `Batches` to say how an example is read. `Reader` prefetches:

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
from hashlib import shake_256
from typing import Any, Generic, TypeVar

import grain
import jax
import numpy as np
from absl import flags
from numpy.typing import NDArray

from ftmesh.errors import DataError, RecordError
from ftmesh.memory_checks import check_memory

MAX_DAMAGED = 0.01  # fraction of all examples
MIN_SKIPPED = 10  # a small data set may have this many damaged examples
NUM_ROUNDS = 32  # of the shuffle
_U64 = np.uint64

Batch = TypeVar("Batch", bound=tuple[Any, ...])  # arrays with one row per example


class Batches(ABC, Generic[Batch]):
    """The rows that a process reads of every batch, indexed by step.

    Args:
        num_examples: Size of the data set.
        batch: Global batch size.
        num_steps: With a number, for training: examples are shuffled. Without, for evaluation:
            each example comes once, in order, and the last batch is padded.
        seed: Of the shuffle.
        rows: Positions in the global batch to read (default: all); -1 is padding.
    """

    unit = "examples"  # for messages and rates

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
        """Return a batch of `num_rows` padding rows."""

    @abstractmethod
    def example(self, index: int, position: int) -> Iterable[Any]:
        """Return one value per array of the batch, or raise `RecordError`.

        `position` counts over all epochs: a seed for random augmentation.
        """

    @abstractmethod
    def name(self, index: int) -> str:
        """Name an example in messages."""

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: int) -> tuple[Batch, NDArray[np.int64]]:
        """Return a batch, and for each row the index of its example if damaged, else -1."""
        batch = self.padding(len(self.rows))
        damaged = np.full(len(self.rows), -1)
        positions = step * self.batch + self.rows
        (rows,) = np.nonzero((self.rows >= 0) & (self.train | (positions < self.num_examples)))
        positions = indices = positions[rows]
        if self.train:
            indices = shuffled(positions, self.num_examples, seed=self.seed)
        for row, position, index in zip(rows, positions.tolist(), indices.tolist(), strict=True):
            try:
                values = self.example(index, position)
            except RecordError:
                damaged[row] = index
                continue
            for array, value in zip(batch, values, strict=True):
                array[row] = value
        return batch, damaged

    def num_rows(self, step: int) -> int:
        """Return how many rows of a batch should hold an example."""
        is_real = self.rows >= 0
        if not self.train:
            is_real &= step * self.batch + self.rows < self.num_examples
        return int(is_real.sum())

    def check_memory(self) -> None:
        """Raise unless the prefetched batches fit in host memory."""
        row_bytes = sum(array.nbytes for array in self.padding(1))
        num_batches = _num_threads() + 2  # those being read, and the one in use
        check_memory(
            f"{num_batches} batches of {len(self.rows):,} {self.unit}",
            num_batches * len(self.rows) * row_bytes,
            "take a smaller --batch",
        )

    def why_damaged(self, index: int) -> str:
        """Read an example again, and return what is wrong with it."""
        try:
            self.example(index, 0)
        except RecordError as error:
            return str(error)
        return f"{self.name(index)}: could not be read at first, and can be now"


class Reader(Iterator[Batch]):
    """Iterate over batches from `first_step` on, prefetching them.

    Threads suffice on few cores, or where reading releases Python's lock; beyond about eight cores
    worker processes do better. Damaged examples are left out and listed in `skipped`, by index,
    with the reason. Close the reader when done, or use it in a `with` statement.

    Args:
        batches: What to read.
        first_step: The first batch.
        num_threads: Default: one per core.
        num_workers: Processes; 0 for threads only.
        max_damaged: Fraction of this reader's examples that may be damaged.
        max_skipped: The same as a number; takes precedence.

    Raises:
        DataError: On iteration, if too many examples are damaged, or all of them so far.
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
        most = min(max(int(max_damaged * own), MIN_SKIPPED), own // 2)
        self._max_skipped = most if max_skipped is None else max_skipped
        self.skipped: dict[int, str] = {}
        self._step, self._rows_read, self._rows_lost = first_step, 0, 0
        threads = num_threads or _num_threads()
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads + 1)
        dataset: Any = grain.MapDataset.source(batches)[first_step:].to_iter_dataset(options)
        if num_workers:
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()  # grain reads absl flags, and there are none
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=num_workers))
        self._iterator = iter(dataset)

    def __next__(self) -> Batch:
        batch: Batch
        batch, damaged = next(self._iterator)
        lost = damaged[damaged >= 0].tolist()
        self._rows_read += self._batches.num_rows(self._step)
        self._rows_lost += len(lost)
        self._step += 1
        for index in lost:
            self._skip(index)
        if self._rows_read >= MIN_SKIPPED:
            self._check_some_left()
        # Copy out of the memory shared with the workers, so that it can be reused.
        return jax.tree.map(np.array, batch) if self._num_workers else batch

    def close(self) -> None:
        """Stop the threads and processes."""
        self._iterator.close()

    def __enter__(self) -> Reader[Batch]:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()
        if error is None:
            self._check_some_left()

    def _check_some_left(self) -> None:
        if self._rows_read and self._rows_lost == self._rows_read:
            reason = next(reversed(self.skipped.values()))
            count = f"{self._rows_read} {self._batches.unit}"
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


def shuffled(positions: NDArray[np.int64], num_examples: int, *, seed: int) -> NDArray[np.int64]:
    """Return the examples at some positions of an endless sequence of shuffled epochs.

    No table of the order is kept: each position is computed by itself, in integers, so the order
    is the same on every machine. An order is a product of rounds (Hoang, Morris and Rogaway, "An
    Enciphering Scheme Based on a Card Shuffle", 2012). A round pairs x with key - x, modulo
    `num_examples`, and swaps the two if a hash of the larger says so. That is a bijection for any
    `num_examples`.

    >>> shuffled(np.arange(10), 5, seed=0).reshape(2, 5).tolist()
    [[0, 3, 4, 2, 1], [1, 0, 3, 4, 2]]
    """
    if not len(positions):
        return np.zeros(0, np.int64)
    epochs, within = np.divmod(np.asarray(positions, np.int64), num_examples)
    distinct, which = np.unique(epochs, return_inverse=True)
    keys = np.stack([_round_keys(seed, epoch) for epoch in distinct.tolist()], axis=-1)
    if len(distinct) > 1:
        keys = keys[..., which]
    number, x = _U64(num_examples), within.astype(_U64)
    for key, salt in keys:
        difference = key % number - x
        partner = np.minimum(difference, difference + number)  # negative values wrap to the top
        x = np.where(_hash_bit(np.maximum(x, partner) ^ salt), partner, x)
    return x.astype(np.int64)


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """Return a key and a salt for each round."""
    digest = shake_256(f"ftmesh.shuffle/1 {seed} {epoch}".encode()).digest(16 * NUM_ROUNDS)
    return np.frombuffer(digest, "<u8").astype(_U64).reshape(NUM_ROUNDS, 2)


def _hash_bit(x: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Hash each number to one bit, with the mixing of SplitMix64."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x >= _U64(1 << 63)


def _num_threads() -> int:
    return os.cpu_count() or 1
