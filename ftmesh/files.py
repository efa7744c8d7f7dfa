"""Files that are written atomically, read with a bound on their size, and checked before work.

Files of arrays (.npz) that others wrote are read safely: headers first, and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import re
import secrets
import stat
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ftmesh.errors import ArgumentError

_MAX_PREFIX = 50  # characters of a name in a temporary one: file systems allow 255 bytes in all
_MAX_HEADER_BYTES = 10_000
_SUFFIX = ".npy"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a Path has one slash left; C:/ is a drive
_ZIP_MAGIC = b"PK"
_COMPRESSION = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # others unpack without a bound


def check_local(path: str | os.PathLike[str], advice: str = "") -> None:
    """Raise ArgumentError for a URL such as ``gs://bucket/file``, which would name a local folder.

    Args:
        path: A path as the user gave it, not made absolute yet.
        advice: What to do instead.
    """
    name = os.fspath(path)
    if isinstance(name, str) and _URL.match(name):
        given = re.sub(":/+", "://", name, count=1)
        advice = advice or "give a local path, and copy the file; or mount the bucket"
        raise ArgumentError(f"{given} is a URL, and only local or mounted folders work: {advice}")


def write_atomic(path: str | os.PathLike[str], parts: Iterable[Any]) -> None:
    """Write `parts`, which are bytes, to `path`, so that it has all of them or none.

    They are written to a temporary file in the same folder, so several writers of one file do not
    disturb each other: the last one wins. A file that is replaced keeps its permissions. An OSError
    has `path` as its `filename`; URLs raise ArgumentError.
    """
    check_local(path)
    path = Path(os.path.realpath(path))
    try:
        _check_is_file(path)
        temporary = path.with_name(f".{path.name[:_MAX_PREFIX]}.{secrets.token_hex(8)}.begun")
        try:
            with open(temporary, "xb") as file:
                _copy_permissions(path, temporary)
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        error.filename = str(path)
        del error.filename2
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` in UTF-8, as `write_atomic` does."""
    write_atomic(path, [text.encode()])


def read_bounded(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Return a file's content; raise OSError unless it is a regular file of at most `max_bytes`.

    URLs raise ArgumentError.
    """
    check_local(path)
    with open(path, "rb", opener=open_nonblocking) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a file", str(path))
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is longer than {max_bytes:,} bytes", str(path))
    return content


def open_nonblocking(path: str, flags: int) -> int:
    """Open a file without waiting for the other end of a pipe: an `opener` for `open`."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    if os.name != "posix":
        return  # elsewhere folders cannot be opened
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return  # a folder may be writable and not readable
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_output_files(*paths: str | os.PathLike[str] | None) -> None:
    """Raise ArgumentError unless all `paths` can be written and are different files."""
    for path in paths:
        check_local(path or "")
    given = {Path(path): Path(os.path.realpath(path)) for path in paths if path is not None}
    if len({*given.values()}) < sum(path is not None for path in paths):
        first = next(iter(given))
        raise ArgumentError(f"{first} cannot be two outputs at once: give each a name of its own")
    for path, real in given.items():
        folder = real.parent
        try:
            if not folder.is_dir():
                raise ArgumentError(f"cannot write {path}: there is no folder {folder}")
            _check_is_file(real)
            with tempfile.TemporaryFile(dir=folder, prefix=f".{real.name[:_MAX_PREFIX]}."):
                pass
        except OSError as error:
            raise ArgumentError(f"cannot write {path}: {error.strerror}") from error


def check_output_folder(folder: str | os.PathLike[str] | None) -> None:
    """Raise ArgumentError unless `folder`, or the nearest existing one above it, is writable."""
    if not folder:
        return
    check_local(folder)
    existing = Path(os.path.realpath(folder))
    try:
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ArgumentError(f"cannot write to {folder}: {existing}: {error.strerror}") from error


def _copy_permissions(source: Path, target: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        mode = source.stat().st_mode & 0o777
        if target.stat().st_mode & 0o777 != mode:
            target.chmod(mode)


def _check_is_file(path: Path) -> None:
    if path.exists() and not path.is_file():
        kind = "; it is a folder" if path.is_dir() else ""
        raise OSError(errno.EEXIST, f"it is not a file{kind}")


# Files of arrays --------------------------------------------------------------------------------


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
