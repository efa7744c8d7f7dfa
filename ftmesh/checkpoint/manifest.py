"""The manifest of a checkpoint: its tensors by name, and which rank wrote which part.

A name is the path to a tensor in the tree that optax builds, ``optimizer/0/mu/layer_1/bias``, the
same whether the optimizer is sharded or replicated.

A tensor is replicated, or stored in a buffer: equal chunks, each written by one rank. Of a tensor,
each chunk has the next `width` elements, in their natural order, from element `start` of the chunk
on. Ranks write pieces: the chunks of a buffer that a rank has, in ascending order, or a replicated
tensor. On disk (`index.json`):

    {"format": "ftmesh.checkpoint/2", "step": 30,
     "processes": [0, 1],                     those that have written a file of pieces
     "owners": [[0, 1, 2, 3]],                tables: chunk -> rank
     "buffers": [{"dtype": "float32", "chunks": 4, "rows": 1, "width": 128, "owners": 0}],
     "tensors": [{"name": "params/w", "dtype": "float32", "shape": [3, 5]},
                 {"name": "optimizer/0/mu/w", ..., "buffer": 0, "start": 0, "width": 4}]}

An array that is cut along several dimensions, or another than the first, has a `grid`: how many
equal blocks there are along each. Its chunks are these blocks, the last dimension varying fastest,
and the format is "ftmesh.checkpoint/3".

Without tensors in buffers the format is "ftmesh.checkpoint/1". There a tensor in a buffer has no
`width`: it begins at element `start` of all chunks, concatenated, and has the order of
`ftmesh.layout.buckets`. Nothing writes these any more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ftmesh.errors import ArgumentError, DamagedCheckpointError

FORMATS = ("ftmesh.checkpoint/1", "ftmesh.checkpoint/2", "ftmesh.checkpoint/3")


class Piece(NamedTuple):
    """What is written contiguously: a rank's chunks of a buffer, or a replicated tensor."""

    kind: Literal["buffer", "tensor"]
    number: int
    rank: int = 0

    def __str__(self) -> str:
        if self.kind == "tensor":
            return f"tensor {self.number}"
        return f"rank {self.rank}'s part of buffer {self.number}"


@dataclass(frozen=True)
class Tensor:
    """An array by name; if `buffer` is given, it is stored there from element `start` on.

    With `width`, `start` is an offset within every chunk, and the tensor fills `width` elements of
    each. With `grid`, those elements are one block of the array.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    buffer: int | None = None
    start: int = 0
    width: int | None = None
    grid: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
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
        return self.rows * self.width

    @cached_property
    def chunk_locations(self) -> tuple[tuple[int, int], ...]:
        """For each chunk its owner, and how many of that owner's chunks precede it."""
        counts: Counter[int] = Counter()
        locations = []
        for rank in self.owner:
            locations.append((rank, counts[rank]))
            counts[rank] += 1
        return tuple(locations)


@dataclass(frozen=True)
class Manifest:
    """Everything that a checkpoint contains."""

    step: int
    processes: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    buffers: tuple[Buffer, ...]

    @property
    def format(self) -> str:
        """The name of the oldest format that can store this."""
        if any(tensor.grid is not None for tensor in self.tensors):
            return FORMATS[2]
        return FORMATS[any(tensor.width is not None for tensor in self.tensors)]

    def describe_tensors(self) -> dict[str, str]:
        """Return dtype and shape of every tensor as text, by name."""
        return {tensor.name: str(tensor) for tensor in self.tensors}

    @cached_property
    def piece_sizes(self) -> dict[Piece, int]:
        """The size in bytes of every piece."""
        sizes: dict[Piece, int] = {}
        for number, buffer in enumerate(self.buffers):
            for rank, count in Counter(buffer.owner).items():
                size = buffer.chunk_size * buffer.dtype.itemsize
                sizes[Piece("buffer", number, rank)] = count * size
        for number, tensor in enumerate(self.tensors):
            if tensor.buffer is None:
                sizes[Piece("tensor", number)] = tensor.size * tensor.dtype.itemsize
        return sizes

    def to_json(self) -> dict[str, Any]:
        tables = list(dict.fromkeys(buffer.owner for buffer in self.buffers))
        return {
            "format": self.format,
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
                {"name": t.name, "dtype": t.dtype.name, "shape": list(t.shape)}
                | ({} if t.buffer is None else {"buffer": t.buffer, "start": t.start})
                | ({} if t.width is None else {"width": t.width})
                | ({} if t.grid is None else {"grid": list(t.grid)})
                for t in self.tensors
            ],
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Manifest:
        """Build a manifest from its file; raise DamagedCheckpointError if entries are wrong."""
        try:
            tables = [tuple(map(_parse_count, table)) for table in content["owners"]]
            manifest = Manifest(
                _parse_count(content["step"]),
                tuple(map(_parse_count, content["processes"])),
                tuple(map(_parse_tensor, content["tensors"])),
                tuple(_parse_buffer(entry, tables) for entry in content["buffers"]),
            )
            contradiction = next(_contradictions(manifest), None)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise DamagedCheckpointError(f"its index is malformed: {error!r}") from None
        if contradiction:
            raise DamagedCheckpointError(f"its index is inconsistent: {contradiction}")
        return manifest


def _contradictions(manifest: Manifest) -> Iterator[str]:
    names = [tensor.name for tensor in manifest.tensors]
    if len(set(names)) < len(names):
        yield "two tensors have the same name"
    if not manifest.processes or len(set(manifest.processes)) < len(manifest.processes):
        yield f"its processes are {list(manifest.processes)}"
    ends = [0] * len(manifest.buffers)
    for tensor in sorted(manifest.tensors, key=lambda tensor: tensor.start):
        if tensor.buffer is None:
            continue
        buffer = manifest.buffers[tensor.buffer]
        if tensor.dtype != buffer.dtype:
            yield f"{tensor.name} is {tensor.dtype}, in a buffer of {buffer.dtype}"
        if tensor.start < ends[tensor.buffer]:
            yield f"{tensor.name} overlaps the tensor before it"
        limit, used = len(buffer.owner) * buffer.chunk_size, tensor.size
        if tensor.width is not None:
            limit, used = buffer.chunk_size, tensor.width
            if len(buffer.owner) * tensor.width < tensor.size:
                yield f"{tensor.name} has more elements than its buffer has of it"
            if tensor.grid is not None and not _is_grid_of(tensor, len(buffer.owner)):
                yield f"{tensor.name} is not cut into {list(tensor.grid)} blocks"
        ends[tensor.buffer] = tensor.start + used
        if ends[tensor.buffer] > limit:
            yield f"{tensor.name} ends beyond its buffer"


def _is_grid_of(tensor: Tensor, chunks: int) -> bool:
    """True if the grid of a tensor has `chunks` equal blocks of `width` elements."""
    grid = tensor.grid or ()
    if len(grid) != len(tensor.shape) or math.prod(grid) != chunks:
        return False
    divides = not any(size % parts for size, parts in zip(tensor.shape, grid, strict=True))
    return divides and tensor.width == tensor.size // chunks


def _parse_tensor(entry: Mapping[str, Any]) -> Tensor:
    name, shape = entry["name"], tuple(map(_parse_count, entry["shape"]))
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is not a name")
    dtype = _parse_dtype(entry["dtype"])
    if "buffer" not in entry:
        return Tensor(name, dtype, shape)
    buffer, start = _parse_count(entry["buffer"]), _parse_count(entry["start"])
    width = _parse_count(entry["width"]) if "width" in entry else None
    grid = tuple(map(_parse_count, entry["grid"])) if "grid" in entry else None
    return Tensor(name, dtype, shape, buffer, start, width, grid)


def _parse_buffer(entry: Mapping[str, Any], tables: list[tuple[int, ...]]) -> Buffer:
    owner = tables[_parse_count(entry["owners"])]
    if len(owner) != entry["chunks"]:
        raise ValueError(f"{entry['chunks']} chunks and {len(owner)} owners")
    rows, width = _parse_count(entry["rows"]), _parse_count(entry["width"])
    if not rows * width * len(owner):
        raise ValueError("an empty buffer")
    return Buffer(_parse_dtype(entry["dtype"]), rows, width, owner)


def _parse_count(number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"{number!r} is not a count")
    return number


def _parse_dtype(name: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = jnp.dtype(name)
    if dtype.name != name or dtype.hasobject or not dtype.itemsize:
        raise ValueError(f"{name!r} is not a dtype")
    return dtype


# The tensors of a state -------------------------------------------------------------------------


class NamedLeaf(NamedTuple):
    """A leaf of a state, and the shape of the tensor that it stores."""

    name: str
    leaf: Any
    shape: tuple[int, ...]

    @property
    def is_flat(self) -> bool:
        """True if the tensor is stored flat: see `ftmesh.layout.flat_shards`."""
        return shape_and_dtype(self.leaf)[0] != self.shape


def named_leaves(state: Any, full_types: Any = None) -> list[NamedLeaf]:
    """Return the leaves of a state, with the shapes in `full_types` where those are given."""
    full = {
        _path_name(path): np.shape(type_)
        for path, type_ in jax.tree_util.tree_leaves_with_path(full_types)
    }
    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = _path_name(path)
        leaves.append(NamedLeaf(name, leaf, full.get(name, shape_and_dtype(leaf)[0])))
    _check_unique(name for name, _, _ in leaves)
    if unknown := full.keys() - {name for name, _, _ in leaves}:
        raise ArgumentError(f"full_types have {min(unknown)}, and the state has not")
    return leaves


def describe_tensors(state: Any, full_types: Any = None) -> dict[str, str]:
    """Return dtype and shape of every tensor as text, as `Manifest.describe_tensors` does."""
    return {
        name: f"{shape_and_dtype(leaf)[1]}{list(shape)}"
        for name, leaf, shape in named_leaves(state, full_types)
    }


def shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype of an array or a number; for a random key, those of its bits."""
    if is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return np.shape(leaf), np.dtype(leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf))


def _check_unique(names: Iterable[str]) -> None:
    """Raise ArgumentError if two tensors have the same name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ArgumentError(f"two tensors of the state are called {name}: rename one of them")
        seen.add(name)


def _path_name(path: tuple[Any, ...]) -> str:
    name: str = jax.tree_util.keystr(path, simple=True, separator="/")
    return name


def is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
