"""The index of a set of TFRecord files, kept in an index file next to them.

An index file is mapped into memory, shared by the processes of a host:

    format name, 24 bytes | checksum, 4 | 0, 4 | bytes of names, 8 | blocks, 8
    base of every block, 8 bytes each | checksum of every block, 4 each | names: JSON, padded to 8
    where the records of each shard begin, 4 or 8 bytes each, padded to 8

The first checksum covers what follows it up to the records. A block's own is compared when one of
its records is first read. When a file changes, that file alone is scanned again.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import re
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from itertools import accumulate, takewhile
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from examples.common.shard_index import BLOCK, FileStamp, ShardIndex, checksum
from ftmesh.errors import DataError
from ftmesh.files import write_atomic

INDEX_SUFFIX = ".ftmesh-index"

_FORMAT = b"ftmesh.records/1"
_START = struct.Struct("<24sIIQQ")
_CHECKED_FROM = 28  # bytes: the end of the checksum
_BLOCK_BYTES = 12
_NUMBERS = re.compile(r"[-_.]*([0-9]*|[0-9]+-of-[0-9]+.*)$")  # the end of a shard's name
_ABANDONED_S = 3600  # age at which a temporary file is removed
_FIELDS = ("size", "mtime_ns", "ctime_ns", "records", "width")
_THREADS = 32  # they wait for the disk


def open_index(paths: Sequence[Path], *, keep: bool = True, show: bool = False) -> list[ShardIndex]:
    """Return the index of each file.

    With `keep`, load what the index files know and write what they do not. With `show`, show a
    progress bar on stderr while files are scanned.
    """
    with ThreadPoolExecutor(_THREADS) as threads:
        stamps = dict(zip(paths, threads.map(FileStamp.from_path, paths), strict=True))
    members_of = _by_index_file(stamps) if keep else {}
    known = {path: shard for file in members_of for path, shard in _load_paths(file).items()}
    shards = {path: known[path] for path in paths if _is_of(known.get(path), stamps[path])}
    new = [path for path in stamps if path not in shards]
    shards |= _scan(new, num_bytes=sum(stamps[path].size for path in new), show=show)
    for file, members in members_of.items():
        if not set(members).isdisjoint(new):
            others = {
                path: shard
                for path, shard in known.items()
                if path.parent == file.parent and path not in shards and _is_unchanged(path, shard)
            }
            own = {path: shards[path] for path in members}
            write_index(file, {path.name: shard for path, shard in (others | own).items()})
            for path, shard in _load_paths(file).items():  # mapped: shared with other processes
                if path in own and _is_of(shard, stamps[path]):
                    shards[path] = shard
    return [shards[path] for path in paths]


def index_file(folder: Path, names: Iterable[str]) -> Path:
    """Return the index file of some files of a folder: hidden, named after their common prefix.

    >>> index_file(Path("data"), ["train-00000-of-00002", "train-00001-of-00002"]).name
    '.train.ftmesh-index'
    """
    stems = [_NUMBERS.sub("", name) for name in names]
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(min(stems), max(stems), strict=False))
    prefix = _NUMBERS.sub("", "".join(letter for letter, _ in pairs))
    return folder / (f".{prefix}{INDEX_SUFFIX}" if prefix else INDEX_SUFFIX)


def remove_indexes(path: Path) -> None:
    """Remove the index files that may cover a file."""
    for file in path.parent.glob(f".*{INDEX_SUFFIX[1:]}"):
        prefix = file.name.removesuffix(INDEX_SUFFIX).removeprefix(".")
        if path.name.startswith(prefix):
            with suppress(OSError):  # the file's stamp protects too
                file.unlink()


def load_index(file: Path) -> dict[str, ShardIndex]:
    """Load an index file, by shard name; empty, with a warning, if it cannot be used."""
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size < _START.size:
                raise ValueError("cut short")
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        return {}
    except OSError as error:
        return _unusable(file, f"cannot be read: {error.strerror}")
    except ValueError:
        return _unusable(file, "is damaged")
    if mapped[:24] != _FORMAT.ljust(24, b"\0"):
        return _unusable(file, f"is not of the format {_FORMAT.decode()}")
    try:
        return dict(_parse(mapped))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return _unusable(file, "is damaged")


def write_index(file: Path, shards: Mapping[str, ShardIndex]) -> None:
    """Write an index file atomically; a failure is only logged."""
    try:
        for begun in file.parent.glob(f".{file.name}.*.begun"):
            if time.time() - begun.stat().st_mtime > _ABANDONED_S:
                begun.unlink()
        write_atomic(file, _serialize(shards))
    except OSError as error:
        logging.getLogger(__name__).warning(
            "could not write the index %s: the next start scans all files again: %s",
            file, error.strerror,
        )  # fmt: skip


def _by_index_file(paths: Iterable[Path]) -> dict[Path, list[Path]]:
    """Group data files by their index file."""
    folders: dict[Path, list[Path]] = {}
    for path in paths:
        folders.setdefault(path.parent, []).append(path)
    return {
        index_file(folder, [path.name for path in members]): members
        for folder, members in folders.items()
    }


def _load_paths(file: Path) -> dict[Path, ShardIndex]:
    return {file.parent / name: shard for name, shard in load_index(file).items()}


def _is_of(shard: ShardIndex | None, stamp: FileStamp) -> bool:
    return shard is not None and shard.stamp == stamp


def _is_unchanged(path: Path, shard: ShardIndex) -> bool:
    try:
        return shard.stamp == FileStamp.from_path(path)
    except DataError:
        return False


def _scan(paths: Sequence[Path], *, num_bytes: int, show: bool) -> dict[Path, ShardIndex]:
    """Index files in threads; the first error stops them all."""
    if not paths:
        return {}
    stopped = Event()
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, disable=not (show and console.is_terminal))
    with bar, ThreadPoolExecutor(_THREADS) as threads:
        task = bar.add_task(f"indexing {len(paths)} files", total=num_bytes)

        def tick(num_bytes: int) -> None:
            if stopped.is_set():
                raise DataError("another file could not be indexed")
            bar.advance(task, num_bytes)

        try:
            shards = threads.map(lambda path: ShardIndex.scan(path, tick), paths)
            return dict(zip(paths, shards, strict=True))
        except BaseException:
            stopped.set()
            threads.shutdown(cancel_futures=True)
            raise


def _unusable(file: Path, why: str) -> dict[str, ShardIndex]:
    logging.getLogger(__name__).warning("%s %s; scanning the files again", file, why)
    return {}


def _serialize(shards: Mapping[str, ShardIndex]) -> Iterator[Any]:
    """Yield the bytes of an index file."""
    fields = {
        name: {**asdict(shard.stamp), "records": len(shard), "width": shard.starts.itemsize}
        for name, shard in shards.items()
    }
    names = json.dumps(fields).encode()
    bases = b"".join(shard.bases.tobytes() for shard in shards.values())
    checksums = b"".join(shard.checksums.tobytes() for shard in shards.values())
    names += b" " * (-(len(names) + len(checksums)) % 8)  # aligns the records
    known = struct.pack("<IQQ", 0, len(names), len(bases) // 8) + bases + checksums + names
    yield _FORMAT.ljust(24, b"\0") + struct.pack("<I", checksum(known)) + known
    for shard in shards.values():
        yield shard.starts.data
        yield bytes(-shard.starts.nbytes % 8)


def _parse(mapped: mmap.mmap) -> Iterator[tuple[str, ShardIndex]]:
    """Yield the shards of an index file; raise ValueError and others if it is damaged."""
    _, crc, _, num_names, num_blocks = _START.unpack(mapped[: _START.size])
    names_start = _START.size + num_blocks * _BLOCK_BYTES
    end = names_start + num_names
    if end > len(mapped) or checksum(mapped[_CHECKED_FROM:end]) != crc:
        raise ValueError("wrong checksum")
    names = json.loads(mapped[names_start:end])
    bases = np.frombuffer(mapped[_START.size : _START.size + 8 * num_blocks], "<i8")
    checksums = np.frombuffer(mapped[_START.size + 8 * num_blocks : names_start], "<u4")
    sizes = [tuple(int(fields[key]) for key in _FIELDS) for fields in names.values()]
    if any(records < 0 or width not in (4, 8) for *_, records, width in sizes):
        raise ValueError("impossible number of records or width")
    blocks = [0, *accumulate(-(-records // BLOCK) for *_, records, _ in sizes)]
    padded = (-(-records * width // 8) * 8 for *_, records, width in sizes)
    offsets = list(accumulate(padded, initial=end))
    if (blocks[-1], offsets[-1]) != (num_blocks, len(mapped)):
        raise ValueError("wrong size")
    for i, (name, (*stamp, records, width)) in enumerate(zip(names, sizes, strict=True)):
        own = slice(blocks[i], blocks[i + 1])
        starts: NDArray[Any] = np.frombuffer(mapped, f"<u{width}", records, offsets[i])
        yield (
            name,
            ShardIndex(FileStamp(*stamp), bases[own], checksums[own], starts, is_mapped=True),
        )
