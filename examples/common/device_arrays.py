"""Placed: the devices of a run, and how arrays of the host come to lie on them and back."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from ftmesh.distributed.process_group import ALONE, Cluster
from ftmesh.distributed.wording import processes
from ftmesh.errors import ClusterError
from ftmesh.layout.batch_shares import Shares
from ftmesh.topology.devices import process_of
from ftmesh.topology.ranks import Ranks

AXIS = "data"
WHOLE, SPLIT = PartitionSpec(), PartitionSpec(AXIS)  # at every rank; a part at each


@dataclass(frozen=True)
class Placed:
    """The ranks of one axis; without a mesh all of them are emulated on one device.

    `cluster` are the processes that have the devices.
    """

    ranks: Ranks
    mesh: Mesh | None
    axis_name: str = AXIS
    cluster: Cluster = ALONE

    @property
    def num_ranks(self) -> int:
        """Ranks of the axis, those of idle devices too."""
        return self.ranks.num_ranks

    @property
    def live_devices(self) -> tuple[Any, ...] | None:
        """Those that are not idle; None where ranks are emulated."""
        return None if self.mesh is None else tuple(self.mesh.devices.flat[self.ranks.live])

    def put(self, tree: Any, spec: PartitionSpec = WHOLE) -> Any:
        """Arrays onto the devices: all of them at each, or split as `spec` says.

        Every process has all of them, and the same. JAX's own way to place arrays would compare
        them on the devices, failed ones included.
        """
        if self.mesh is None:
            return jax.device_put(tree)
        self._check_joined()
        host = jax.tree.map(np.asarray, tree)
        if not self.cluster.is_alone:
            crc = 0
            for leaf in jax.tree.leaves(host):
                crc = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, crc)
            self.cluster.agree({"what is put on the devices": f"{crc:08x}"})
        sharding = NamedSharding(self.mesh, spec)

        def placed(leaf: Any) -> jax.Array:
            return jax.make_array_from_callback(leaf.shape, sharding, lambda at: leaf[at])

        return jax.tree.map(placed, host)

    def typed(self, tree: Any, specs: Any) -> Any:
        """The types of such arrays, lying on the devices as `specs`, a prefix of the tree, say."""

        def typed(spec: PartitionSpec, part: Any) -> Any:
            sharding = self.mesh and NamedSharding(self.mesh, spec)
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part
            )

        return jax.tree.map(typed, specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))

    def local_rows(self, shares: Shares) -> NDArray[np.int64]:
        """Which rows of a global batch the devices of this process have; -1 stands for padding."""
        return shares.positions()[self._own_ranks].reshape(-1)

    def feed(self, batch: Any) -> Any:
        """The rows that this process has read, as arrays that are split along the axis."""
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, batch)
        self._check_joined()
        split = NamedSharding(self.mesh, PartitionSpec(self.axis_name))
        own = self._own_ranks

        def fed(rows: Any) -> jax.Array:
            each = len(rows) // len(own)
            starts = {int(rank) * each: place * each for place, rank in enumerate(own)}

            def part(at: tuple[slice, ...]) -> Any:
                start = starts[at[0].start or 0]
                return rows[start : start + each]

            shape = (each * self.num_ranks, *rows.shape[1:])
            return jax.make_array_from_callback(shape, split, part)

        return jax.tree.map(fed, batch)

    def local(self, value: jax.Array) -> jax.Array | None:
        """What all live devices have, as one of this process has it; None where it has none."""
        if self.mesh is None:
            return value
        shards = {shard.device: shard.data for shard in value.addressable_shards}
        found = [shards[device] for device in self.live_devices or () if device in shards]
        return found[0] if found else None

    @property
    def _own_ranks(self) -> NDArray[np.int64]:
        """The ranks whose devices this process has, idle ones included."""
        if self.mesh is None:
            return np.arange(self.num_ranks)
        devices = self.mesh.devices.flat
        return np.flatnonzero([process_of(device) == self.cluster.process for device in devices])

    def _check_joined(self) -> None:
        """Refuse devices of processes that nobody has joined: their rows would be read here."""
        assert self.mesh is not None
        others = {process_of(device) for device in self.mesh.devices.flat} - {*self.cluster.members}
        if others:
            raise ClusterError(
                f"the mesh has devices of {processes(others)}, which this one has not joined: give "
                "the cluster that ftmesh.distributed.initialize.join returns"
            )
