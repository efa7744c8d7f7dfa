"""The index of one TFRecord file: where each record begins, found by hopping from length to length.

A file is a row of records, each in a frame:

    length, 8 bytes | checksum of the length, 4 | the record | checksum of the record, 4

An index takes 4 bytes a record: blocks of records have a base each, and a record begins so many
bytes behind the base of its block. Where a block spans 4 GiB and more, it takes 8.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from ftmesh.errors import DataError

HEAD, TAIL = struct.Struct("<QI"), struct.Struct("<I")
FRAME_BYTES = HEAD.size + TAIL.size
BLOCK = 1024  # records
SETTLED_NS = 2_000_000_000  # file systems tell times apart that are further apart than this

_WINDOW, _GLANCE = 1 << 20, 1 << 9  # bytes to read at once: of small records; of a large one
_LARGE = 1 << 15  # bytes: longer records are not read through
_TELL = 1 << 24  # bytes passed before that is said
_MANY, _MOST = 64, 1 << 16  # records worth an array at once; numbers kept as such


@dataclass(frozen=True)
class Stamp:
    """By which a file that has changed is known. One of the last two seconds matches no other."""

    size: int
    mtime_ns: int
    ctime_ns: int

    @staticmethod
    def of(path: Path) -> Stamp:
        """The stamp that a file has now."""
        try:
            return _stamp(path.stat())
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error

    def settled(self) -> Stamp:
        """The stamp to keep: a file just written may be so again, and bear the same times."""
        if abs(time.time_ns() - self.mtime_ns) < SETTLED_NS:
            return replace(self, mtime_ns=-1)
        return self


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """Where the records of a file begin; `checksums` are those of the blocks of `starts`."""

    stamp: Stamp
    bases: NDArray[np.int64]  # of blocks
    checksums: NDArray[np.uint32]
    starts: NDArray[Any]  # behind the base: uint32, or uint64
    is_mapped: bool = False
    _sound: NDArray[np.bool_] = field(init=False, repr=False)  # blocks whose checksum was compared

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sound", np.zeros(len(self.bases), bool))

    @staticmethod
    def of(stamp: Stamp, begins: NDArray[np.int64]) -> ShardIndex:
        """The index of a file in which records begin at these bytes."""
        bases = begins[::BLOCK].astype("<i8")
        behind = begins - np.repeat(bases, BLOCK)[: len(begins)]
        is_wide = len(behind) > 0 and int(behind.max()) >= 1 << 32
        starts = behind.astype("<u8" if is_wide else "<u4")
        blocks = [checksum(starts[i : i + BLOCK]) for i in range(0, len(starts), BLOCK)]
        return ShardIndex(stamp, bases, np.array(blocks, "<u4"), starts)

    @staticmethod
    def scanned(path: Path, tick: Callable[[int], None] = lambda num_bytes: None) -> ShardIndex:
        """The index of a file, from one pass over it; `tick` is told how many bytes were passed."""
        try:
            with path.open("rb", buffering=0) as file:
                stamp = _stamp(os.fstat(file.fileno()))
                kept = stamp.settled()
                parts = list(_begins(file, path, stamp.size, tick))
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        return ShardIndex.of(kept, np.concatenate([np.zeros(0, np.int64), *parts]))

    def __len__(self) -> int:
        return len(self.starts)

    def span(self, record: int) -> tuple[int, int] | None:
        """Where a record's frame begins and ends; None where the index is not to be believed."""
        block, last = record // BLOCK, record + 1 == len(self)
        if not self._sound[block]:
            first = block * BLOCK
            if checksum(self.starts[first : first + BLOCK]) != self.checksums[block]:
                return None
            self._sound[block] = True
        start = int(self.bases[block]) + int(self.starts[record])
        if last:
            end = self.stamp.size
        elif (record + 1) % BLOCK:
            end = int(self.bases[block]) + int(self.starts[record + 1])
        else:
            end = int(self.bases[block + 1])
        if not 0 <= start <= end - FRAME_BYTES <= self.stamp.size - FRAME_BYTES:
            return None
        return start, end


def checksum(data: bytes | NDArray[Any]) -> int:
    """The crc32c of some bytes."""
    return int(google_crc32c.value(data))


def masked_checksum(data: bytes) -> int:
    """The crc32c of TFRecords: rotated, and a constant added."""
    crc = checksum(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def frame_head(length: int) -> bytes:
    """What stands before a record of so many bytes."""
    return HEAD.pack(length, masked_checksum(length.to_bytes(8, "little")))


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _begins(
    file: Any, path: Path, size: int, tick: Callable[[int], None]
) -> Iterator[NDArray[np.int64]]:
    """Where records begin, some thousands at a time; large ones are hopped over unread."""
    at, told, number, window = 0, 0, 0, _WINDOW
    found: list[int] = []
    frames: dict[bytes, int] = {}  # heads that are sound, and the bytes to the next
    while at < size:
        file.seek(at)
        read = file.read(window)
        last, here, before = len(read) - HEAD.size, 0, number
        if last < 0:
            break
        equal = _equal_frames(read)
        if len(equal):
            yield np.array(found, np.int64)
            yield equal[:-1] + at
            found, here, number = [], int(equal[-1]), number + len(equal) - 1
        while here <= last:
            head = read[here : here + HEAD.size]
            step = frames.get(head)
            if step is None:
                step = frames[head] = _frame_bytes(head)
            if not step:
                raise DataError(
                    f"{path}: no record begins at byte {at + here}, where record {number} should: "
                    "the file is damaged, or compressed, or no TFRecord file"
                )
            found.append(at + here)
            here += step
            number += 1
        at += here
        if at - told >= _TELL:
            tick(at - told)
            told = at
        window = _WINDOW if here < (number - before) * _LARGE else _GLANCE
        if max(len(found), len(frames)) > _MOST:
            yield np.array(found, np.int64)
            found = []
            frames.clear()
    if at != size:
        raise DataError(f"{path} is cut short: it has {size} bytes, and its last record more")
    tick(at - told)
    yield np.array(found, np.int64)


def _equal_frames(read: bytes) -> NDArray[np.int64]:
    """Where frames as long as the first begin, and the one behind them, if there are many."""
    last, step = len(read) - HEAD.size, _frame_bytes(read[: HEAD.size])
    if 0 < step <= last:
        heads = np.ndarray(last // step + 1, f"S{HEAD.size}", read, 0, (step,))
        others = np.flatnonzero(heads != heads[0])
        number = int(others[0]) if len(others) else len(heads)
        if number >= _MANY:
            return np.arange(number + 1) * step
    return np.zeros(0, np.int64)


def _frame_bytes(head: bytes) -> int:
    """The length of a frame that begins so; 0 where its checksum is another."""
    length, crc = HEAD.unpack(head)
    return length + FRAME_BYTES if crc == masked_checksum(head[:8]) else 0
