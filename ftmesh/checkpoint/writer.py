"""Writes one process's part of a checkpoint.

    30/index.json    the manifest; the first process writes it
    30/4.bin         the pieces of process 4, back to back
    30/4.json        offset, size and checksum of each of them

A checkpoint is complete once its manifest is there and the files of every process that the
manifest names: no process waits for another.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftmesh.checkpoint.manifest import FORMAT, Manifest, Piece
from ftmesh.errors import DamagedCheckpointError
from ftmesh.files import sync_folder, write_atomic

MANIFEST_FILE = "index.json"

Pieces = Iterable[tuple[Piece, NDArray[Any]]]


def process_file_names(process: int) -> tuple[str, str]:
    """Return the names of a process's file of pieces and of the list of them."""
    return f"{process:d}.bin", f"{process:d}.json"


def write_part(folder: Path, manifest: Manifest, process: int, pieces: Pieces) -> None:
    """Write the pieces of a process; the first process of the manifest writes that too."""
    folder.mkdir(parents=True, exist_ok=True)
    sync_folder(folder.parent)
    for name, content in process_files(manifest, process, pieces):
        write_atomic(folder / name, content)


def process_files(
    manifest: Manifest, process: int, pieces: Pieces
) -> Iterator[tuple[str, Iterable[Any]]]:
    """Yield names and contents of a process's files, in the order to write them.

    Consume the content of a file before asking for the next, which has its checksums.
    """
    data_name, list_name = process_file_names(process)
    entries: list[dict[str, Any]] = []
    yield data_name, _piece_bytes(pieces, entries)
    content = {
        "format": FORMAT,
        "step": manifest.step,
        "process": process,
        "index": manifest_checksum(manifest),
        "bytes": sum(entry["bytes"] for entry in entries),
        "pieces": entries,
    }
    yield list_name, [dump_json(content).encode()]
    if process == manifest.processes[0]:
        yield MANIFEST_FILE, [dump_json(manifest.to_json()).encode()]


def manifest_checksum(manifest: Manifest) -> int:
    """Return the checksum by which files name the manifest that they belong to."""
    return zlib.crc32(dump_json(manifest.to_json()).encode())


def _piece_bytes(pieces: Pieces, entries: list[dict[str, Any]]) -> Iterator[memoryview]:
    """Yield the bytes of every piece, and append its entry in the list of pieces."""
    offset = 0
    for piece, array in pieces:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        entry = {"tensor": piece.number}
        if piece.kind == "buffer":
            entry = {"buffer": piece.number, "rank": piece.rank}
        entries.append(
            {**entry, "offset": offset, "bytes": raw.size, "crc32": zlib.crc32(raw.data)}
        )
        offset += raw.size
        yield raw.data


def dump_json(content: dict[str, Any]) -> str:
    r"""Return `content` as JSON that ends with a checksum of itself.

    >>> dump_json({"step": 3})
    '{"step":3,"crc32":590335763}\n'
    """
    text = json.dumps(content, separators=(",", ":"))
    return f'{text[:-1]},"crc32":{zlib.crc32(text.encode())}}}\n'


def load_json(raw: bytes, name: str) -> dict[str, Any]:
    """Parse what `dump_json` returned.

    Raises:
        DamagedCheckpointError: `raw` differs from it, even by a space.
    """
    try:
        text = raw.decode()
        content = json.loads(text)
        if isinstance(content, dict):
            content.pop("crc32", None)
            if content and dump_json(content) == text:
                return content
    except (ValueError, RecursionError):
        pass
    raise DamagedCheckpointError(f"its {name} is damaged")
