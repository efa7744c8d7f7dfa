"""Batches of images for training and evaluation, read ahead by threads or processes.

The batch of a step is a function of the seed and the step alone: a run that is resumed, on as many
chips as before or on fewer, sees the images it would have seen. Every epoch has an order of its own
and each image once; the epochs follow each other without a gap, whatever the batch.

    images = open_images(None, "train", size=24, num_classes=10, num_images=4096)
    batches = Batches(images, size=24, batch=128, num_steps=300, seed=0)
    with Reader(batches, first_step=100) as reader:
        for batch in reader:
            ...

Pixels are bytes. The model's `normalise` turns them into floats on the device, which costs nothing
there, and a quarter of the bytes travel.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import grain
import numpy as np
from absl import flags
from numpy.typing import NDArray

from examples.resnet50.augment import centre_crop, random_crop
from examples.resnet50.batch import Batch
from examples.resnet50.images import Images
from ftmesh.errors import DataError, RecordError


class Batches:
    """The rows that a process reads of every batch, to be had by step in any order.

    `rows` are positions in the global batch, all of them unless given; -1 stands for padding. With
    `num_steps`, images are shuffled and augmented, for training; without, each comes once, as it
    is, for evaluation, and the last batch is filled up with padding.
    """

    def __init__(
        self,
        images: Images,
        *,
        size: int,
        batch: int,
        num_steps: int | None = None,
        seed: int = 0,
        rows: Iterable[int] | None = None,
    ) -> None:
        self.images, self.size, self.batch, self.seed = images, size, batch, seed
        self.rows = list(range(batch)) if rows is None else [int(row) for row in rows]
        self.train = num_steps is not None
        self._num_steps = math.ceil(len(images) / batch) if num_steps is None else num_steps

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: int) -> tuple[Batch, NDArray[np.int64]]:
        """A batch, and the index of the image that should have been in each row and is damaged."""
        shape = (len(self.rows), self.size, self.size, 3)
        batch = Batch(np.zeros(shape, np.uint8), np.full(len(self.rows), -1, np.int32))
        damaged = np.full(len(self.rows), -1)
        for row, position in enumerate(self.rows):
            place = step * self.batch + position
            epoch, index = divmod(place, len(self.images))
            if position < 0 or (epoch and not self.train):
                continue
            if self.train:
                index = int(_order(len(self.images), self.seed, epoch)[index])
            try:
                pixels, label = self._pixels(index, place)
            except RecordError:
                damaged[row] = index
                continue
            batch.images[row], batch.labels[row] = pixels, label
        return batch, damaged

    def why_damaged(self, index: int) -> str:
        """What is wrong with an image, by reading it again."""
        try:
            self._pixels(index, 0)
        except RecordError as error:
            return str(error)
        return f"{self.images.name(index)}: it could not be read, and now it can"

    def _pixels(self, index: int, place: int) -> tuple[NDArray[np.uint8], int]:
        image, label = self.images.read(index)
        if not isinstance(image, bytes):
            return image, label
        try:
            if self.train:
                rng = np.random.default_rng([self.seed, 1, place])
                return random_crop(image, self.size, rng), label
            return centre_crop(image, self.size), label
        except RecordError as error:
            raise RecordError(f"{self.images.name(index)}: {error}") from error


@lru_cache(maxsize=4)
def _order(num_images: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The images in the order of an epoch."""
    return np.random.default_rng([seed, 0, epoch]).permutation(num_images)


class Reader(Iterator[Batch]):
    """Batches one after another from `first_step` on, made ahead of their use.

    Threads suffice where the cores are few, since decoding does not hold Python's lock; beyond some
    eight cores, `num_workers` processes do better. Damaged images are left out and are to be found
    in `skipped`, with the reason; more than `max_skipped` are an error. Close it when done, or use
    it in a `with` statement.
    """

    def __init__(
        self,
        batches: Batches,
        *,
        first_step: int = 0,
        num_threads: int | None = None,
        num_workers: int = 0,
        max_skipped: int = 100,
    ) -> None:
        self._batches, self._num_workers, self._max_skipped = batches, num_workers, max_skipped
        self.skipped: dict[int, str] = {}
        threads = num_threads or os.cpu_count() or 1
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads + 1)
        dataset: Any = grain.MapDataset.source(batches)[first_step:].to_iter_dataset(options)
        if num_workers:
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()  # grain asks them, and no one here has any
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=num_workers))
        self._iterator = iter(dataset)

    def __next__(self) -> Batch:
        batch, damaged = next(self._iterator)
        for index in damaged[damaged >= 0].tolist():
            self._skip(index)
        if self._num_workers:  # give the memory that is shared with the processes back
            batch = map(np.array, batch)
        return Batch(*batch)

    def close(self) -> None:
        """End the threads and processes."""
        self._iterator.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _skip(self, index: int) -> None:
        if index in self.skipped:
            return
        self.skipped[index] = reason = self._batches.why_damaged(index)
        if len(self.skipped) > self._max_skipped:
            raise DataError(
                f"{len(self.skipped)} images are damaged, and at most {self._max_skipped} may be "
                f"left out; the last: {reason}"
            )
        logging.getLogger(__name__).warning("left out %s", reason)
