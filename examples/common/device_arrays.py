"""Move arrays between the host and the devices of a run."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from ftmesh.distributed.process_group import format_processes
from ftmesh.elastic.elastic_group import SINGLE_PROCESS, ElasticGroup
from ftmesh.errors import ClusterError
from ftmesh.layout.batch_shares import BatchShares
from ftmesh.topology.devices import process_of
from ftmesh.topology.ranks import Ranks

AXIS = "data"
REPLICATED, SHARDED = PartitionSpec(), PartitionSpec(AXIS)


@dataclass(frozen=True)
class DeviceArrays:
    """The devices along one mesh axis; without a mesh all ranks are emulated on one device."""

    ranks: Ranks
    mesh: Mesh | None
    axis_name: str = AXIS
    group: ElasticGroup = SINGLE_PROCESS

    @property
    def num_ranks(self) -> int:
        """Size of the axis, idle devices included."""
        return self.ranks.num_ranks

    @property
    def live_devices(self) -> tuple[Any, ...] | None:
        """The devices that are not idle; None if ranks are emulated."""
        return None if self.mesh is None else tuple(self.mesh.devices.flat[self.ranks.live])

    def put(self, tree: Any, spec: PartitionSpec = REPLICATED) -> Any:
        """Place a tree of host arrays on the devices, replicated or sharded by `spec`.

        Every process passes the same arrays; checksums are compared on the host.
        `jax.device_put` would compare them on the devices, failed ones included.
        """
        if self.mesh is None:
            return jax.device_put(tree)
        self._check_joined()
        host = jax.tree.map(np.asarray, tree)
        if not self.group.is_single_process:
            crc = 0
            for leaf in jax.tree.leaves(host):
                crc = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, crc)
            self.group.agree({"the arrays placed on the devices": f"{crc:08x}"})
        sharding = NamedSharding(self.mesh, spec)

        def put_leaf(leaf: Any) -> jax.Array:
            return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

        return jax.tree.map(put_leaf, host)

    def with_shardings(self, types: Any, specs: Any) -> Any:
        """Return `types` with the shardings of `specs`, a prefix of the tree."""

        def with_sharding(spec: PartitionSpec, part: Any) -> Any:
            sharding = self.mesh and NamedSharding(self.mesh, spec)
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part
            )

        is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
        return jax.tree.map(with_sharding, specs, types, is_leaf=is_spec)

    def local_rows(self, shares: BatchShares) -> NDArray[np.int64]:
        """Return the rows of a global batch that this process reads; -1 is padding."""
        return shares.positions()[self._own_ranks].reshape(-1)

    def feed(self, batch: Any) -> Any:
        """Turn the rows that this process has read into global arrays, sharded along the axis."""
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, batch)
        self._check_joined()
        sharding = NamedSharding(self.mesh, PartitionSpec(self.axis_name))
        own = self._own_ranks

        def feed_rows(rows: Any) -> jax.Array:
            per_rank = len(rows) // len(own)
            starts = {int(rank) * per_rank: i * per_rank for i, rank in enumerate(own)}

            def shard(index: tuple[slice, ...]) -> Any:
                start = starts[index[0].start or 0]
                return rows[start : start + per_rank]

            shape = (per_rank * self.num_ranks, *rows.shape[1:])
            return jax.make_array_from_callback(shape, sharding, shard)

        return jax.tree.map(feed_rows, batch)

    def local(self, value: jax.Array) -> jax.Array | None:
        """Return this process's copy of a replicated value; None if it has no live device."""
        if self.mesh is None:
            return value
        shards = {shard.device: shard.data for shard in value.addressable_shards}
        return next((shards[d] for d in self.live_devices or () if d in shards), None)

    @property
    def _own_ranks(self) -> NDArray[np.int64]:
        """The ranks of this process's devices, idle ones included."""
        if self.mesh is None:
            return np.arange(self.num_ranks)
        devices = self.mesh.devices.flat
        return np.flatnonzero([process_of(device) == self.group.process for device in devices])

    def _check_joined(self) -> None:
        """Raise if the mesh has devices of processes outside the group."""
        assert self.mesh is not None
        others = {process_of(device) for device in self.mesh.devices.flat} - {*self.group.members}
        if others:
            raise ClusterError(
                f"the mesh has devices of {format_processes(others)}, which are not in this one's "
                "group: give the group that ftmesh.elastic.initialize returns"
            )
