"""Files that are written atomically, read with a bound on their size, and checked before work."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ftmesh.errors import ArgumentError

_MAX_PREFIX = 50  # characters of a name in a temporary one: file systems allow 255 bytes in all


def write_atomic(path: str | os.PathLike[str], parts: Iterable[Any]) -> None:
    """Write `parts`, which are bytes, to `path`, so that it has all of them or none.

    They are written to a temporary file in the same folder, so several writers of one file do not
    disturb each other: the last one wins. A file that is replaced keeps its permissions. An OSError
    has `path` as its `filename`.
    """
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
    """Return a file's content; raise OSError unless it is a regular file of at most `max_bytes`."""
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
