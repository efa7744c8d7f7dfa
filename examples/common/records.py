"""TFRecord files, without TensorFlow: any record of a set of shards, checked, and what is in it.

`Records` learns once where every record begins and keeps that beside the files. From then on it
reads any of them, in any order, so a batch can be a function of the step alone. It is a source for
`grain.MapDataset.source`.
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
from typing import Any

from examples.common.index_files import SUFFIX, remove_indexes
from examples.common.open_files import OpenFile, most_open
from examples.common.record_index import open_index
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
from ftmesh.files import write_whole

_SHARD = re.compile(r"(.*-)[0-9]+-of-([0-9]+)(.*)")  # train-00001-of-00004


class Records:
    """The records of some files as one sequence. A damaged record is a `RecordError`, each time.

    Where records begin is found in one pass, with `show` under a progress bar, and with `keep` kept
    beside the files for the next time. Any number of threads may read; a copy in another process,
    made by pickling, shares the memory of the index.
    """

    def __init__(
        self, paths: Iterable[str | os.PathLike[str]], *, keep: bool = True, show: bool = False
    ) -> None:
        self.paths = [Path(path) for path in paths]
        self._shards = open_index(self.paths, keep=keep, show=show)
        self._first = [0, *accumulate(map(len, self._shards))]
        self._files = lru_cache(most_open())(OpenFile)

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, index: int) -> bytes:
        shard, record = self.place(index)
        frame = self._frame(shard, record)
        if frame is None:
            self._scan_again(shard)
            frame = self._frame(shard, record) or b""
        data = frame[HEAD.size : -TAIL.size]
        if frame[-TAIL.size :] != TAIL.pack(masked_checksum(data)):
            raise RecordError(f"{self.name(index)}: the data does not match its checksum")
        return data

    def example(self, index: int) -> dict[str, Feature]:
        """The features of a record that is a tf.train.Example; see `parse_example`."""
        data = self[index]
        try:
            return parse_example(data)
        except RecordError as error:
            raise RecordError(f"{self.name(index)}: {error}") from error

    def place(self, index: int) -> tuple[int, int]:
        """Which shard a record is in, and which of its records it is."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        shard = bisect_right(self._first, index) - 1
        return shard, int(index) - self._first[shard]

    def name(self, index: int) -> str:
        """How to tell a person which record this is."""
        shard, record = self.place(index)
        return f"{self.paths[shard]}, record {record}"

    def shards(self) -> list[tuple[Path, range]]:
        """The files, and the records that each has."""
        spans = pairwise(self._first)
        return [(path, range(*span)) for path, span in zip(self.paths, spans, strict=True)]

    def firsts(self, most: int = 64) -> list[int]:
        """The first record of each shard that has any: a sample to check before a long run.

        Of more than `most` shards it is so many, from the first shard to the last.
        """
        firsts = [first for first, end in pairwise(self._first) if first < end]
        if len(firsts) > most:
            firsts = [firsts[i * (len(firsts) - 1) // (most - 1)] for i in range(most)]
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
            raise DataError(f"the files beside {self.paths[0]} have changed: start again")
        self._files = lru_cache(most_open())(OpenFile)

    def _frame(self, shard: int, record: int) -> bytes | None:
        """A record in its frame, or None if there is none where the index says."""
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

    def _scan_again(self, shard: int) -> None:
        """Have a new index of a file where the one it has is damaged, or that of another file."""
        path, known = self.paths[shard], len(self._shards[shard])
        logging.getLogger(__name__).warning("%s is not as its index says: it is read again", path)
        remove_indexes(path)
        self._files.cache_clear()
        scanned = ShardIndex.scanned(path)
        if len(scanned) != known:
            raise DataError(
                f"{path} has changed, from {known} records to {len(scanned)}: start again"
            )
        self._shards[shard] = scanned


def find_shards(folder: str | os.PathLike[str], pattern: str) -> list[Path]:
    """The files of `folder` that match `pattern`, as ``train-*``, or an error if one is missing.

    Where names end as in "train-00001-of-00004", all of the four must be there.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataNotFoundError(f"there is no folder {folder}")
    paths = sorted(path for path in folder.glob(pattern) if path.is_file())
    paths = [path for path in paths if not path.name.endswith((SUFFIX, ".begun"))]
    if not paths:
        raise DataError(f"no file in {folder} matches {pattern!r}")
    names = {path.name for path in paths}
    sets = {match.groups() for name in names if (match := _SHARD.fullmatch(name))}
    if len(sets) > 1:
        found = ", ".join(sorted(f"{before}*-of-{total}{after}" for before, total, after in sets))
        raise DataError(f"{folder} has shards of several sets, which are not to be mixed: {found}")
    for before, total, after in sets:  # one, of as many as its files say, which may be nonsense
        every = (f"{before}{i:0{len(total)}}-of-{total}{after}" for i in range(int(total)))
        missing = [*islice((name for name in every if name not in names), 3)]
        if missing:
            lacking = int(total) - sum(_is_one_of(name, before, total, after) for name in names)
            more = f" and {lacking - 3} more" if lacking > 3 else ""
            raise DataError(
                f"{folder} lacks {lacking} of {total} shards: {', '.join(missing)}{more}"
            )
    return paths


def _is_one_of(name: str, before: str, total: str, after: str) -> bool:
    """Whether a file is a shard of a set of so many."""
    number = name.removeprefix(before).removesuffix(f"-of-{total}{after}")
    is_number = re.fullmatch(f"[0-9]{{{len(total)}}}", number)
    return is_number is not None and int(number) < int(total)


def check_alone(folder: str | os.PathLike[str], split: str, number: int) -> None:
    """Refuse to write shards of a split where there are some of another set, not to be mixed."""
    for path in Path(folder).glob(f"{split}-*-of-*"):
        match = _SHARD.fullmatch(path.name)
        if match and int(match[2]) != number:
            raise DataError(
                f"{folder} has {path.name} already, and {number} shards are to be written: take "
                "the old ones away, or give another folder"
            )


def write_records(path: str | os.PathLike[str], records: Iterable[bytes]) -> None:
    """Write a TFRecord file, whole or not at all; what may index another in its place goes."""
    path = Path(path)
    remove_indexes(path)
    write_whole(path, (part for data in records for part in _framed(data)))


def _framed(data: bytes) -> tuple[bytes, bytes, bytes]:
    return frame_head(len(data)), data, TAIL.pack(masked_checksum(data))
