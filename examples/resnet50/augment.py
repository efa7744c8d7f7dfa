"""Decode, crop and scale image files.

A JPEG is decoded at the smallest of the scales 1, 1/2, 1/4 and 1/8 that has enough pixels, which
saves most of the decoding time of large images.
"""

from __future__ import annotations

import io
import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ftmesh.errors import RecordError

Box = tuple[float, float, float, float]  # left, upper, right, lower

MAX_PIXELS = 2**26  # 192 MB, decoded
MIN_AREA = 0.08
MAX_RATIO = 4 / 3  # of a crop's sides, either way
EVAL_FRACTION = 224 / 256  # of the shorter side, in evaluation


def random_crop(data: bytes, size: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Crop a random box, scale it to `size` x `size`, and mirror it with probability 1/2."""
    image = _open(data)
    pixels = _scaled(image, _random_box(*image.size, rng), size)
    return pixels[:, ::-1] if rng.random() < 0.5 else pixels


def centre_crop(data: bytes, size: int) -> NDArray[np.uint8]:
    """Crop the centre: as if the shorter side were scaled to 256 for a `size` of 224."""
    image = _open(data)
    width, height = image.size
    side = min(width, height) * EVAL_FRACTION
    left, upper = (width - side) / 2, (height - side) / 2
    return _scaled(image, (left, upper, left + side, upper + side), size)


def _random_box(width: int, height: int, rng: np.random.Generator) -> Box:
    """Draw a box of random area, aspect ratio and position; after ten misfits, the largest."""
    bound = math.log(MAX_RATIO)
    for _ in range(10):
        area = width * height * rng.uniform(MIN_AREA, 1)
        ratio = math.exp(rng.uniform(-bound, bound))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, upper = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return left, upper, left + w, upper + h
    most = min(width, height * MAX_RATIO), min(height, width * MAX_RATIO)
    corner = (width - most[0]) / 2, (height - most[1]) / 2
    return *corner, corner[0] + most[0], corner[1] + most[1]


def _open(data: bytes) -> Image.Image:
    """Read the header of an image."""
    try:
        image = Image.open(io.BytesIO(data))
    except Exception as error:  # decoders raise many kinds over damaged bytes
        raise RecordError(f"not an image that Pillow can read: {error}") from error
    width, height = image.size
    if not 0 < width * height <= MAX_PIXELS:
        raise RecordError(f"an image of {width}x{height}: the limit is {MAX_PIXELS:,} pixels")
    return image


def _scaled(image: Image.Image, box: Box, size: int) -> NDArray[np.uint8]:
    """Decode the pixels in a box, scaled to a square."""
    width, height = image.size
    left, upper, right, lower = box
    needed = math.ceil(width * size / (right - left)), math.ceil(height * size / (lower - upper))
    try:
        image.draft("RGB", needed)
        x, y = image.size[0] / width, image.size[1] / height
        part = left * x, upper * y, min(right * x, image.size[0]), min(lower * y, image.size[1])
        coloured = image if image.mode == "RGB" else image.convert("RGB")
        square = coloured.resize((size, size), Image.Resampling.BILINEAR, part)
    except Exception as error:
        raise RecordError(f"the image does not decode: {error}") from error
    return np.asarray(square)
