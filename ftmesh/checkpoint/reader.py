"""Reading: the tensors of a checkpoint, whoever has written which part of them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from io import SEEK_END, BytesIO, FileIO
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ftmesh.checkpoint.manifest import FORMAT, Index, Piece
from ftmesh.checkpoint.writer import INDEX, file_names, load, mark
from ftmesh.errors import CheckpointError, DamagedCheckpointError
from ftmesh.files import opened_at_once
from ftmesh.layout.element_order import shaped

MAX_LIST_BYTES = 2**28  # of an index, or a list of pieces
_AT_ONCE = 16 * 2**20  # bytes

Files = Path | Mapping[str, bytes]  # by their names


class Place(NamedTuple):
    """Where a piece lies."""

    process: int
    offset: int
    size: int
    checksum: int


class Saved:
    """A complete checkpoint: all files are there, as long as they should be.

    They are in a folder, or in memory: a mapping from their names to their bytes.
    What is not complete, or found to be damaged by `check`, is a `DamagedCheckpointError`.

        with Saved(folder) as saved:
            saved.check()
            weights = saved.tensor("params/w")
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        try:
            self.index = Index.from_json(_content(files, INDEX))
            self._places = _places(files, self.index)
        except OSError as error:
            raise CheckpointError(f"cannot read {_where(files)}: {error.strerror}") from error
        self._tensors = {tensor.name: tensor for tensor in self.index.tensors}
        self._numbers = {tensor.name: at for at, tensor in enumerate(self.index.tensors)}
        self._opened: dict[str, FileIO | BytesIO] = {}
        self._closing = ExitStack()

    def __enter__(self) -> Saved:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def check(self) -> None:
        """Read everything once, and compare checksums."""
        scratch = np.empty(_AT_ONCE, np.uint8)
        for piece, place in self._places.items():
            found = 0
            for start in range(0, place.size, _AT_ONCE):
                part = scratch[: min(_AT_ONCE, place.size - start)]
                self._read(place.process, place.offset + start, part)
                found = zlib.crc32(part.data, found)
            if found != place.checksum:
                raise DamagedCheckpointError(
                    f"{self._words(piece)} in {file_names(place.process)[0]} is damaged"
                )

    def tensor(self, name: str) -> NDArray[Any]:
        """The tensor of that name."""
        tensor = self._tensors[name]
        vector = np.empty(tensor.size, tensor.dtype)
        if tensor.buffer is None:
            place = self._places[Piece("tensor", self._numbers[name])]
            self._read(place.process, place.offset, vector.view(np.uint8))
            return vector.reshape(tensor.shape)
        buffer = self.index.buffers[tensor.buffer]
        size, stop = buffer.chunk_size, tensor.start + tensor.size
        for chunk in range(tensor.start // size, -(-stop // size)):
            rank, before = buffer.home[chunk]
            place = self._places[Piece("buffer", tensor.buffer, rank)]
            first, last = max(tensor.start, chunk * size), min(stop, (chunk + 1) * size)
            offset = (before * size + first - chunk * size) * tensor.dtype.itemsize
            part = vector[first - tensor.start : last - tensor.start]
            self._read(place.process, place.offset + offset, part.view(np.uint8))
        found: NDArray[Any] = shaped(vector, tensor.shape)
        return found

    def _read(self, process: int, offset: int, into: NDArray[np.uint8]) -> None:
        """Bytes of a process's pieces."""
        name, _ = file_names(process)
        try:
            if name not in self._opened:
                self._opened[name] = _open(self._files, name)
                self._closing.callback(self._opened[name].close)
            file, at = self._opened[name], 0
            file.seek(offset)
            while at < into.size:
                count = file.readinto(into[at:].data)
                if not count:
                    raise DamagedCheckpointError(f"its {name} is cut short")
                at += count
        except OSError as error:
            raise CheckpointError(
                f"cannot read {name} of {_where(self._files)}: {error.strerror}"
            ) from error

    def _words(self, piece: Piece) -> str:
        if piece.of == "tensor":
            return self.index.tensors[piece.number].name
        return f"what rank {piece.rank} has written of buffer {piece.number}"


def _places(files: Files, index: Index) -> dict[Piece, Place]:
    """Where every piece of a checkpoint lies, if its files are all there."""
    places: dict[Piece, Place] = {}
    belongs = (mark(index), index.step)
    for process in index.processes:
        data, contents = file_names(process)
        told = _content(files, contents)
        if (told.get("index"), told.get("step")) != belongs:
            raise DamagedCheckpointError(f"its {contents} belongs to another index")
        size = _size(files, data)
        if size != told.get("bytes"):
            raise DamagedCheckpointError(
                f"its {data} has {size} bytes, and should have {told.get('bytes')}"
            )
        try:
            end = _add(places, process, told["pieces"], index.pieces)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedCheckpointError(f"its {contents} makes no sense: {error!r}") from None
        if end != size:
            raise DamagedCheckpointError(f"its {data} has {size - end} bytes that are no piece's")
    if missing := index.pieces.keys() - places.keys():
        raise DamagedCheckpointError(f"nobody has written {min(missing)._asdict()}")
    return places


def _add(places: dict[Piece, Place], process: int, told: Any, sizes: Mapping[Piece, int]) -> int:
    """Note the pieces of a process, which lie end to end; where the last one ends."""
    end = 0
    for each in told:
        piece = Piece("tensor", each["tensor"]) if "tensor" in each else None
        piece = piece or Piece("buffer", each["buffer"], each["rank"])
        if piece not in sizes or piece in places:
            raise DamagedCheckpointError(f"{piece._asdict()} is in it twice, or not in the index")
        if each["offset"] != end or each["bytes"] != sizes[piece]:
            raise DamagedCheckpointError(
                f"{piece._asdict()} has {each['bytes']} bytes from {each['offset']} on, and should "
                f"have {sizes[piece]} from {end} on"
            )
        places[piece] = Place(process, end, sizes[piece], each["crc32"])
        end += sizes[piece]
    return end


def _read_list(file: BytesIO | FileIO) -> bytes | None:
    """All of a file; None where it is longer than lists are."""
    raw = bytearray()
    while part := file.read(_AT_ONCE):
        raw += part
        if len(raw) > MAX_LIST_BYTES:
            return None
    return bytes(raw)


def _content(files: Files, name: str) -> dict[str, Any]:
    """What a file says; one of another version is refused."""
    with _open(files, name) as file:
        raw = _read_list(file)
    if raw is None:
        raise DamagedCheckpointError(f"its {name} is longer than {MAX_LIST_BYTES:,} bytes")
    content = load(raw, name)
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{_where(files)} is of format {content.get('format')!r}, and this version reads "
            f"{FORMAT}"
        )
    return content


def _size(files: Files, name: str) -> int:
    with _open(files, name) as file:
        return file.seek(0, SEEK_END)


def _open(files: Files, name: str) -> FileIO | BytesIO:
    try:
        if isinstance(files, Path):
            if not S_ISREG((files / name).stat().st_mode):
                raise DamagedCheckpointError(f"its {name} is not a file")
            return FileIO(files / name, opener=opened_at_once)
        return BytesIO(files[name])
    except (FileNotFoundError, KeyError):
        raise DamagedCheckpointError(f"it has no {name}") from None


def _where(files: Files) -> str:
    return str(files) if isinstance(files, Path) else "a checkpoint in memory"
