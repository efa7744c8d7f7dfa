"""Copies one process's part of a state to the host.

Of an array that is sharded, along any of its dimensions, that is what the process's devices have of
it; a block that several devices have is copied once. Everything else is replicated, and the first
process alone copies it. Nothing is gathered, and devices allocate nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from ftmesh.checkpoint.manifest import (
    Buffer,
    Manifest,
    NamedLeaf,
    Piece,
    Tensor,
    is_key,
    named_leaves,
    shape_and_dtype,
)
from ftmesh.errors import ArgumentError, TrainingError
from ftmesh.layout.flat_shards import unflatten_tensor
from ftmesh.topology.devices import process_of
from ftmesh.topology.ranks import Ranks, backup_ranks
from ftmesh.topology.topology import Topology


@dataclass(frozen=True)
class Snapshot:
    """The manifest of a checkpoint, and the pieces of it that this process has."""

    manifest: Manifest
    pieces: list[tuple[Piece, NDArray[Any]]]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for _, array in self.pieces)


@dataclass(frozen=True)
class PartnerCopies:
    """Copies of the blocks of sharded arrays: device ``partners[d]`` has those of device d.

    They are concatenated; `places` has the vector and the elements of each array, by name.
    """

    vectors: Sequence[jax.Array]
    places: Mapping[str, tuple[int, slice]]
    partners: Mapping[Any, Any]

    def block(self, name: str, device: Any) -> NDArray[Any]:
        """Return the block of an array whose copy is on `device`."""
        number, elements = self.places[name]
        return np.asarray(_data_by_device(self.vectors[number])[device])[elements]


@dataclass(frozen=True)
class Snapshotter:
    """Takes snapshots for one process."""

    process: int
    process_of: Callable[[Any], int] = process_of
    devices: Sequence[Any] | None = None  # whose values count; by default all that a state is on
    full_types: Any = None  # as for `Checkpoints.save`
    copies: PartnerCopies | None = None  # where to take what other devices have from

    def snapshot(self, step: int, state: Any) -> Snapshot:
        """Copy the state after `step`, once it has been computed."""
        inventory = _Inventory()
        for leaf in named_leaves(state, self.full_types):
            has_copy = self.copies is not None and leaf.name in self.copies.places
            inventory.add(leaf, has_copy=has_copy)
        first = self._first_process(state)
        holders = [self._holders(buffer) for buffer in inventory.buffers]
        writers = {self.process_of(device) for x in holders for device, _ in x}
        manifest = Manifest(
            step,
            (first, *sorted(writers - {first})),
            tuple(inventory.tensors),
            tuple(buffer.describe() for buffer in inventory.buffers),
        )
        sources: list[_Source] = []
        for number, buffer in enumerate(inventory.buffers):
            own = [_data_by_device(array) for array in buffer.arrays.values()]
            for chunk, (device, is_copy) in enumerate(holders[number]):
                if self.process_of(device) == self.process:
                    data: list[Any] = [x[device] for x in own]
                    if is_copy and self.copies is not None:
                        data = [self.copies.block(name, device) for name in buffer.arrays]
                    sources.append(_Source(Piece("buffer", number, chunk), data))
        if self.process == first:
            for number, leaf in inventory.replicated.items():
                data = [self._one_replica(leaf)]
                shape = inventory.tensors[number].shape if leaf.is_flat else None
                sources.append(_Source(Piece("tensor", number), data, shape))
        return Snapshot(manifest, _copy_to_host(sources))

    def finite_snapshot(self, step: int, state: Any) -> Snapshot:
        """Copy the state after `step`; raise TrainingError if it has values that are not finite."""
        snapshot = self.snapshot(step, state)
        name = _first_not_finite(snapshot)
        if name is not None:
            raise TrainingError(
                f"the state after step {step} has values that are not finite, in {name}, and is "
                "not saved: lower the learning rate or lengthen the warm-up, or go back to an "
                "earlier checkpoint"
            )
        return snapshot

    def _holders(self, buffer: _SourceBuffer) -> list[tuple[Any, bool]]:
        """For each chunk a device that has it, and whether that has a copy."""
        holders = []
        for devices in buffer.chunks:
            good = self._that_count(devices)
            if not good and buffer.has_copies and self.copies is not None:
                good = self._that_count([self.copies.partners.get(d) for d in devices])
                holders.append(((good or devices)[0], bool(good)))
            else:
                holders.append(((good or devices)[0], False))
        return holders

    def _that_count(self, devices: Sequence[Any]) -> list[Any]:
        return [d for d in devices if self.devices is None or d in self.devices]

    def _first_process(self, state: Any) -> int:
        devices = self.devices
        if devices is None:
            arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
            devices = list(set().union(*(array.sharding.device_set for array in arrays)))
        return min(map(self.process_of, devices), default=0)

    def _one_replica(self, leaf: NamedLeaf) -> Any:
        """Return the full array from one device that counts."""
        array = leaf.leaf
        if not isinstance(array, jax.Array):
            return array
        if array.is_fully_replicated:
            shards = array.addressable_shards
            good = [s for s in shards if self.devices is None or s.device in self.devices]
            array = (good or shards)[0].data
        elif not array.is_fully_addressable:
            raise ArgumentError(
                f"{leaf.name} has random keys, or is stored flat, and is sharded over processes, "
                "which checkpoints do not support: replicate it, or use another tool for it, such "
                "as Orbax"
            )
        return jax.random.key_data(array) if is_key(array) else array


_Chunks = tuple[tuple[Any, ...], ...]  # the devices that have each chunk


class _Source(NamedTuple):
    """Where the values of a piece are: arrays to concatenate, or one in another shape."""

    piece: Piece
    arrays: list[Any]
    shape: tuple[int, ...] | None = None


@dataclass
class _SourceBuffer:
    """Arrays of one dtype that are cut into chunks on the same devices."""

    dtype: np.dtype[Any]
    chunks: _Chunks
    has_copies: bool
    arrays: dict[str, jax.Array] = field(default_factory=dict)
    chunk_size: int = 0

    def describe(self) -> Buffer:
        return Buffer(self.dtype, 1, self.chunk_size, tuple(range(len(self.chunks))))


@dataclass
class _Inventory:
    """The tensors of a state, in order."""

    tensors: list[Tensor] = field(default_factory=list)
    replicated: dict[int, NamedLeaf] = field(default_factory=dict)  # by the number of the tensor
    buffers: list[_SourceBuffer] = field(default_factory=list)

    def add(self, leaf: NamedLeaf, *, has_copy: bool = False) -> None:
        name, array, shape = leaf
        _, dtype = shape_and_dtype(array)
        grid, chunks = _find_chunks(array)
        if not chunks or (leaf.is_flat and np.ndim(array) > 1):
            self.replicated[len(self.tensors)] = leaf
            self.tensors.append(Tensor(name, dtype, shape))
            return
        if leaf.is_flat and array.size < math.prod(shape):
            raise ArgumentError(
                f"{name} has {array.size} elements, and full_types say that its shape is {shape}"
            )
        known = [(b.dtype, b.chunks, b.has_copies) for b in self.buffers]
        if (dtype, chunks, has_copy) not in known:
            known.append((dtype, chunks, has_copy))
            self.buffers.append(_SourceBuffer(dtype, chunks, has_copy))
        number = known.index((dtype, chunks, has_copy))
        buffer, width = self.buffers[number], array.size // len(chunks)
        is_contiguous = all(parts == 1 for parts in grid[1:])
        self.tensors.append(
            Tensor(
                name,
                dtype,
                shape,
                number,
                buffer.chunk_size,
                width,
                None if is_contiguous else grid,
            )
        )
        buffer.arrays[name] = array
        buffer.chunk_size += width


def _find_chunks(array: Any) -> tuple[tuple[int, ...], _Chunks]:
    """Return into how many blocks each dimension is cut, and which devices have each block.

    There are no chunks if the array is not cut, or not into equal blocks.
    """
    if not isinstance(array, jax.Array) or is_key(array) or array.is_fully_replicated:
        return (), ()
    blocks: dict[tuple[int, ...], list[Any]] = {}
    for device, window in array.sharding.devices_indices_map(array.shape).items():
        starts = (s.indices(n)[0] for s, n in zip(window, array.shape, strict=True))
        blocks.setdefault(tuple(starts), []).append(device)
    grid = tuple(len(set(starts)) for starts in zip(*blocks, strict=True))
    is_even = not any(size % parts for size, parts in zip(array.shape, grid, strict=True))
    if not is_even or math.prod(grid) != len(blocks):
        return (), ()
    return grid, tuple(tuple(blocks[start]) for start in sorted(blocks))


def _data_by_device(array: jax.Array) -> dict[Any, Any]:
    return {shard.device: shard.data for shard in array.addressable_shards}


def _copy_to_host(sources: list[_Source]) -> list[tuple[Piece, NDArray[Any]]]:
    """Copy arrays, whose memory the next step may reuse."""
    for source in sources:
        for array in source.arrays:
            if isinstance(array, jax.Array):
                array.copy_to_host_async()
    copies = []
    for piece, arrays, shape in sources:
        if piece.kind == "buffer":
            copies.append((piece, np.concatenate([np.asarray(x).reshape(-1) for x in arrays])))
            continue
        (array,) = arrays
        values = np.asarray(array) if shape is None else unflatten_tensor(np.asarray(array), shape)
        is_copy = (  # np.asarray copies arrays in device memory
            isinstance(array, jax.Array)
            and array.sharding.memory_kind == "device"
            and all(device.platform != "cpu" for device in array.sharding.device_set)
        )
        copies.append((piece, values if is_copy else values.copy()))
    return copies


def _first_not_finite(snapshot: Snapshot) -> str | None:
    """Return the name of the first tensor with values that are not finite, or None.

    A scalar may be infinite: optimizers keep such, as the best loss before the first. Padding does
    not count.
    """
    manifest = snapshot.manifest
    for piece, array in snapshot.pieces:
        if not jnp.issubdtype(array.dtype, np.inexact):
            continue
        values = array.reshape(-1)
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size == 0:
            continue
        if piece.kind == "tensor":
            parts = [(manifest.tensors[piece.number], bad)]
        else:
            parts = []
            for tensor in manifest.tensors:
                if tensor.buffer == piece.number and tensor.width is not None:
                    real = min(tensor.width, tensor.size - piece.rank * tensor.width)
                    is_own = (bad >= tensor.start) & (bad < tensor.start + real)
                    parts.append((tensor, bad[is_own]))
        for tensor, own in parts:
            if own.size and (tensor.size > 1 or np.isnan(values[own]).any()):
                return tensor.name
    return None


# Copies of shards -------------------------------------------------------------------------------


class ShardCopier:
    """Copies arrays of which one host alone has a block to devices of other hosts.

    `partners` has the device that keeps the copies of each device.
    """

    def __init__(
        self, partners: Mapping[Any, Any], process_of: Callable[[Any], int] = process_of
    ) -> None:
        self._partners, self._process_of = dict(partners), process_of
        self._programs: dict[Any, tuple[list[int], dict[str, tuple[int, slice]], Any]] = {}

    @staticmethod
    def for_topology(topology: Topology) -> ShardCopier | None:
        """Return a copier to the nearest chips of other hosts; None if these have too few."""
        devices = Ranks(topology).devices
        hosts = [process_of(device) for device in devices]
        ranks = backup_ranks(topology, hosts) if len(set(hosts)) > 1 else None
        if ranks is None:
            return None
        return ShardCopier({d: devices[r] for d, r in zip(devices, ranks.tolist(), strict=True)})

    def copy(self, state: Any) -> PartnerCopies | None:
        """Start to copy the shards of a state; None if every block is on several hosts."""
        leaves, tree = jax.tree.flatten(state)
        key = tree, tuple(getattr(leaf, "sharding", None) for leaf in leaves)
        if key not in self._programs:
            self._programs[key] = self._build(state)
        numbers, places, program = self._programs[key]
        if not numbers:
            return None
        vectors = program(*(leaves[number] for number in numbers))
        return PartnerCopies(vectors, places, self._partners)

    def _build(self, state: Any) -> tuple[list[int], dict[str, tuple[int, slice]], Any]:
        """Return which leaves are copied, where they are in vectors by dtype, and the program."""
        leaves = named_leaves(state)
        numbers = [i for i, leaf in enumerate(leaves) if self._is_copied(leaf.leaf)]
        if not numbers:
            return [], {}, None
        mesh = leaves[numbers[0]].leaf.sharding.mesh
        numbers = [i for i in numbers if leaves[i].leaf.sharding.mesh == mesh]
        arrays = [leaves[i].leaf for i in numbers]
        dtypes = list(dict.fromkeys(x.dtype for x in arrays))
        members = [[i for i, x in enumerate(arrays) if x.dtype == dtype] for dtype in dtypes]
        places: dict[str, tuple[int, slice]] = {}
        for number, own in enumerate(members):
            start = 0
            for i in own:
                size = math.prod(arrays[i].sharding.shard_shape(arrays[i].shape))
                places[leaves[numbers[i]].name] = number, slice(start, start + size)
                start += size
        place_of = {device: i for i, device in enumerate(mesh.devices.flat)}
        pairs = [(place_of[device], place_of[to]) for device, to in self._partners.items()]

        def copy(*blocks: jax.Array) -> list[jax.Array]:
            flat = [block.reshape(-1) for block in blocks]
            vectors = [jnp.concatenate([flat[i] for i in own]) for own in members]
            return [lax.ppermute(vector, mesh.axis_names, pairs) for vector in vectors]

        specs: Any = {
            "in_specs": tuple(x.sharding.spec for x in arrays),
            "out_specs": PartitionSpec(mesh.axis_names),
        }
        return numbers, places, jax.jit(jax.shard_map(copy, mesh=mesh, **specs, check_vma=False))

    def _is_copied(self, leaf: Any) -> bool:
        is_on_mesh = isinstance(getattr(leaf, "sharding", None), NamedSharding)
        return (
            is_on_mesh
            and not is_key(leaf)
            and self._partners.keys() <= set(leaf.sharding.mesh.devices.flat)
            and is_on_one_host(leaf, self._process_of)
        )


def is_on_one_host(leaf: Any, process_of: Callable[[Any], int] = process_of) -> bool:
    """True if the loss of a host would take a block of an array."""
    blocks = block_holders(leaf.sharding, leaf.shape) if isinstance(leaf, jax.Array) else ()
    return any(len(set(map(process_of, devices))) == 1 for devices in blocks)


@lru_cache
def block_holders(sharding: Any, shape: tuple[int, ...]) -> tuple[tuple[Any, ...], ...]:
    """Return the devices that have each block of an array."""
    holders: dict[str, list[Any]] = {}
    for device, window in sharding.devices_indices_map(shape).items():
        holders.setdefault(str(window), []).append(device)
    return tuple(map(tuple, holders.values()))
