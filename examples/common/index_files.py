"""Index files: what is known of the shards of a folder, kept beside them and mapped into memory.

    format name, 24 bytes | checksum, 4 | 0, 4 | bytes of names, 8 | blocks, 8
    base of every block, 8 bytes each | checksum of every block, 4 each | names: JSON, padded to 8
    where the records of each shard begin, 4 or 8 bytes each, padded to 8

The first checksum is that of all that follows it up to the records; a block's own is compared when
a record of the block is first asked for. Processes of one host share the pages.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import re
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.common.shard_index import BLOCK, ShardIndex, Stamp, checksum
from ftmesh.files import write_whole

SUFFIX = ".ftmesh-index"

_FORMAT = b"ftmesh.records/1"
_START = struct.Struct("<24sIIQQ")
_CHECKED_FROM = 28  # bytes: where the checksum ends
_BLOCK_BYTES = 12
_NUMBERS = re.compile(r"[-_.]*([0-9]*|[0-9]+-of-[0-9]+.*)$")  # how the name of a shard ends
_ABANDONED_S = 3600  # a file that was begun so long ago will not be finished
_FIELDS = ("size", "mtime_ns", "ctime_ns", "records", "width")


def index_file(folder: Path, names: Iterable[str]) -> Path:
    """Where the index of some files of a folder is kept: named as they begin, and hidden.

    >>> index_file(Path("data"), ["train-00000-of-00002", "train-00001-of-00002"]).name
    '.train.ftmesh-index'
    """
    begins = [_NUMBERS.sub("", name) for name in names]
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(min(begins), max(begins), strict=False))
    begin = _NUMBERS.sub("", "".join(letter for letter, _ in pairs))
    return folder / (f".{begin}{SUFFIX}" if begin else SUFFIX)


def remove_indexes(path: Path) -> None:
    """Remove what may speak of a file that is about to be written, or has been."""
    for file in path.parent.glob(f".*{SUFFIX[1:]}"):
        begin = file.name.removesuffix(SUFFIX).removeprefix(".")
        if path.name.startswith(begin):
            with suppress(OSError):  # the times of the file tell, too
                file.unlink()


def load_index(file: Path) -> dict[str, ShardIndex]:
    """The shards in an index file by name: none where it is not there, or is not to be believed."""
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size < _START.size:
                raise ValueError("cut short")
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        return {}
    except OSError as error:
        return _unused(file, f"cannot be read: {error.strerror}")
    except ValueError:
        return _unused(file, "is damaged")
    if mapped[:24] != _FORMAT.ljust(24, b"\0"):
        return _unused(file, f"is not of the format {_FORMAT.decode()}")
    try:
        return dict(_parsed(mapped))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return _unused(file, "is damaged")


def keep_index(file: Path, shards: Mapping[str, ShardIndex]) -> None:
    """Write an index file, whole or not at all; without room or permission, that is said."""
    try:
        for begun in file.parent.glob(f".{file.name}.*.begun"):
            if time.time() - begun.stat().st_mtime > _ABANDONED_S:
                begun.unlink()
        write_whole(file, _parts(shards))
    except OSError as error:
        logging.getLogger(__name__).warning(
            "could not keep the index %s, and the next start reads all files again: %s",
            file, error.strerror,
        )  # fmt: skip


def _unused(file: Path, why: str) -> dict[str, ShardIndex]:
    logging.getLogger(__name__).warning("%s %s; the files are read again for another", file, why)
    return {}


def _parts(shards: Mapping[str, ShardIndex]) -> Iterator[Any]:
    """The bytes of an index file, part after part."""
    fields = {
        name: {**asdict(shard.stamp), "records": len(shard), "width": shard.starts.itemsize}
        for name, shard in shards.items()
    }
    names = json.dumps(fields).encode()
    bases = b"".join(shard.bases.tobytes() for shard in shards.values())
    checksums = b"".join(shard.checksums.tobytes() for shard in shards.values())
    # The names fill up what the checksums of an odd number of blocks leave.
    names += b" " * (-(len(names) + len(checksums)) % 8)
    known = struct.pack("<IQQ", 0, len(names), len(bases) // 8) + bases + checksums + names
    yield _FORMAT.ljust(24, b"\0") + struct.pack("<I", checksum(known)) + known
    for shard in shards.values():
        yield shard.starts.data
        yield bytes(-shard.starts.nbytes % 8)


def _parsed(mapped: mmap.mmap) -> Iterator[tuple[str, ShardIndex]]:
    """The shards of an index file, or an error if anything about it is not as it was written."""
    _, crc, _, num_names, num_blocks = _START.unpack(mapped[: _START.size])
    names_at = _START.size + num_blocks * _BLOCK_BYTES
    end = names_at + num_names
    if end > len(mapped) or checksum(mapped[_CHECKED_FROM:end]) != crc:
        raise ValueError("the checksum is another")
    names = json.loads(mapped[names_at:end])
    bases = np.frombuffer(mapped[_START.size : _START.size + 8 * num_blocks], "<i8")
    checksums = np.frombuffer(mapped[_START.size + 8 * num_blocks : names_at], "<u4")
    sizes = [tuple(int(fields[key]) for key in _FIELDS) for fields in names.values()]
    if any(records < 0 or width not in (4, 8) for *_, records, width in sizes):
        raise ValueError("such shards cannot be")
    blocks = [0, *accumulate(-(-records // BLOCK) for *_, records, _ in sizes)]
    padded = (-(-records * width // 8) * 8 for *_, records, width in sizes)
    places = list(accumulate(padded, initial=end))
    if (blocks[-1], places[-1]) != (num_blocks, len(mapped)):
        raise ValueError("the sizes are others")
    for i, (name, (*stamp, records, width)) in enumerate(zip(names, sizes, strict=True)):
        mine = slice(blocks[i], blocks[i + 1])
        starts: NDArray[Any] = np.frombuffer(mapped, f"<u{width}", records, places[i])
        yield name, ShardIndex(Stamp(*stamp), bases[mine], checksums[mine], starts, is_mapped=True)
