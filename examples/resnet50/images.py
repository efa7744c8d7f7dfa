"""Where images come from: TFRecords of ImageNet, folders of image files, or nowhere.

A source has a length, and `read(index)` gives an image, undecoded where it is a file, and its label
from 0 on. `open_images` looks at a folder and picks the source, and refuses what could not be
trained on before anything runs.
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
    """What can be trained or evaluated on."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[bytes | NDArray[np.uint8], int]:
        """An image, as a file or as pixels, and its label. Errors name the image."""
        ...

    def name(self, index: int) -> str:
        """How to tell a person which image this is."""
        ...


class RecordImages:
    """ImageNet as TFRecords, whose labels count from 1."""

    def __init__(self, folder: Path, split: str, num_classes: int, *, show: bool = False) -> None:
        self._records = Records(find_shards(folder, f"{split}-*"), show=show)
        self._num_classes = num_classes
        if not len(self):
            raise DataError(f"the {split} shards of {folder} hold no records")
        for index in self._records.first_of_shards():
            try:
                self.read(index)
            except RecordError:
                continue  # to be counted when its turn comes

    def __len__(self) -> int:
        return len(self._records)

    def name(self, index: int) -> str:
        """File and record."""
        return self._records.name(index)

    def read(self, index: int) -> tuple[bytes, int]:
        """A JPEG and its label."""
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
    """A folder of image files per class, the classes numbered in the order of their names."""

    def __init__(self, folder: Path, split: str, num_classes: int) -> None:
        train, here = folder / "train", folder / split
        if split == "validation" and not here.exists():
            here = folder / "val"
        classes = _folders(train)
        if len(classes) > num_classes:
            raise DataError(
                f"{train} has {len(classes)} folders, a class each; the model has only "
                f"{num_classes} classes"
            )
        unknown = [name for name in _folders(here) if name not in classes]
        if unknown:
            raise DataError(f"{here} has classes that {train} has not: {', '.join(unknown[:3])}")
        files = [
            (str(path), label)
            for label, name in enumerate(classes)
            for path in sorted((here / name).glob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        if not files:
            raise DataError(f"the folders of {here} hold no images")
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def name(self, index: int) -> str:
        """The file."""
        return self._files[index][0]

    def read(self, index: int) -> tuple[bytes, int]:
        """An image file and its label."""
        path, label = self._files[index]
        try:
            return read_bounded(path, MAX_FILE_BYTES), label
        except OSError as error:
            raise RecordError(f"{path}: {error.strerror}") from error


class SyntheticImages:
    """Made-up images that can be learned: a pattern for each class, shifted, and much noise."""

    def __init__(self, split: str, *, size: int, num_classes: int, num_images: int) -> None:
        self._split, self._num_images = ("train", "validation").index(split), num_images
        colours = np.random.default_rng(0).integers(0, 256, (num_classes, 4, 4, 3))
        at = np.arange(size) * 4 // size
        self._patterns = (colours[:, at[:, None], at] // 2).astype(np.uint8)

    def __len__(self) -> int:
        return self._num_images

    def name(self, index: int) -> str:
        """The number is all it has."""
        return f"synthetic image {index}"

    def read(self, index: int) -> tuple[NDArray[np.uint8], int]:
        """Pixels and their label."""
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
    """The images of a split, "train" or "validation".

    A folder has either TFRecord shards, `train-*` and `validation-*`, or folders `train/` and
    `validation/` (or `val/`) with a folder of images per class. Without one, `num_images` are
    made up. With `show` there is a progress bar where records are indexed, at their first use.
    """
    if folder is None:
        return SyntheticImages(split, size=size, num_classes=num_classes, num_images=num_images)
    folder = Path(folder)
    if (folder / "train").is_dir():
        return FolderImages(folder, split, num_classes)
    return RecordImages(folder, split, num_classes, show=show)


def _folders(folder: Path) -> list[str]:
    """The names of the folders in a folder."""
    if not folder.is_dir():
        raise DataNotFoundError(f"there is no folder {folder}")
    return sorted(path.name for path in folder.iterdir() if path.is_dir())
