"""Reads .npz files from others safely: headers first, bounded sizes, nothing unpickled."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping
from functools import cached_property
from typing import IO, Any, Literal, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

_MAX_HEADER_BYTES = 10_000
_SUFFIX = ".npy"
_ZIP_MAGIC = b"PK"
_COMPRESSION = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # others unpack without a bound


class NpyHeader(NamedTuple):
    """The type of a stored array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_fortran: bool

    @property
    def num_bytes(self) -> int:
        """The size of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


class NotNpzError(ValueError):
    """A file is not an .npz of plain arrays: it is something else, or has pickled objects."""


class NpzReader:
    """An open .npz file; raises ValueError if an array is not what its header says."""

    def __init__(self, file: IO[bytes]) -> None:
        start = file.read(len(npy.MAGIC_PREFIX))
        file.seek(0)
        if start == npy.MAGIC_PREFIX:
            raise NotNpzError("is a single array, not an .npz")
        if start[: len(_ZIP_MAGIC)] != _ZIP_MAGIC:
            raise NotNpzError("is not a plain .npz: it is pickled or of another format")
        self._zip = zipfile.ZipFile(file)

    def __enter__(self) -> NpzReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._zip.close()

    @cached_property
    def headers(self) -> Mapping[str, NpyHeader]:
        """The headers of all arrays, by name."""
        names = [name for name in self._zip.namelist() if name.endswith(_SUFFIX)]
        return {name.removesuffix(_SUFFIX): self._header(name) for name in names}

    def read(self, name: str) -> NDArray[Any]:
        """Return an array, using as much memory as its header says."""
        header = self.headers[name]
        with self._zip.open(name + _SUFFIX) as member:
            _read_header(member)
            raw = member.read(header.num_bytes)
            if len(raw) < header.num_bytes:
                raise ValueError(f"the length of {name!r} differs from its header")
        order: Literal["F", "C"] = "F" if header.is_fortran else "C"
        return np.frombuffer(raw, header.dtype).reshape(header.shape, order=order)

    def _header(self, name: str) -> NpyHeader:
        if self._zip.getinfo(name).compress_type not in _COMPRESSION:
            raise ValueError(f"{name!r} has a compression that NumPy does not use")
        with self._zip.open(name) as member:
            header = _read_header(member)
            if member.tell() + header.num_bytes != self._zip.getinfo(name).file_size:
                raise ValueError(f"the length of {name!r} differs from its header")
            return header


def _read_header(member: IO[bytes]) -> NpyHeader:
    magic = member.read(npy.MAGIC_LEN)
    major, _ = npy.read_magic(io.BytesIO(magic))
    size = member.read(2 if major == 1 else 4)
    length = int.from_bytes(size, "little")
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length:,} bytes")
    content = io.BytesIO(size + member.read(length))
    read = npy.read_array_header_1_0 if major == 1 else npy.read_array_header_2_0
    shape, is_fortran, dtype = read(content)
    if dtype.hasobject:
        raise NotNpzError("is not a plain .npz: it has objects, which are pickled")
    if not dtype.itemsize or any(n < 0 for n in shape):
        raise ValueError(f"an array of shape {shape} and dtype {dtype}")
    return NpyHeader(shape, dtype, is_fortran)
