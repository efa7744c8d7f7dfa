"""Files: written whole or not at all, read within bounds, and looked at before work is done.

Npz: arrays in an .npz file, whose headers are read first, so that nothing large is unpacked.

with Npz(file) as arrays:
    if arrays.headers["x"].shape == (3, 5):
        x = arrays.read("x")
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import secrets
import stat
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ftmesh.errors import ArgumentError

_LONGEST = 50  # characters of a name that are kept: file systems take 255 bytes in all


def write_whole(path: str | os.PathLike[str], parts: Iterable[Any]) -> None:
    """Write bytes to `path`, part after part; before all of it is on the disk, nothing is there.

    It is begun under a name of its own beside the target, so that any number of writers may write
    the same file: the last one is right. A file that is replaced hands its permissions on. What
    fails is an `OSError` that has the target's name.
    """
    path = Path(os.path.realpath(path))
    try:
        _refuse_what_is_no_file(path)
        begun = path.with_name(f".{path.name[:_LONGEST]}.{secrets.token_hex(8)}.begun")
        try:
            with open(begun, "xb") as file:
                _permit_as(path, begun)
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            os.replace(begun, path)
        except BaseException:
            begun.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        error.filename = str(path)
        del error.filename2
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """The same with text, in UTF-8."""
    write_whole(path, [text.encode()])


def read_whole(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """What is in a file, if it is one, and not longer than that. Else it is an `OSError`."""
    with open(path, "rb", opener=opened_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a file", str(path))
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is longer than {most_bytes:,} bytes", str(path))
    return content


def opened_at_once(path: str, flags: int) -> int:
    """To open files without waiting for whoever may write to a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk, too."""
    if os.name != "posix":
        return  # elsewhere folders are not opened
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return  # names may be put there, and not be read
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_targets(*paths: str | os.PathLike[str] | None) -> None:
    """Refuse paths of files to be written, before any work is done for them."""
    given = {Path(path): Path(os.path.realpath(path)) for path in paths if path is not None}
    if len({*given.values()}) < sum(path is not None for path in paths):
        raise ArgumentError(
            f"{next(iter(given))} cannot be two outputs at once: give each a name of its own"
        )
    for path, real in given.items():
        folder = real.parent
        try:
            if not folder.is_dir():
                raise ArgumentError(f"cannot write {path}: there is no folder {folder}")
            _refuse_what_is_no_file(real)
            with tempfile.TemporaryFile(dir=folder, prefix=f".{real.name[:_LONGEST]}."):
                pass
        except OSError as error:
            raise ArgumentError(f"cannot write {path}: {error.strerror}") from error


def check_folder(folder: str | os.PathLike[str] | None) -> None:
    """Refuse a folder in which files are to be written, or which is to be made."""
    if not folder:
        return
    above = Path(os.path.realpath(folder))
    try:
        while not above.exists() and above != above.parent:
            above = above.parent
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise ArgumentError(f"cannot write to {folder}: {above}: {error.strerror}") from error


def _permit_as(path: Path, begun: Path) -> None:
    """Give a file that is begun the permissions of the one it replaces, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.stat().st_mode & 0o777
        if begun.stat().st_mode & 0o777 != mode:
            begun.chmod(mode)


def _refuse_what_is_no_file(path: Path) -> None:
    if path.exists() and not path.is_file():
        kind = "; it is a folder" if path.is_dir() else ""
        raise OSError(errno.EEXIST, f"it is not a file{kind}")


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
