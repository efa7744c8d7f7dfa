"""Snapshot: a process's part of a state, copied to the host as it is now.

Of sharded states that is what its devices own, without padding; everything else is whole, and the
first process alone copies it. Nothing is gathered, and devices allocate nothing.

Finite: whether a state is one that a run could go on from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ftmesh.checkpoint.manifest import Buffer, Index, Piece, Tensor
from ftmesh.checkpoint.tensor_names import Sharded, check_names, is_key, is_slot, parts_of, type_of
from ftmesh.errors import ArgumentError, TrainingError
from ftmesh.layout.owned_buckets import Owned, OwnedBucket
from ftmesh.topology.devices import process_of


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint will hold, and the pieces of it that this process has."""

    index: Index
    pieces: list[tuple[Piece, NDArray[Any]]]

    @property
    def num_bytes(self) -> int:
        """Of all those pieces."""
        return sum(array.nbytes for _, array in self.pieces)


@dataclass(frozen=True)
class Copies:
    """The rows of a sharded state as others have them: those of rank r are at rank partners[r]."""

    rows: Sequence[Sequence[jax.Array | None]]
    partners: Sequence[int]

    @property
    def buffers(self) -> list[jax.Array]:
        """The arrays, in order."""
        return [array for arrays in self.rows for array in arrays if array is not None]


@dataclass(frozen=True)
class Copier:
    """Makes snapshots for process `process`.

    `devices` are those whose numbers count, all that a state is on where not given; `process_of`
    tells which process has a device. What other devices own is taken from `copies`.
    """

    process: int
    process_of: Callable[[Any], int] = process_of
    devices: Sequence[Any] | None = None
    layouts: Sequence[Owned] = ()
    copies: Copies | None = None

    def snapshot(self, step: int, state: Any) -> Snapshot:
        """The state as it is after `step`; waits for it to be computed."""
        found = _Found()
        for part in parts_of(state, self.layouts):
            if isinstance(part, Sharded):
                found.add_sharded(part)
            else:
                found.add(*part)
        check_names(tensor.name for tensor in found.tensors)
        first = self._first(state)
        holders = [
            self._holders(number, *found.buffers[number]) for number in range(len(found.buffers))
        ]
        writing = {
            self.process_of(device) for holder in holders for device, _, _ in holder.values()
        }
        processes = (first, *sorted(writing - {first}))
        index = Index(
            step,
            processes,
            tuple(found.tensors),
            tuple(_buffer(array, bucket) for array, bucket in found.buffers),
        )
        sources: list[tuple[Piece, Any, slice]] = []
        for number, (_, bucket) in enumerate(found.buffers):
            for rank, (device, holding, row) in holders[number].items():
                if self.process_of(device) == self.process:
                    at = {shard.device: shard.data for shard in holding.addressable_shards}
                    stop = row + _num_owned(bucket, rank) * bucket.packing.rows
                    sources.append((Piece("buffer", number, rank), at[device], slice(row, stop)))
        if self.process == first:
            for number, array in found.whole.items():
                data = self._one_of(found.tensors[number].name, array)
                sources.append((Piece("tensor", number), data, slice(None)))
        return Snapshot(index, _on_host(sources))

    def _holders(
        self, number: int, array: jax.Array, bucket: OwnedBucket
    ) -> dict[int, tuple[Any, jax.Array, int]]:
        """For each rank that owns something, a device that has it, in which array, from which row.

        Of ranks whose devices do not count, their partner's device, and its copies.
        """
        places = _places(array, bucket)
        holders = {}
        for rank, (device, row) in places.items():
            if not _num_owned(bucket, rank):
                continue
            holders[rank] = device, array, row
            if self.copies is not None and self.devices is not None and device not in self.devices:
                device, row = places[self.copies.partners[rank]]
                holders[rank] = device, self.copies.buffers[number], row
        return holders

    def _first(self, state: Any) -> int:
        """The process that writes what is whole."""
        devices = self.devices
        if devices is None:
            arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
            devices = list(set().union(*(array.sharding.device_set for array in arrays)))
        return min(map(self.process_of, devices), default=0)

    def _one_of(self, name: str, array: Any) -> Any:
        """All of an array, as one device has it that counts."""
        if not isinstance(array, jax.Array):
            return array
        if array.is_fully_replicated:
            shards = array.addressable_shards
            good = [s for s in shards if self.devices is None or s.device in self.devices]
            return (good or shards)[0].data
        if array.is_fully_addressable:
            return array
        raise ArgumentError(
            f"{name} is split over processes in a way that no layout tells: give whole arrays"
        )


@dataclass
class _Found:
    """What is found in a state, in order."""

    tensors: list[Tensor] = field(default_factory=list)
    whole: dict[int, Any] = field(default_factory=dict)  # by the number of the tensor
    buffers: list[tuple[jax.Array, OwnedBucket]] = field(default_factory=list)

    def add(self, name: str, leaf: Any) -> None:
        """A tensor that is whole."""
        shape, dtype = type_of(leaf)
        self.whole[len(self.tensors)] = jax.random.key_data(leaf) if is_key(leaf) else leaf
        self.tensors.append(Tensor(name, dtype, shape))

    def add_sharded(self, part: Sharded) -> None:
        """Those of a sharded state."""
        numbers: dict[tuple[int, int], int] = {}
        for row, arrays in enumerate(part.state.rows):
            for at, (array, bucket) in enumerate(zip(arrays, part.layout.buckets, strict=True)):
                if array is not None:
                    numbers[row, at] = len(self.buffers)
                    self.buffers.append((array, bucket))
        for name, leaf in part.leaves:
            if not is_slot(leaf):
                self.add(name, leaf)
                continue
            shape, dtype = part.type_in(leaf)
            at, place = part.layout.home[leaf.leaf]
            start = part.layout.buckets[at].packing.starts[place]
            self.tensors.append(Tensor(name, dtype, shape, numbers[leaf.row, at], start))


def _places(array: jax.Array, bucket: OwnedBucket) -> dict[int, tuple[Any, int]]:
    """For each rank a device that has its rows, and from which row of its array on."""
    wanted = bucket.num_rows * len(bucket.owned)
    if len(array) != wanted:
        raise ArgumentError(
            f"a sharded state has {len(array)} rows where its layout has {wanted}: checkpoints are "
            "for optimizers that are sharded along one axis alone"
        )
    places: dict[int, tuple[Any, int]] = {}
    for device, (rows, *_) in array.sharding.devices_indices_map(array.shape).items():
        first, stop, _ = rows.indices(len(array))
        for rank in range(first // bucket.num_rows, stop // bucket.num_rows):
            places.setdefault(rank, (device, rank * bucket.num_rows - first))
    return places


def _num_owned(bucket: OwnedBucket, rank: int) -> int:
    return int((bucket.owned[rank] < bucket.packing.num_chunks).sum())


def _buffer(array: jax.Array, bucket: OwnedBucket) -> Buffer:
    packing, owner = bucket.packing, np.zeros(bucket.packing.num_chunks + 1, np.int64)
    owner[bucket.owned] = np.arange(len(bucket.owned))[:, None]
    owners = tuple(owner[:-1].tolist())
    return Buffer(np.dtype(array.dtype), packing.rows, packing.width, owners)


def _on_host(sources: list[tuple[Piece, Any, slice]]) -> list[tuple[Piece, NDArray[Any]]]:
    """Copies of arrays, some rows of each: the next step may take their memory."""
    for _, array, _ in sources:
        if isinstance(array, jax.Array):
            array.copy_to_host_async()
    copies = []
    for piece, array, rows in sources:
        there = np.asarray(array)
        part = there[rows] if piece.of == "buffer" else there
        copies.append((piece, part if _is_far(array) else part.copy()))
    return copies


def _is_far(array: Any) -> bool:
    """Whether an array is in memory of its own, so that to look at it is to copy it."""
    if not isinstance(array, jax.Array) or array.sharding.memory_kind != "device":
        return False
    return all(device.platform != "cpu" for device in array.sharding.device_set)


def finite_snapshot(copier: Copier, step: int, state: Any) -> Snapshot:
    """The state as it is after `step`; refused where it has numbers that are not finite."""
    snapshot = copier.snapshot(step, state)
    wrong = first_not_finite(snapshot)
    if wrong is not None:
        raise TrainingError(
            f"the state after step {step} has numbers that are not finite, in {wrong}, and is "
            "not saved: the run has stopped there; try a lower learning rate or a longer "
            "warm-up, or go back to a checkpoint before it"
        )
    return snapshot


def first_not_finite(snapshot: Snapshot) -> str | None:
    """The name of a tensor that has numbers which are not finite, if there is one.

    A single number may be infinite: optimizers keep such, as the best loss before the first. What
    is in padding does not matter.
    """
    index = snapshot.index
    for piece, array in snapshot.pieces:
        if not jnp.issubdtype(array.dtype, np.inexact):
            continue
        numbers = array.reshape(-1)
        bad = np.flatnonzero(~np.isfinite(numbers))
        if bad.size == 0:
            continue
        if piece.of == "tensor":
            tensor = index.tensors[piece.number]
            if _are_wrong(tensor, numbers):
                return tensor.name
            continue
        places = _buffer_positions(index, piece, bad)
        for tensor in index.tensors:
            if tensor.buffer == piece.number:
                is_of = (places >= tensor.start) & (places < tensor.start + tensor.size)
                if is_of.any() and _are_wrong(tensor, numbers[bad[is_of]]):
                    return tensor.name
    return None


def _are_wrong(tensor: Tensor, numbers: NDArray[Any]) -> bool:
    """Whether numbers that are not all finite are wrong in this tensor."""
    return tensor.size > 1 or bool(np.isnan(numbers).any())


def _buffer_positions(index: Index, piece: Piece, elements: NDArray[np.intp]) -> NDArray[np.intp]:
    """Where elements of a piece are in its buffer."""
    buffer = index.buffers[piece.number]
    mine = np.flatnonzero(np.array(buffer.owner) == piece.rank)
    places: NDArray[np.intp] = mine[elements // buffer.chunk_size] * buffer.chunk_size
    return places + elements % buffer.chunk_size
