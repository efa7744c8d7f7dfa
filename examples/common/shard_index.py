"""The index of one TFRecord file: where each record begins.

A TFRecord file is a sequence of frames:

    length, 8 bytes | checksum of the length, 4 | the record | checksum of the record, 4

The scan reads the lengths and skips the records. The index takes 4 bytes per record: an offset from
the base of the record's block of 1024; 8 bytes where a block spans 4 GiB or more.
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
SETTLED_NS = 2_000_000_000  # coarsest resolution of file times

_WINDOW, _SMALL_WINDOW = 1 << 20, 1 << 9  # bytes to read at once: of small and of large records
_LARGE = 1 << 15  # bytes of a record that is skipped, not read
_TICK_BYTES = 1 << 24  # between progress updates
_MIN_EQUAL = 64  # frames of equal length worth a vectorized search
_MAX_BUFFERED = 1 << 16  # entries in Python lists and dicts before they become an array


@dataclass(frozen=True)
class FileStamp:
    """Size and times of a file, to detect that it changed."""

    size: int
    mtime_ns: int
    ctime_ns: int

    @staticmethod
    def from_path(path: Path) -> FileStamp:
        """Return the current stamp of a file."""
        try:
            return FileStamp._from_stat(path.stat())
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error

    @staticmethod
    def _from_stat(status: os.stat_result) -> FileStamp:
        return FileStamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def settled(self) -> FileStamp:
        """Return the stamp to store: for a file written just now, one that matches nothing.

        It could be written again within the resolution of its times.
        """
        if abs(time.time_ns() - self.mtime_ns) < SETTLED_NS:
            return replace(self, mtime_ns=-1)
        return self


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """Where the records of a file begin, in blocks with a base and a checksum each."""

    stamp: FileStamp
    bases: NDArray[np.int64]  # byte of each block's first record
    checksums: NDArray[np.uint32]  # of each block of `starts`
    starts: NDArray[Any]  # relative to the base: uint32 or uint64
    is_mapped: bool = False
    _checked: NDArray[np.bool_] = field(init=False, repr=False)  # blocks that match their checksum

    def __post_init__(self) -> None:
        object.__setattr__(self, "_checked", np.zeros(len(self.bases), bool))

    @staticmethod
    def from_starts(stamp: FileStamp, starts: NDArray[np.int64]) -> ShardIndex:
        """Index a file in which records begin at the bytes `starts`."""
        bases = starts[::BLOCK].astype("<i8")
        relative = starts - np.repeat(bases, BLOCK)[: len(starts)]
        is_wide = len(relative) > 0 and int(relative.max()) >= 1 << 32
        relative = relative.astype("<u8" if is_wide else "<u4")
        blocks = [checksum(relative[i : i + BLOCK]) for i in range(0, len(relative), BLOCK)]
        return ShardIndex(stamp, bases, np.array(blocks, "<u4"), relative)

    @staticmethod
    def scan(path: Path, tick: Callable[[int], None] = lambda num_bytes: None) -> ShardIndex:
        """Index a file in one pass; `tick` is called with the number of bytes passed."""
        try:
            with path.open("rb", buffering=0) as file:
                stamp = FileStamp._from_stat(os.fstat(file.fileno()))
                stored = stamp.settled()
                parts = list(_scan_starts(file, path, stamp.size, tick))
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        return ShardIndex.from_starts(stored, np.concatenate([np.zeros(0, np.int64), *parts]))

    def __len__(self) -> int:
        return len(self.starts)

    def span(self, record: int) -> tuple[int, int] | None:
        """Return the first and last byte of a record's frame; None if the index is damaged."""
        block, last = record // BLOCK, record + 1 == len(self)
        if not self._checked[block]:
            first = block * BLOCK
            if checksum(self.starts[first : first + BLOCK]) != self.checksums[block]:
                return None
            self._checked[block] = True
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
    """Return the crc32c of some bytes."""
    return int(google_crc32c.value(data))


def masked_checksum(data: bytes) -> int:
    """Return the crc32c as TFRecord files have it: rotated, plus a constant."""
    crc = checksum(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def frame_head(length: int) -> bytes:
    """Return what precedes a record of `length` bytes."""
    return HEAD.pack(length, masked_checksum(length.to_bytes(8, "little")))


def _scan_starts(
    file: Any, path: Path, size: int, tick: Callable[[int], None]
) -> Iterator[NDArray[np.int64]]:
    """Yield where records begin, some thousands at a time."""
    position, ticked, number, window = 0, 0, 0, _WINDOW
    starts: list[int] = []
    frame_bytes: dict[bytes, int] = {}  # valid heads, and the bytes to the next one
    while position < size:
        file.seek(position)
        data = file.read(window)
        last, offset, before = len(data) - HEAD.size, 0, number
        if last < 0:
            break
        equal = _equal_frames(data)
        if len(equal):
            yield np.array(starts, np.int64)
            yield equal[:-1] + position
            starts, offset, number = [], int(equal[-1]), number + len(equal) - 1
        while offset <= last:
            head = data[offset : offset + HEAD.size]
            step = frame_bytes.get(head)
            if step is None:
                step = frame_bytes[head] = _frame_bytes(head)
            if not step:
                raise DataError(
                    f"{path}: record {number} should begin at byte {position + offset}, and does "
                    "not: the file is damaged, compressed, or not a TFRecord file"
                )
            starts.append(position + offset)
            offset += step
            number += 1
        position += offset
        if position - ticked >= _TICK_BYTES:
            tick(position - ticked)
            ticked = position
        window = _WINDOW if offset < (number - before) * _LARGE else _SMALL_WINDOW
        if max(len(starts), len(frame_bytes)) > _MAX_BUFFERED:
            yield np.array(starts, np.int64)
            starts = []
            frame_bytes.clear()
    if position != size:
        raise DataError(f"{path} is cut short: its last record ends beyond its {size} bytes")
    tick(position - ticked)
    yield np.array(starts, np.int64)


def _equal_frames(data: bytes) -> NDArray[np.int64]:
    """Return where frames as long as the first begin, and their end; empty if they are few."""
    last, step = len(data) - HEAD.size, _frame_bytes(data[: HEAD.size])
    if 0 < step <= last:
        heads = np.ndarray(last // step + 1, f"S{HEAD.size}", data, 0, (step,))
        others = np.flatnonzero(heads != heads[0])
        number = int(others[0]) if len(others) else len(heads)
        if number >= _MIN_EQUAL:
            return np.arange(number + 1) * step
    return np.zeros(0, np.int64)


def _frame_bytes(head: bytes) -> int:
    """Return the length of a frame with this head; 0 if the head does not match its checksum."""
    length, crc = HEAD.unpack(head)
    return length + FRAME_BYTES if crc == masked_checksum(head[:8]) else 0
