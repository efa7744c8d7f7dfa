"""Parts: what one process writes of a checkpoint.

    30/index.json    what there is, by name; the first process writes it
    30/4.bin         the pieces of process 4, end to end
    30/4.json        where each of them begins, its size, and its checksum

A checkpoint is there when its index is, and the files of every process that the index names: no
process waits for another.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftmesh.files import write_whole
from ftmesh.saved.files import dump, make_folder
from ftmesh.saved.index import FORMAT, Index, Piece

INDEX = "index.json"


def file_names(process: int) -> tuple[str, str]:
    """Those of a process's pieces, and of the list of them."""
    return f"{process:d}.bin", f"{process:d}.json"


def write_part(
    folder: Path, index: Index, process: int, pieces: Iterable[tuple[Piece, NDArray[Any]]]
) -> None:
    """Write the pieces of a process; the first of the index's processes writes the index too."""
    make_folder(folder)
    for name, content in part_of(index, process, pieces):
        write_whole(folder / name, content)


def part_of(
    index: Index, process: int, pieces: Iterable[tuple[Piece, NDArray[Any]]]
) -> Iterator[tuple[str, Iterable[Any]]]:
    """Names and bytes of a process's files, in the order in which they are to be there.

    The bytes of one are to be taken before the next is asked for, which has their checksums.
    """
    data, contents = file_names(process)
    told: list[dict[str, Any]] = []
    yield data, _noted(pieces, told)
    content = {
        "format": FORMAT,
        "step": index.step,
        "process": process,
        "index": mark(index),
        "bytes": sum(each["bytes"] for each in told),
        "pieces": told,
    }
    yield contents, [dump(content).encode()]
    if process == index.processes[0]:
        yield INDEX, [dump(index.to_json()).encode()]


def mark(index: Index) -> int:
    """A mark of an index, by which the files that belong to it are known."""
    return zlib.crc32(dump(index.to_json()).encode())


def _noted(
    pieces: Iterable[tuple[Piece, NDArray[Any]]], told: list[dict[str, Any]]
) -> Iterator[memoryview]:
    """The bytes of each piece, noting where they come to lie."""
    offset = 0
    for piece, array in pieces:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        name = {"tensor": piece.number}
        if piece.of == "buffer":
            name = {"buffer": piece.number, "rank": piece.rank}
        told.append({**name, "offset": offset, "bytes": raw.size, "crc32": zlib.crc32(raw.data)})
        offset += raw.size
        yield raw.data
