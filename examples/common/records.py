"""Random access to the records of TFRecord files, without TensorFlow.

`Records` scans the files once for where each record begins and keeps that in an index file next to
them. It then reads any record in any order, checked, so a batch can depend on the step alone. It is
a source for `grain.MapDataset.source`.
"""

from __future__ import annotations

import logging
import os
import re
from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import finalize

from examples.common.record_index import INDEX_SUFFIX, open_index, remove_indexes
from examples.common.shard_index import (
    FRAME_BYTES,
    HEAD,
    TAIL,
    ShardIndex,
    frame_head,
    masked_checksum,
)
from examples.common.tf_examples import Feature
from examples.common.tf_examples import make_example as make_example
from examples.common.tf_examples import parse_example as parse_example
from ftmesh.errors import DataError, DataNotFoundError, RecordError
from ftmesh.files import write_atomic

_SHARD = re.compile(r"(.*-)[0-9]+-of-([0-9]+)(.*)")  # train-00001-of-00004


class Records:
    """The records of some files as one sequence. Reading a damaged one raises `RecordError`.

    Any number of threads may read. A pickled copy in another process shares the memory of the
    index.

    Args:
        paths: The files, in order.
        keep: Load the index from an index file next to the data if there is one, and write it.
        show: Show a progress bar while files are scanned.
    """

    def __init__(
        self, paths: Iterable[str | os.PathLike[str]], *, keep: bool = True, show: bool = False
    ) -> None:
        self.paths = [Path(path) for path in paths]
        self._shards = open_index(self.paths, keep=keep, show=show)
        self._first = [0, *accumulate(map(len, self._shards))]
        self._files = lru_cache(max_open_files())(OpenFile)

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, index: int) -> bytes:
        shard, record = self.locate(index)
        frame = self._frame(shard, record)
        if frame is None:
            self._rescan(shard)
            frame = self._frame(shard, record) or b""
        data = frame[HEAD.size : -TAIL.size]
        if frame[-TAIL.size :] != TAIL.pack(masked_checksum(data)):
            raise RecordError(f"{self.name(index)}: the data does not match its checksum")
        return data

    def example(self, index: int) -> dict[str, Feature]:
        """Return the features of a record that is a tf.train.Example; see `parse_example`."""
        data = self[index]
        try:
            return parse_example(data)
        except RecordError as error:
            raise RecordError(f"{self.name(index)}: {error}") from error

    def locate(self, index: int) -> tuple[int, int]:
        """Return the shard of a record, and the record's index in it."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        shard = bisect_right(self._first, index) - 1
        return shard, int(index) - self._first[shard]

    def name(self, index: int) -> str:
        """Name a record in messages."""
        shard, record = self.locate(index)
        return f"{self.paths[shard]}, record {record}"

    def shards(self) -> list[tuple[Path, range]]:
        """Return each file with the indices of its records."""
        spans = pairwise(self._first)
        return [(path, range(*span)) for path, span in zip(self.paths, spans, strict=True)]

    def first_of_shards(self, max_shards: int = 64) -> list[int]:
        """Return the first record of each non-empty shard: a sample to check before a long run.

        Of more than `max_shards` shards, that many are taken, from the first to the last.
        """
        firsts = [first for first, end in pairwise(self._first) if first < end]
        if len(firsts) > max_shards:
            last = len(firsts) - 1
            firsts = [firsts[i * last // (max_shards - 1)] for i in range(max_shards)]
        return firsts

    def __getstate__(self) -> dict[str, Any]:
        shared = all(shard.is_mapped for shard in self._shards)
        return {
            "paths": self.paths,
            "first": self._first,
            "shards": None if shared else self._shards,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.paths, self._first = state["paths"], state["first"]
        self._shards = state["shards"] or open_index(self.paths)
        if [0, *accumulate(map(len, self._shards))] != self._first:
            raise DataError(f"the files next to {self.paths[0]} have changed: start again")
        self._files = lru_cache(max_open_files())(OpenFile)

    def _frame(self, shard: int, record: int) -> bytes | None:
        """Read a record with its frame; None if there is none where the index says."""
        span = self._shards[shard].span(record)
        if span is None:
            return None
        start, end = span
        try:
            frame = self._files(self.paths[shard]).read(start, end)
        except OSError as error:
            raise DataError(f"cannot read {self.paths[shard]}: {error.strerror}") from error
        is_whole = frame[: HEAD.size] == frame_head(end - start - FRAME_BYTES)
        return frame if is_whole and len(frame) == end - start else None

    def _rescan(self, shard: int) -> None:
        """Index a file again whose index is damaged or belongs to another file."""
        path, known = self.paths[shard], len(self._shards[shard])
        logging.getLogger(__name__).warning("%s does not match its index; scanning it again", path)
        remove_indexes(path)
        self._files.cache_clear()
        index = ShardIndex.scan(path)
        if len(index) != known:
            raise DataError(
                f"{path} has changed, from {known} records to {len(index)}: start again"
            )
        self._shards[shard] = index


def find_shards(folder: str | os.PathLike[str], pattern: str) -> list[Path]:
    """Return the files of `folder` that match `pattern`, such as ``train-*``, sorted.

    Raises:
        DataError: If no file matches, if names like "train-00001-of-00004" announce a shard that is
            missing, or if shards of several sets match.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataNotFoundError(f"there is no folder {folder}")
    paths = sorted(path for path in folder.glob(pattern) if path.is_file())
    paths = [path for path in paths if not path.name.endswith((INDEX_SUFFIX, ".begun"))]
    if not paths:
        raise DataError(f"no file in {folder} matches {pattern!r}")
    names = {path.name for path in paths}
    sets = {match.groups() for name in names if (match := _SHARD.fullmatch(name))}
    if len(sets) > 1:
        listed = ", ".join(sorted(f"{before}*-of-{total}{after}" for before, total, after in sets))
        raise DataError(f"{folder} has shards of several sets: {listed}; keep one set per folder")
    for before, total, after in sets:  # `total` comes from a file name: it may be huge
        expected = (f"{before}{i:0{len(total)}}-of-{total}{after}" for i in range(int(total)))
        missing = [*islice((name for name in expected if name not in names), 3)]
        if missing:
            lacking = int(total) - sum(_is_one_of(name, before, total, after) for name in names)
            more = f" and {lacking - 3} more" if lacking > 3 else ""
            raise DataError(
                f"{folder} lacks {lacking} of {total} shards: {', '.join(missing)}{more}"
            )
    return paths


def _is_one_of(name: str, before: str, total: str, after: str) -> bool:
    number = name.removeprefix(before).removesuffix(f"-of-{total}{after}")
    is_number = re.fullmatch(f"[0-9]{{{len(total)}}}", number)
    return is_number is not None and int(number) < int(total)


def check_shard_count(folder: str | os.PathLike[str], split: str, num_shards: int) -> None:
    """Raise DataError if `folder` has shards of `split` of a set with another number of shards."""
    for path in Path(folder).glob(f"{split}-*-of-*"):
        match = _SHARD.fullmatch(path.name)
        if match and int(match[2]) != num_shards:
            raise DataError(
                f"{folder} already has {path.name}, and {num_shards} shards are to be written: "
                "remove the old ones, or give another folder"
            )


def write_records(path: str | os.PathLike[str], records: Iterable[bytes]) -> None:
    """Write a TFRecord file atomically, and remove index files that may cover the old one."""
    path = Path(path)
    remove_indexes(path)
    write_atomic(path, (part for data in records for part in _framed(data)))


def _framed(data: bytes) -> tuple[bytes, bytes, bytes]:
    return frame_head(len(data)), data, TAIL.pack(masked_checksum(data))


class OpenFile:
    """A file that any number of threads may read; closed when garbage-collected."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        finalize(self, os.close, self._handle)
        self._lock = Lock()

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from `start` to `end`; fewer where the file ends before."""
        parts = []
        while start < end and (part := self._read_some(start, end - start)):
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_some(self, start: int, size: int) -> bytes:
        if hasattr(os, "pread"):
            return os.pread(self._handle, size, start)
        with self._lock:  # without pread, threads share one file offset
            os.lseek(self._handle, start, os.SEEK_SET)
            return os.read(self._handle, size)


def max_open_files() -> int:
    """Return how many files to keep open: an eighth of the system's limit, 16 to 4096."""
    try:
        import resource
    except ImportError:
        return 128
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if allowed < 0 else max(16, min(4096, allowed // 8))
