"""Copies one process's part of a state to the host.

Of an array that is sharded along its first dimension, that is what the process's devices have of
it. Everything else is replicated, and the first process alone copies it. Nothing is gathered, and
devices allocate nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ftmesh.checkpoint.manifest import Buffer, Manifest, Piece, Tensor
from ftmesh.checkpoint.tensor_names import NamedLeaf, is_key, named_leaves, shape_and_dtype
from ftmesh.errors import ArgumentError, TrainingError
from ftmesh.layout.flat_shards import unflatten_tensor
from ftmesh.topology.devices import process_of


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
    """Copies of the sharded arrays of a state: rank ``partners[r]`` has those of rank r."""

    arrays: Sequence[jax.Array]  # in the order of the state's leaves
    partners: Sequence[int]


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
            inventory.add(leaf)
        first = self._first_process(state)
        holders = [self._holders(buffer.chunks) for buffer in inventory.buffers]
        writers = {self.process_of(device) for x in holders for device, _ in x}
        manifest = Manifest(
            step,
            (first, *sorted(writers - {first})),
            tuple(inventory.tensors),
            tuple(buffer.describe() for buffer in inventory.buffers),
        )
        sources: list[_Source] = []
        done = 0
        for number, buffer in enumerate(inventory.buffers):
            copies = None if self.copies is None else self.copies.arrays
            own = [_data_by_device(array) for array in buffer.arrays]
            for chunk, (device, is_copy) in enumerate(holders[number]):
                if self.process_of(device) == self.process:
                    data = [x[device] for x in own]
                    if is_copy:
                        assert copies is not None
                        data = [_data_by_device(copies[i])[device] for i in buffer.numbers]
                    sources.append(_Source(Piece("buffer", number, chunk), data))
            done += len(buffer.arrays)
        if self.copies is not None and done != len(self.copies.arrays):
            raise ArgumentError(
                f"there are copies of {len(self.copies.arrays)} arrays, and {done} are sharded"
            )
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

    def _holders(self, chunks: _Chunks) -> list[tuple[Any, bool]]:
        """For each chunk a device that has it, and whether that has a copy."""
        holders = []
        for chunk, devices in enumerate(chunks):
            counts = self.devices is None or not set(devices).isdisjoint(self.devices)
            if self.copies is not None and not counts:
                device = chunks[self.copies.partners[chunk]][0]
                holders.append((device, True))
            else:
                good = [d for d in devices if self.devices is None or d in self.devices]
                holders.append(((good or devices)[0], False))
        return holders

    def _first_process(self, state: Any) -> int:
        devices = self.devices
        if devices is None:
            arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
            devices = list(set().union(*(array.sharding.device_set for array in arrays)))
        return min(map(self.process_of, devices), default=0)

    def _one_replica(self, leaf: NamedLeaf) -> Any:
        """Return the full array from one device that counts."""
        array = jax.random.key_data(leaf.leaf) if is_key(leaf.leaf) else leaf.leaf
        if not isinstance(array, jax.Array):
            return array
        if array.is_fully_replicated:
            shards = array.addressable_shards
            good = [s for s in shards if self.devices is None or s.device in self.devices]
            return (good or shards)[0].data
        if array.is_fully_addressable:
            return array
        raise ArgumentError(
            f"{leaf.name} is sharded over processes along other dimensions than its first, which "
            "checkpoints do not support: replicate it, or use another tool for it, such as Orbax"
        )


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
    arrays: list[jax.Array] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # among all arrays that are cut
    chunk_size: int = 0

    def describe(self) -> Buffer:
        return Buffer(self.dtype, 1, self.chunk_size, tuple(range(len(self.chunks))))


@dataclass
class _Inventory:
    """The tensors of a state, in order."""

    tensors: list[Tensor] = field(default_factory=list)
    replicated: dict[int, NamedLeaf] = field(default_factory=dict)  # by the number of the tensor
    buffers: list[_SourceBuffer] = field(default_factory=list)

    def add(self, leaf: NamedLeaf) -> None:
        name, array, shape = leaf
        _, dtype = shape_and_dtype(array)
        chunks = None if leaf.is_flat and np.ndim(array) > 1 else _find_chunks(array)
        if chunks is None:
            self.replicated[len(self.tensors)] = leaf
            self.tensors.append(Tensor(name, dtype, shape))
            return
        if leaf.is_flat and array.size < math.prod(shape):
            raise ArgumentError(
                f"{name} has {array.size} elements, and full_types say that its shape is {shape}"
            )
        known = ((b.dtype, b.chunks) for b in self.buffers)
        number = next((i for i, x in enumerate(known) if x == (dtype, chunks)), len(self.buffers))
        if number == len(self.buffers):
            self.buffers.append(_SourceBuffer(dtype, chunks))
        buffer, width = self.buffers[number], array.size // len(chunks)
        self.tensors.append(Tensor(name, dtype, shape, number, buffer.chunk_size, width))
        buffer.arrays.append(array)
        buffer.numbers.append(sum(len(b.arrays) for b in self.buffers) - 1)
        buffer.chunk_size += width


def _find_chunks(array: Any) -> _Chunks | None:
    """Return which devices have each of the equal chunks of an array.

    None if it is not cut, or not into chunks that are contiguous in its natural order.
    """
    if not isinstance(array, jax.Array) or is_key(array) or array.is_fully_replicated:
        return None
    chunks: dict[int, list[Any]] = {}
    for device, window in array.sharding.devices_indices_map(array.shape).items():
        (start, _, _), *others = (s.indices(n) for s, n in zip(window, array.shape, strict=True))
        lengths = [stop - first for first, stop, _ in others]
        if lengths != list(array.shape[1:]):
            return None
        chunks.setdefault(start, []).append(device)
    return tuple(tuple(chunks[start]) for start in sorted(chunks))


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
