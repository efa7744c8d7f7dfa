"""Sources of images: TFRecords of ImageNet, folders of image files, or synthetic images.

`open_images` picks the source and raises for data that cannot be trained on. A source has a length,
and `read(index)` returns an image, undecoded if it is a file, and its label, from 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from examples.common.records import Records, find_shards
from ftmesh.errors import DataError, DataNotFoundError, RecordError
from ftmesh.files import read_bounded

MAX_FILE_BYTES = 2**28
SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}


class Images(Protocol):
    """A source of images."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[bytes | NDArray[np.uint8], int]:
        """Return an image, as a file or as pixels, and its label. Errors name the image."""
        ...

    def name(self, index: int) -> str:
        """Name an image in messages."""
        ...


class RecordImages:
    """ImageNet as TFRecords, with labels from 1."""

    def __init__(self, folder: Path, split: str, num_classes: int, *, show: bool = False) -> None:
        self._records = Records(find_shards(folder, f"{split}-*"), show=show)
        self._num_classes = num_classes
        if not len(self):
            raise DataError(f"the {split} shards of {folder} hold no records")
        for index in self._records.first_of_shards():
            try:
                self.read(index)
            except RecordError:
                continue  # counted when the reader gets to it

    def __len__(self) -> int:
        return len(self._records)

    def name(self, index: int) -> str:
        """Return the file and record."""
        return self._records.name(index)

    def read(self, index: int) -> tuple[bytes, int]:
        """Return a JPEG and its label."""
        example = self._records.example(index)
        try:
            (image,), (number,) = example["image/encoded"], example["image/class/label"]
        except (KeyError, ValueError) as error:
            raise DataError(
                f"{self.name(index)} must have one image/encoded and one image/class/label; it has "
                f"{', '.join(example) or 'no features'}"
            ) from error
        label = int(number) - 1
        if not 0 <= label < self._num_classes:
            raise DataError(
                f"{self.name(index)} has the label {label + 1}; labels of {self._num_classes} "
                f"classes go from 1 to {self._num_classes}"
            )
        return bytes(image), label


class FolderImages:
    """One folder of image files per class; classes are numbered in the order of their names."""

    def __init__(self, folder: Path, split: str, num_classes: int) -> None:
        train, own = folder / "train", folder / split
        if split == "validation" and not own.exists():
            own = folder / "val"
        classes = _subfolders(train)
        if len(classes) > num_classes:
            raise DataError(
                f"{train} has {len(classes)} folders, one per class; the model has only "
                f"{num_classes} classes"
            )
        unknown = [name for name in _subfolders(own) if name not in classes]
        if unknown:
            raise DataError(f"{own} has classes missing from {train}: {', '.join(unknown[:3])}")
        files = [
            (str(path), label)
            for label, name in enumerate(classes)
            for path in sorted((own / name).glob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        if not files:
            raise DataError(f"the folders of {own} hold no images")
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def name(self, index: int) -> str:
        """Return the path."""
        return self._files[index][0]

    def read(self, index: int) -> tuple[bytes, int]:
        """Return an image file and its label."""
        path, label = self._files[index]
        try:
            return read_bounded(path, MAX_FILE_BYTES), label
        except OSError as error:
            raise RecordError(f"{path}: {error.strerror}") from error


class SyntheticImages:
    """Synthetic images that can be learned: a shifted pattern per class, and noise."""

    def __init__(self, split: str, *, size: int, num_classes: int, num_images: int) -> None:
        self._split, self._num_images = ("train", "validation").index(split), num_images
        colours = np.random.default_rng(0).integers(0, 256, (num_classes, 4, 4, 3))
        cell = np.arange(size) * 4 // size
        self._patterns = (colours[:, cell[:, None], cell] // 2).astype(np.uint8)

    def __len__(self) -> int:
        return self._num_images

    def name(self, index: int) -> str:
        """Name an image in messages."""
        return f"synthetic image {index}"

    def read(self, index: int) -> tuple[NDArray[np.uint8], int]:
        """Return the pixels and label of an image."""
        rng = np.random.default_rng([self._split, index])
        label = int(rng.integers(len(self._patterns)))
        pattern = np.roll(self._patterns[label], rng.integers(0, 1000, 2), axis=(0, 1))
        return pattern + rng.integers(0, 128, pattern.shape, np.uint8), label


def open_images(
    folder: str | Path | None,
    split: str,
    *,
    size: int,
    num_classes: int,
    num_images: int,
    show: bool = False,
) -> Images:
    """Open the images of a split, "train" or "validation".

    Args:
        folder: With TFRecord shards `train-*` and `validation-*`, or with folders `train/` and
            `validation/` (or `val/`) that have one folder of images per class. None for
            `num_images` synthetic images.
        split: "train" or "validation".
        size: Side of synthetic images.
        num_classes: Classes of the model.
        num_images: Number of synthetic images.
        show: Show a progress bar while records are indexed, at their first use.
    """
    if folder is None:
        return SyntheticImages(split, size=size, num_classes=num_classes, num_images=num_images)
    folder = Path(folder)
    if (folder / "train").is_dir():
        return FolderImages(folder, split, num_classes)
    return RecordImages(folder, split, num_classes, show=show)


def _subfolders(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise DataNotFoundError(f"there is no folder {folder}")
    return sorted(path.name for path in folder.iterdir() if path.is_dir())
