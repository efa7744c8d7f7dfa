"""Index: what a checkpoint holds, by name, and which rank has written which part of it.

A tensor is whole, or lies in a buffer: a vector of equal chunks, each written by its owner. There
it begins at element `start`, in the order of `ftmesh.layout.element_order`. What ranks write are pieces:
all chunks of a buffer that a rank owns, in ascending order, or a whole tensor.

    {"format": "ftmesh.checkpoint/1", "step": 30,
     "processes": [0, 1],                     those that have written a file of pieces
     "owners": [[2, 0, 1, 3]],                tables: chunk -> rank
     "buffers": [{"dtype": "float32", "chunks": 4, "rows": 8, "width": 128, "owners": 0}],
     "tensors": [{"name": "params/w", "dtype": "float32", "shape": [3, 5]},
                 {"name": "optimizer/0/mu/w", ..., "buffer": 0, "start": 0}]}
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ftmesh.errors import DamagedCheckpointError

FORMAT = "ftmesh.checkpoint/1"


class Piece(NamedTuple):
    """What is written in one go: the chunks that a rank owns of a buffer, or a whole tensor."""

    of: str  # "buffer" or "tensor"
    number: int  # which of them
    rank: int = 0


@dataclass(frozen=True)
class Tensor:
    """An array by its name; in a buffer, from element `start` on, where that is not None."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    buffer: int | None = None
    start: int = 0

    @property
    def size(self) -> int:
        """Elements of it."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Buffer:
    """A vector of ``num_chunks * rows * width`` elements; `owner` has the rank of each chunk."""

    dtype: np.dtype[Any]
    rows: int
    width: int
    owner: tuple[int, ...]

    @property
    def chunk_size(self) -> int:
        """Elements of a chunk."""
        return self.rows * self.width

    @cached_property
    def home(self) -> tuple[tuple[int, int], ...]:
        """For each chunk its owner, and how many chunks of that owner lie before it."""
        seen: dict[int, int] = {}
        home = []
        for rank in self.owner:
            home.append((rank, seen.get(rank, 0)))
            seen[rank] = seen.get(rank, 0) + 1
        return tuple(home)


@dataclass(frozen=True)
class Index:
    """All that a checkpoint holds."""

    step: int
    processes: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    buffers: tuple[Buffer, ...]

    @cached_property
    def about(self) -> dict[str, str]:
        """The tensors in words, by their names."""
        return {tensor.name: str(tensor) for tensor in self.tensors}

    @cached_property
    def pieces(self) -> dict[Piece, int]:
        """Every piece, with its size in bytes."""
        sizes: dict[Piece, int] = {}
        for number, buffer in enumerate(self.buffers):
            for rank in buffer.owner:
                piece = Piece("buffer", number, rank)
                size = buffer.chunk_size * buffer.dtype.itemsize
                sizes[piece] = sizes.get(piece, 0) + size
        for number, tensor in enumerate(self.tensors):
            if tensor.buffer is None:
                sizes[Piece("tensor", number)] = tensor.size * tensor.dtype.itemsize
        return sizes

    def to_json(self) -> dict[str, Any]:
        """As `from_json` takes it."""
        tables = list(dict.fromkeys(buffer.owner for buffer in self.buffers))
        return {
            "format": FORMAT,
            "step": self.step,
            "processes": list(self.processes),
            "owners": [list(table) for table in tables],
            "buffers": [
                {
                    "dtype": buffer.dtype.name,
                    "chunks": len(buffer.owner),
                    "rows": buffer.rows,
                    "width": buffer.width,
                    "owners": tables.index(buffer.owner),
                }
                for buffer in self.buffers
            ],
            "tensors": [
                {"name": each.name, "dtype": each.dtype.name, "shape": list(each.shape)}
                | ({} if each.buffer is None else {"buffer": each.buffer, "start": each.start})
                for each in self.tensors
            ],
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Index:
        """The index in a file; one that makes no sense is damaged."""
        try:
            tables = [tuple(map(_count, table)) for table in content["owners"]]
            index = Index(
                _count(content["step"]),
                tuple(map(_count, content["processes"])),
                tuple(map(_tensor, content["tensors"])),
                tuple(_buffer(each, tables) for each in content["buffers"]),
            )
            wrong = next(_contradictions(index), None)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise DamagedCheckpointError(f"its index makes no sense: {error!r}") from None
        if wrong:
            raise DamagedCheckpointError(f"its index makes no sense: {wrong}")
        return index


def _contradictions(index: Index) -> Iterator[str]:
    """What cannot be, in words."""
    names = [tensor.name for tensor in index.tensors]
    if len(set(names)) < len(names):
        yield "two tensors have one name"
    if not index.processes or len(set(index.processes)) < len(index.processes):
        yield f"its processes are {list(index.processes)}"
    ends = [0] * len(index.buffers)
    for tensor in sorted(index.tensors, key=lambda tensor: tensor.start):
        if tensor.buffer is None:
            continue
        buffer = index.buffers[tensor.buffer]
        if tensor.dtype != buffer.dtype:
            yield f"{tensor.name} is {tensor.dtype}, in a buffer of {buffer.dtype}"
        if tensor.start < ends[tensor.buffer]:
            yield f"{tensor.name} begins before the one before it ends"
        ends[tensor.buffer] = tensor.start + tensor.size
        if ends[tensor.buffer] > len(buffer.owner) * buffer.chunk_size:
            yield f"{tensor.name} ends beyond its buffer"


def _tensor(told: Mapping[str, Any]) -> Tensor:
    name, shape = told["name"], tuple(map(_count, told["shape"]))
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is not a name")
    if "buffer" not in told:
        return Tensor(name, _dtype(told["dtype"]), shape)
    return Tensor(name, _dtype(told["dtype"]), shape, _count(told["buffer"]), _count(told["start"]))


def _buffer(told: Mapping[str, Any], tables: list[tuple[int, ...]]) -> Buffer:
    owner = tables[_count(told["owners"])]
    if len(owner) != told["chunks"]:
        raise ValueError(f"{told['chunks']} chunks and {len(owner)} owners")
    rows, width = _count(told["rows"]), _count(told["width"])
    if not rows * width * len(owner):
        raise ValueError("a buffer of nothing")
    return Buffer(_dtype(told["dtype"]), rows, width, owner)


def _count(number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"{number!r} is not a count")
    return number


def _dtype(name: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = jnp.dtype(name)
    if dtype.name != name or dtype.hasobject or not dtype.itemsize:
        raise ValueError(f"{name!r} is not a dtype")
    return dtype
