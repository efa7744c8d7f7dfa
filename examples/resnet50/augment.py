"""From an image file to the pixels that the network sees.

A JPEG is decoded at the smallest of the scales 1, 1/2, 1/4 and 1/8 that still has as many pixels as
are wanted; most of the time of decoding is saved where the image is large.
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
MAX_RATIO = 4 / 3  # of the sides of a crop, either way
EVAL_SHARE = 224 / 256  # of the shorter side, that evaluation sees


def random_crop(data: bytes, size: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Some part of an image, scaled to `size` x `size` and perhaps mirrored."""
    image = _open(data)
    pixels = _scaled(image, _random_box(*image.size, rng), size)
    return pixels[:, ::-1] if rng.random() < 0.5 else pixels


def centre_crop(data: bytes, size: int) -> NDArray[np.uint8]:
    """The middle of an image: its shorter side scaled to 256 where 224 are wanted, then cropped."""
    image = _open(data)
    width, height = image.size
    side = min(width, height) * EVAL_SHARE
    left, upper = (width - side) / 2, (height - side) / 2
    return _scaled(image, (left, upper, left + side, upper + side), size)


def _random_box(width: int, height: int, rng: np.random.Generator) -> Box:
    """A box of a random area, ratio and place; after ten that do not fit, as much as does."""
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
    """An image of which only the head has been read."""
    try:
        image = Image.open(io.BytesIO(data))
    except Exception as error:  # decoders raise many kinds over damaged bytes
        raise RecordError(f"not an image that Pillow can read: {error}") from error
    width, height = image.size
    if not 0 < width * height <= MAX_PIXELS:
        raise RecordError(f"an image of {width}x{height}: it may have {MAX_PIXELS:,} pixels")
    return image


def _scaled(image: Image.Image, box: Box, size: int) -> NDArray[np.uint8]:
    """The pixels in a box, scaled to a square."""
    width, height = image.size
    left, upper, right, lower = box
    enough = math.ceil(width * size / (right - left)), math.ceil(height * size / (lower - upper))
    try:
        image.draft("RGB", enough)
        x, y = image.size[0] / width, image.size[1] / height
        part = left * x, upper * y, min(right * x, image.size[0]), min(lower * y, image.size[1])
        coloured = image if image.mode == "RGB" else image.convert("RGB")
        square = coloured.resize((size, size), Image.Resampling.BILINEAR, part)
    except Exception as error:
        raise RecordError(f"the image does not decode: {error}") from error
    return np.asarray(square)
