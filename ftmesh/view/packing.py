"""Packing: columns of whole numbers as text that the page unpacks."""

from __future__ import annotations

import base64
import zlib

import numpy as np
from numpy.typing import ArrayLike

from ftmesh.schedule.transfers import Ints


def pack(values: ArrayLike) -> str:
    """Whole numbers of 32 bits as base64 of deflated differences, each to the number before it.

    Chunks go round and pairs repeat, so that differences are small and alike: a ring of a thousand
    chips, four million transfers, takes about 200 kB.

    >>> unpack(pack([7, 8, 9, 3])).tolist()
    [7, 8, 9, 3]
    """
    column = np.asarray(values, np.int32).ravel()
    steps = np.diff(column, prepend=np.int32(0)).astype("<i4")
    return base64.b64encode(zlib.compress(steps.tobytes())).decode("ascii")


def unpack(text: str) -> Ints:
    """The inverse of `pack`."""
    steps = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i4")
    return np.cumsum(steps, dtype=np.int32)
