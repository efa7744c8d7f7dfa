"""The files of a checkpoint: each process writes its own, and any process reads all.

    30/index.json    the manifest; the first process writes it
    30/4.bin         the pieces of process 4, back to back
    30/4.json        offset, size and checksum of each of them

A checkpoint is complete once its manifest is there and the files of every process that the
manifest names: no process waits for another.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from io import SEEK_END, BytesIO, FileIO
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ftmesh.checkpoint.manifest import FORMATS, Buffer, Manifest, Piece, Tensor
from ftmesh.errors import CheckpointError, DamagedCheckpointError
from ftmesh.files import open_nonblocking, sync_folder, write_atomic
from ftmesh.layout.buckets import from_tile_order

MANIFEST_FILE = "index.json"
MAX_LIST_BYTES = 2**28  # of a manifest, or a list of pieces
_BLOCK_BYTES = 16 * 2**20

Files = Path | Mapping[str, bytes]  # a folder, or contents by file name
Pieces = Iterable[tuple[Piece, NDArray[Any]]]
Shape = tuple[int, ...]


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
        "format": manifest.format,
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
    """Return `content` as JSON that ends with a checksum of itself."""
    text = json.dumps(content, separators=(",", ":"))
    return f'{text[:-1]},"crc32":{zlib.crc32(text.encode())}}}\n'


def load_json(raw: bytes, name: str) -> dict[str, Any]:
    """Parse what `dump_json` returned; raise DamagedCheckpointError if it differs by a byte."""
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


class PieceLocation(NamedTuple):
    """Where a piece is stored."""

    process: int
    offset: int
    size: int
    checksum: int


class CheckpointReader:
    """A complete checkpoint: all files exist and have the right length.

        with CheckpointReader(folder) as saved:
            saved.check()
            weights = saved.tensor("params/w")

    Raises:
        DamagedCheckpointError: A file is missing, malformed or of the wrong length.
        CheckpointError: A file cannot be read, or is of another format.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        try:
            self.manifest = Manifest.from_json(_read_list(files, MANIFEST_FILE))
            self._locations = _locate_pieces(files, self.manifest)
        except OSError as error:
            raise CheckpointError(f"cannot read {_describe(files)}: {error.strerror}") from error
        self._numbers = {tensor.name: i for i, tensor in enumerate(self.manifest.tensors)}
        self._opened: dict[str, FileIO | BytesIO] = {}
        self._closing = ExitStack()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def check(self) -> None:
        """Read everything once; raise DamagedCheckpointError if a checksum differs."""
        block = np.empty(_BLOCK_BYTES, np.uint8)
        for piece, location in self._locations.items():
            checksum = 0
            for start in range(0, location.size, _BLOCK_BYTES):
                part = block[: min(_BLOCK_BYTES, location.size - start)]
                self._read(location.process, location.offset + start, part)
                checksum = zlib.crc32(part.data, checksum)
            if checksum != location.checksum:
                is_tensor = piece.kind == "tensor"
                name = self.manifest.tensors[piece.number].name if is_tensor else str(piece)
                raise DamagedCheckpointError(
                    f"{name} in {process_file_names(location.process)[0]} is damaged"
                )

    def tensor(self, name: str) -> NDArray[Any]:
        """Return the full tensor of that name."""
        number = self._numbers[name]
        tensor = self.manifest.tensors[number]
        vector = np.empty(tensor.size, tensor.dtype)
        if tensor.buffer is None:
            location = self._locations[Piece("tensor", number)]
            self._read(location.process, location.offset, vector.view(np.uint8))
            return vector.reshape(tensor.shape)
        buffer, done = self.manifest.buffers[tensor.buffer], 0
        for chunk, start, count in _extents(tensor, buffer):
            rank, preceding = buffer.chunk_locations[chunk]
            location = self._locations[Piece("buffer", tensor.buffer, rank)]
            offset = (preceding * buffer.chunk_size + start) * tensor.dtype.itemsize
            part = vector[done : done + count].view(np.uint8)
            self._read(location.process, location.offset + offset, part)
            done += count
        if tensor.grid is not None:
            return _join_blocks(vector, tensor.shape, tensor.grid)
        if tensor.width is not None:
            return vector.reshape(tensor.shape)
        array: NDArray[Any] = from_tile_order(vector, tensor.shape)
        return array

    def _read(self, process: int, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill `out` from the file of pieces of `process`."""
        name, _ = process_file_names(process)
        try:
            if name not in self._opened:
                self._opened[name] = _open(self._files, name)
                self._closing.callback(self._opened[name].close)
            file, done = self._opened[name], 0
            file.seek(offset)
            while done < out.size:
                count = file.readinto(out[done:].data)
                if not count:
                    raise DamagedCheckpointError(f"its {name} is cut short")
                done += count
        except OSError as error:
            raise CheckpointError(
                f"cannot read {name} of {_describe(self._files)}: {error.strerror}"
            ) from error


def _extents(tensor: Tensor, buffer: Buffer) -> Iterator[tuple[int, int, int]]:
    """Yield where the elements of a tensor are: chunk, first element there, and number."""
    if tensor.width is not None:
        for chunk in range(-(-tensor.size // max(1, tensor.width))):
            yield chunk, tensor.start, min(tensor.width, tensor.size - chunk * tensor.width)
        return
    size, stop = buffer.chunk_size, tensor.start + tensor.size
    for chunk in range(tensor.start // size, -(-stop // size)):
        first, last = max(tensor.start, chunk * size), min(stop, (chunk + 1) * size)
        yield chunk, first - chunk * size, last - first


def _join_blocks(vector: NDArray[Any], shape: Shape, grid: Shape) -> NDArray[Any]:
    """Return the array whose blocks are one after another in `vector`."""
    block = [size // parts for size, parts in zip(shape, grid, strict=True)]
    axes = [
        axis
        for pair in zip(range(len(shape)), range(len(shape), 2 * len(shape)), strict=True)
        for axis in pair
    ]
    return vector.reshape(*grid, *block).transpose(axes).reshape(shape)


def _locate_pieces(files: Files, manifest: Manifest) -> dict[Piece, PieceLocation]:
    locations: dict[Piece, PieceLocation] = {}
    expected = (manifest_checksum(manifest), manifest.step)
    for process in manifest.processes:
        data_name, list_name = process_file_names(process)
        content = _read_list(files, list_name)
        if (content.get("index"), content.get("step")) != expected:
            raise DamagedCheckpointError(f"its {list_name} belongs to another index")
        with _open(files, data_name) as file:
            size = file.seek(0, SEEK_END)
        if size != content.get("bytes"):
            raise DamagedCheckpointError(
                f"its {data_name} has {size} bytes, and should have {content.get('bytes')}"
            )
        try:
            end = _add_pieces(locations, process, content["pieces"], manifest.piece_sizes)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedCheckpointError(f"its {list_name} is malformed: {error!r}") from None
        if end != size:
            raise DamagedCheckpointError(
                f"its {data_name} has {size - end} bytes after its last piece"
            )
    if missing := manifest.piece_sizes.keys() - locations.keys():
        raise DamagedCheckpointError(f"no process has written {min(missing)}")
    return locations


def _add_pieces(
    locations: dict[Piece, PieceLocation], process: int, entries: Any, sizes: Mapping[Piece, int]
) -> int:
    """Add the pieces of a process, which must be back to back, and return where the last ends."""
    end = 0
    for entry in entries:
        if "tensor" in entry:
            piece = Piece("tensor", entry["tensor"])
        else:
            piece = Piece("buffer", entry["buffer"], entry["rank"])
        if piece not in sizes or piece in locations:
            raise DamagedCheckpointError(f"{piece} is in it twice, or not in the index")
        if entry["offset"] != end or entry["bytes"] != sizes[piece]:
            raise DamagedCheckpointError(
                f"{piece} has {entry['bytes']} bytes at offset {entry['offset']}, and should have "
                f"{sizes[piece]} at {end}"
            )
        locations[piece] = PieceLocation(process, end, sizes[piece], entry["crc32"])
        end += sizes[piece]
    return end


def _read_list(files: Files, name: str) -> dict[str, Any]:
    """Read a JSON file, of at most `MAX_LIST_BYTES` and of a format that this version knows."""
    raw = bytearray()
    with _open(files, name) as file:
        while part := file.read(_BLOCK_BYTES):
            raw += part
            if len(raw) > MAX_LIST_BYTES:
                raise DamagedCheckpointError(f"its {name} is longer than {MAX_LIST_BYTES:,} bytes")
    content = load_json(bytes(raw), name)
    if content.get("format") not in FORMATS:
        raise CheckpointError(
            f"{_describe(files)} is of format {content.get('format')!r}, and this version reads "
            f"{' and '.join(FORMATS)}"
        )
    return content


def _open(files: Files, name: str) -> FileIO | BytesIO:
    try:
        if isinstance(files, Path):
            if not S_ISREG((files / name).stat().st_mode):
                raise DamagedCheckpointError(f"its {name} is not a file")
            return FileIO(files / name, opener=open_nonblocking)
        return BytesIO(files[name])
    except (FileNotFoundError, KeyError):
        raise DamagedCheckpointError(f"it has no {name}") from None


def _describe(files: Files) -> str:
    return str(files) if isinstance(files, Path) else "a checkpoint in memory"
