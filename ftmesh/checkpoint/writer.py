"""Parts: what one process writes of a checkpoint.

    30/index.json    what there is, by name; the first process writes it
    30/4.bin         the pieces of process 4, end to end
    30/4.json        where each of them begins, its size, and its checksum

A checkpoint is there when its index is, and the files of every process that the index names: no
process waits for another.

Files of checkpoints: folders that are on the disk; JSON that tells when it was damaged.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftmesh.checkpoint.manifest import FORMAT, Index, Piece
from ftmesh.errors import DamagedCheckpointError
from ftmesh.files import sync_folder, write_whole

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


def make_folder(path: Path) -> None:
    """Have a folder there, and its name on the disk."""
    path.mkdir(parents=True, exist_ok=True)
    sync_folder(path.parent)


def dump(content: dict[str, Any]) -> str:
    r"""`content` as JSON, which ends with a checksum of what stands before.

    >>> dump({"step": 3})
    '{"step":3,"crc32":590335763}\n'
    """
    text = json.dumps(content, separators=(",", ":"))
    return f'{text[:-1]},"crc32":{zlib.crc32(text.encode())}}}\n'


def load(raw: bytes, name: str) -> dict[str, Any]:
    """What `dump` made the text of a file of; any other is damaged, by as little as a space."""
    try:
        text = raw.decode()
        content = json.loads(text)
        if isinstance(content, dict):
            content.pop("crc32", None)
            if content and dump(content) == text:
                return content
    except (ValueError, RecursionError):
        pass
    raise DamagedCheckpointError(f"its {name} is damaged")
