"""Batches of images: decoded, cropped and augmented.

    images = open_images(None, "train", size=24, num_classes=10, num_images=4096)
    batches = Batches(images, size=24, batch=128, num_steps=300, seed=0)
    with Reader(batches, first_step=100) as reader:
        for batch in reader:
            ...

Pixels are bytes. The model's `normalise` turns them into floats on the device, which costs nothing
there, and a quarter of the bytes travel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.common import reader
from examples.common.reader import Reader as Reader
from examples.resnet50.augment import centre_crop, random_crop
from examples.resnet50.batch import Batch
from examples.resnet50.images import Images
from ftmesh.errors import RecordError


class Batches(reader.Batches[Batch]):
    """The images of every batch, to be had by step in any order.

    The settings are those of `examples.common.reader.Batches`. Images are augmented in training, and
    cropped at the centre in evaluation.
    """

    unit = "images"

    def __init__(self, images: Images, *, size: int, **settings: Any) -> None:
        super().__init__(len(images), **settings)
        self.images, self.size = images, size

    def padding(self, num_rows: int) -> Batch:
        """Black images without a label."""
        images = np.zeros((num_rows, self.size, self.size, 3), np.uint8)
        return Batch(images, np.full(num_rows, -1, np.int32))

    def example(self, index: int, position: int) -> tuple[NDArray[np.uint8], int]:
        """Pixels and their label."""
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
        """The image's own name."""
        return self.images.name(index)
