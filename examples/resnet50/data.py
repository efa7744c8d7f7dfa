"""Batches of images: decoded, cropped and augmented.

    images = open_images(None, "train", size=24, num_classes=10, num_images=4096)
    batches = Batches(images, size=24, batch=128, num_steps=300, seed=0)
    with Reader(batches, first_step=100) as reader:
        for batch in reader:
            ...

Pixels are uint8. The model's `normalise` turns them into floats on the device, so that a quarter
of the bytes are sent there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from examples.common import reader
from examples.common.reader import Reader as Reader
from examples.resnet50.augment import centre_crop, random_crop
from examples.resnet50.images import Images
from ftmesh.errors import RecordError


class Batch(NamedTuple):
    """Images with their labels. Padding is black, with label -1."""

    images: Any  # uint8: rows, height, width, 3
    labels: Any  # int32


class Batches(reader.Batches[Batch]):
    """Batches of images, augmented in training and centre-cropped in evaluation.

    `settings` are those of `examples.common.reader.Batches`.
    """

    unit = "images"

    def __init__(self, images: Images, *, size: int, **settings: Any) -> None:
        super().__init__(len(images), **settings)
        self.images, self.size = images, size

    def padding(self, num_rows: int) -> Batch:
        """Return black images with label -1."""
        images = np.zeros((num_rows, self.size, self.size, 3), np.uint8)
        return Batch(images, np.full(num_rows, -1, np.int32))

    def example(self, index: int, position: int) -> tuple[NDArray[np.uint8], int]:
        """Return the pixels and label of an image."""
        image, label = self.images.read(index)
        if not isinstance(image, bytes):
            return image, label
        try:
            if self.train:
                rng = np.random.default_rng([self.seed, 1, position])
                return random_crop(image, self.size, rng), label
            return centre_crop(image, self.size), label
        except RecordError as error:
            raise RecordError(f"{self.name(index)}: {error}") from error

    def name(self, index: int) -> str:
        """Name an image in messages."""
        return self.images.name(index)
