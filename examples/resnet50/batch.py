"""A batch of images, as the reader makes it and the steps take it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """Rows of pixels and their labels. A row without an image is black, and its label is -1."""

    images: Any  # bytes: rows, height, width, 3
    labels: Any  # int32
