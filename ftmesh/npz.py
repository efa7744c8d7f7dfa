"""Npz: arrays in an .npz file, whose headers are read first, so that nothing large is unpacked.

with Npz(file) as arrays:
    if arrays.headers["x"].shape == (3, 5):
        x = arrays.read("x")
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping
from functools import cached_property
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

_LONGEST_HEADER = 10_000  # bytes
_SUFFIX = ".npy"
_MAGIC = b"PK"
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # others are unpacked without a bound


class Header(NamedTuple):
    """What an array is, without its numbers."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_fortran: bool

    @property
    def num_bytes(self) -> int:
        """Of the numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


class NotNpzError(ValueError):
    """A file that is no .npz of plain arrays at all."""


class Npz:
    """An .npz file that is open. What is wrong with it is an error of some kind, before it is read.

    Objects are never unpickled.
    """

    def __init__(self, file: IO[bytes]) -> None:
        begin = file.read(len(npy.MAGIC_PREFIX))
        file.seek(0)
        if begin == npy.MAGIC_PREFIX:
            raise NotNpzError("is a single array, not an .npz")
        if begin[: len(_MAGIC)] != _MAGIC:
            raise NotNpzError("is not a plain .npz: it is pickled, or nothing that NumPy knows")
        self._zip = zipfile.ZipFile(file)

    def __enter__(self) -> Npz:
        return self

    def __exit__(self, *error: object) -> None:
        self._zip.close()

    @cached_property
    def headers(self) -> Mapping[str, Header]:
        """Of all arrays, by name."""
        names = [name for name in self._zip.namelist() if name.endswith(_SUFFIX)]
        return {name.removesuffix(_SUFFIX): self._header(name) for name in names}

    def read(self, name: str) -> NDArray[Any]:
        """An array, which takes as many bytes as its header says."""
        header = self.headers[name]
        with self._zip.open(name + _SUFFIX) as member:
            _read_header(member)
            raw = member.read(header.num_bytes)
            if len(raw) < header.num_bytes:
                raise ValueError(f"{name!r} is not as long as it says")
        flat: NDArray[Any] = np.frombuffer(raw, header.dtype)
        return (
            flat.reshape(header.shape[::-1]).T if header.is_fortran else flat.reshape(header.shape)
        )

    def _header(self, name: str) -> Header:
        if self._zip.getinfo(name).compress_type not in _PACKED:
            raise ValueError(f"{name!r} is packed as NumPy packs nothing")
        with self._zip.open(name) as member:
            header = _read_header(member)
            if member.tell() + header.num_bytes != self._zip.getinfo(name).file_size:
                raise ValueError(f"{name!r} is not as long as it says")
            return header


def _read_header(member: IO[bytes]) -> Header:
    """The header at which a member begins."""
    magic = member.read(npy.MAGIC_LEN)
    major, _ = npy.read_magic(io.BytesIO(magic))
    size = member.read(2 if major == 1 else 4)
    length = int.from_bytes(size, "little")
    if length > _LONGEST_HEADER:
        raise ValueError(f"a header of {length:,} bytes")
    head = io.BytesIO(size + member.read(length))
    read = npy.read_array_header_1_0 if major == 1 else npy.read_array_header_2_0
    shape, is_fortran, dtype = read(head)
    if dtype.hasobject:
        raise NotNpzError("is not a plain .npz: it has objects, which are pickled")
    if not dtype.itemsize or any(n < 0 for n in shape):
        raise ValueError(f"an array of shape {shape} and dtype {dtype}")
    return Header(shape, dtype, is_fortran)
