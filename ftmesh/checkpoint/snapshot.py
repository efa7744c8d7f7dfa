"""Copies one process's part of a state to the host.

Of a sharded state that is what the process's devices own, without padding. Everything else is
replicated, and the first process alone copies it. Nothing is gathered, and devices allocate
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ftmesh.checkpoint.manifest import Buffer, Manifest, Piece, Tensor
from ftmesh.checkpoint.tensor_names import (
    ShardedPart,
    check_unique,
    is_key,
    is_slot,
    shape_and_dtype,
    split_state,
)
from ftmesh.errors import ArgumentError, TrainingError
from ftmesh.layout.owned_buckets import OwnedBucket, OwnedLayout
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
    """Copies of a sharded state's rows: rank ``partners[r]`` has those of rank r."""

    rows: Sequence[Sequence[jax.Array | None]]
    partners: Sequence[int]

    @property
    def buffers(self) -> list[jax.Array]:
        return [array for arrays in self.rows for array in arrays if array is not None]


@dataclass(frozen=True)
class Snapshotter:
    """Takes snapshots for one process."""

    process: int
    process_of: Callable[[Any], int] = process_of
    devices: Sequence[Any] | None = None  # whose values count; by default all that a state is on
    layouts: Sequence[OwnedLayout] = ()  # of sharded states
    copies: PartnerCopies | None = None  # where to take what other devices own from

    def snapshot(self, step: int, state: Any) -> Snapshot:
        """Copy the state after `step`, once it has been computed."""
        inventory = _Inventory()
        for part in split_state(state, self.layouts):
            if isinstance(part, ShardedPart):
                inventory.add_sharded(part)
            else:
                inventory.add(*part)
        check_unique(tensor.name for tensor in inventory.tensors)
        first = self._first_process(state)
        holders = [self._holders(i, *buffer) for i, buffer in enumerate(inventory.buffers)]
        writers = {self.process_of(device) for x in holders for device, _, _ in x.values()}
        manifest = Manifest(
            step,
            (first, *sorted(writers - {first})),
            tuple(inventory.tensors),
            tuple(_describe_buffer(array, bucket) for array, bucket in inventory.buffers),
        )
        sources: list[tuple[Piece, Any, slice]] = []
        for number, (_, bucket) in enumerate(inventory.buffers):
            for rank, (device, array, row) in holders[number].items():
                if self.process_of(device) == self.process:
                    data = {shard.device: shard.data for shard in array.addressable_shards}
                    stop = row + _num_owned(bucket, rank) * bucket.packing.rows
                    sources.append((Piece("buffer", number, rank), data[device], slice(row, stop)))
        if self.process == first:
            for number, leaf in inventory.replicated.items():
                data = self._one_replica(inventory.tensors[number].name, leaf)
                sources.append((Piece("tensor", number), data, slice(None)))
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

    def _holders(
        self, number: int, array: jax.Array, bucket: OwnedBucket
    ) -> dict[int, tuple[Any, jax.Array, int]]:
        """For each rank that owns chunks: a device that has them, in which array, at which row."""
        devices = _device_of_rank(array, bucket)
        holders = {}
        for rank, (device, row) in devices.items():
            if not _num_owned(bucket, rank):
                continue
            holders[rank] = device, array, row
            if self.copies is not None and self.devices is not None and device not in self.devices:
                device, row = devices[self.copies.partners[rank]]  # has a copy
                holders[rank] = device, self.copies.buffers[number], row
        return holders

    def _first_process(self, state: Any) -> int:
        devices = self.devices
        if devices is None:
            arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
            devices = list(set().union(*(array.sharding.device_set for array in arrays)))
        return min(map(self.process_of, devices), default=0)

    def _one_replica(self, name: str, array: Any) -> Any:
        """Return the full array from one device that counts."""
        if not isinstance(array, jax.Array):
            return array
        if array.is_fully_replicated:
            shards = array.addressable_shards
            good = [s for s in shards if self.devices is None or s.device in self.devices]
            return (good or shards)[0].data
        if array.is_fully_addressable:
            return array
        raise ArgumentError(
            f"{name} is sharded over processes, and no layout says how: give replicated arrays"
        )


@dataclass
class _Inventory:
    """The tensors of a state, in order."""

    tensors: list[Tensor] = field(default_factory=list)
    replicated: dict[int, Any] = field(default_factory=dict)  # by the number of the tensor
    buffers: list[tuple[jax.Array, OwnedBucket]] = field(default_factory=list)

    def add(self, name: str, leaf: Any) -> None:
        shape, dtype = shape_and_dtype(leaf)
        self.replicated[len(self.tensors)] = jax.random.key_data(leaf) if is_key(leaf) else leaf
        self.tensors.append(Tensor(name, dtype, shape))

    def add_sharded(self, part: ShardedPart) -> None:
        numbers: dict[tuple[int, int], int] = {}
        for row, arrays in enumerate(part.state.rows):
            for i, (array, bucket) in enumerate(zip(arrays, part.layout.buckets, strict=True)):
                if array is not None:
                    numbers[row, i] = len(self.buffers)
                    self.buffers.append((array, bucket))
        for name, leaf in part.leaves:
            if not is_slot(leaf):
                self.add(name, leaf)
                continue
            shape, dtype = part.type_of(leaf)
            i, member = part.layout.location[leaf.leaf]
            start = part.layout.buckets[i].packing.starts[member]
            self.tensors.append(Tensor(name, dtype, shape, numbers[leaf.row, i], start))


def _device_of_rank(array: jax.Array, bucket: OwnedBucket) -> dict[int, tuple[Any, int]]:
    """For each rank a device that has its rows, and the first row of them there."""
    expected = bucket.num_rows * len(bucket.owned)
    if len(array) != expected:
        raise ArgumentError(
            f"a sharded state has {len(array)} rows where its layout has {expected}: checkpoints "
            "support optimizers that are sharded along one axis only"
        )
    devices: dict[int, tuple[Any, int]] = {}
    for device, (rows, *_) in array.sharding.devices_indices_map(array.shape).items():
        first, stop, _ = rows.indices(len(array))
        for rank in range(first // bucket.num_rows, stop // bucket.num_rows):
            devices.setdefault(rank, (device, rank * bucket.num_rows - first))
    return devices


def _num_owned(bucket: OwnedBucket, rank: int) -> int:
    return int((bucket.owned[rank] < bucket.packing.num_chunks).sum())


def _describe_buffer(array: jax.Array, bucket: OwnedBucket) -> Buffer:
    packing, owner = bucket.packing, np.zeros(bucket.packing.num_chunks + 1, np.int64)
    owner[bucket.owned] = np.arange(len(bucket.owned))[:, None]
    owners = tuple(owner[:-1].tolist())
    return Buffer(np.dtype(array.dtype), packing.rows, packing.width, owners)


def _copy_to_host(sources: list[tuple[Piece, Any, slice]]) -> list[tuple[Piece, NDArray[Any]]]:
    """Copy rows of arrays, whose memory the next step may reuse."""
    for _, array, _ in sources:
        if isinstance(array, jax.Array):
            array.copy_to_host_async()
    copies = []
    for piece, array, rows in sources:
        values = np.asarray(array)
        part = values[rows] if piece.kind == "buffer" else values
        is_copy = (  # np.asarray copies arrays in device memory
            isinstance(array, jax.Array)
            and array.sharding.memory_kind == "device"
            and all(device.platform != "cpu" for device in array.sharding.device_set)
        )
        copies.append((piece, part if is_copy else part.copy()))
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
            buffer = manifest.buffers[piece.number]
            chunk, offset = np.divmod(bad, buffer.chunk_size)
            chunks = np.flatnonzero(np.array(buffer.owner) == piece.rank)
            positions = chunks[chunk] * buffer.chunk_size + offset
            parts = [
                (t, bad[(positions >= t.start) & (positions < t.start + t.size)])
                for t in manifest.tensors
                if t.buffer == piece.number
            ]
        for tensor, own in parts:
            if own.size and (tensor.size > 1 or np.isnan(values[own]).any()):
                return tensor.name
    return None
