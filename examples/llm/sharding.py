"""Weights are sharded along "fsdp" inside a replica, and gathered where a layer uses them.

mesh                          "data" x "fsdp"                 replicas are
make_mesh(topology, "2x2")    live tiles x chips of a tile    tiles of 2x2 chips (HSDP)
make_mesh(topology, "1x1")    live chips x 1                  chips (weights replicated)
make_mesh(topology, "all")    1 x live chips                  all live chips (FSDP)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh.errors import TopologyError
from ftmesh.topology.devices import process_of

EVERY_CHIP = "all"
ROWS = P(("data", "fsdp"))  # how a batch is cut


def replicas(topology: ftmesh.Topology, tile: str) -> ftmesh.TiledTopology:
    """Return the replicas of a tile each; "1x1" stands for a chip on any number of axes."""
    if set(tile.split("x")) == {"1"}:
        tile = "x".join("1" * len(topology.shape))
    return ftmesh.TiledTopology.from_topology(topology, tile)


def make_mesh(topology: ftmesh.Topology, tile: str) -> Mesh:
    """Return a mesh of axes "data" and "fsdp" over the live chips, or the live tiles, on a ring."""
    if tile == EVERY_CHIP:
        return Mesh(ftmesh.jax_mesh(topology, "fsdp").devices[None], ("data", "fsdp"))
    tiles = replicas(topology, tile)
    mesh = ftmesh.jax_mesh(tiles, ("data", "fsdp"))
    idle = {process_of(d) for d in topology.devices} - {process_of(d) for d in mesh.devices.flat}
    if idle:
        raise TopologyError(
            f"process {min(idle)} has live chips, and none in a live tile of {tile}: give replicas "
            "that fit into the chips of a host"
        )
    return mesh


@dataclass(frozen=True)
class Cuts:
    """Shards weights along "fsdp": one dimension each, padded with zeros to a multiple.

    The zeros get no gradient and stay zero; they do not affect elementwise optimizers and norms.
    """

    mesh: Mesh

    @property
    def parts(self) -> int:
        """Number of shards."""
        return int(self.mesh.shape["fsdp"])

    def dim(self, shape: tuple[int, ...]) -> int | None:
        """Return the dimension to shard: the largest that needs no padding, else the largest."""
        if len(shape) < 2 or self.parts == 1:
            return None
        sizes = [(size % self.parts == 0, size) for size in shape]
        return sizes.index(max(sizes))

    def spec(self, shape: tuple[int, ...]) -> P:
        """Return the spec of a weight of this shape, padded or not."""
        dim = self.dim(shape)
        return P() if dim is None else P(*[None] * dim, "fsdp")

    def pad(self, weight: jax.Array) -> jax.Array:
        """Append zeros along the sharded dimension."""
        dim = self.dim(weight.shape)
        missing = 0 if dim is None else -weight.shape[dim] % self.parts
        return jnp.pad(weight, [(0, missing * (i == dim)) for i in range(weight.ndim)])

    def unpad(self, weight: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return the weight of this shape, or its moment of an optimizer, without padding."""
        return weight[tuple(map(slice, shape))]

    def gather(self, weight: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Gather a weight of this shape in `dtype`; its gradient is sharded like the weight.

        It is cast before the gather, so that the network moves `dtype`.
        """
        cut, whole = NamedSharding(self.mesh, self.spec(shape)), NamedSharding(self.mesh, P())
        hold = jax.lax.with_sharding_constraint

        def gathered(weight: jax.Array) -> jax.Array:
            return hold(hold(weight.astype(dtype), cut), whole)

        def forward(weight: jax.Array) -> tuple[jax.Array, None]:
            return gathered(weight), None

        def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
            return (hold(gradient, cut).astype(weight.dtype),)

        gathering = jax.custom_vjp(gathered)
        gathering.defvjp(forward, backward)
        return self.unpad(gathering(weight), shape)

    def product(
        self,
        x: jax.Array,
        weight: jax.Array,
        shape: tuple[int, ...],
        dtype: Any,
        *,
        turned: bool = False,
    ) -> jax.Array:
        """Multiply `x` by a sharded weight of this shape, or by its transpose if it is `turned`.

        The weight's gradient is summed over all chips in the weight's dtype, though its factors
        have that of `x`. The gathered weight is kept for the backward pass: rematerialize the
        layer to gather it again instead.
        """
        order = "...i,...j->ji" if turned else "...i,...j->ij"
        stored = weight.dtype

        def forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, Any]:
            whole = self.gather(weight, shape, x.dtype)
            whole = whole.T if turned else whole
            return jnp.matmul(x, whole, preferred_element_type=dtype), (x, whole)

        def backward(kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
            x, whole = kept
            gradient = gradient.astype(x.dtype)  # times float32, it would be a slow product
            summed = jnp.einsum(order, x, gradient, preferred_element_type=stored)
            return gradient @ whole.T, self._cut(summed)

        multiplying = jax.custom_vjp(lambda x, weight: forward(x, weight)[0])
        multiplying.defvjp(forward, backward)
        return multiplying(x, weight)

    def look_up(
        self, weight: jax.Array, rows: jax.Array, shape: tuple[int, ...], dtype: Any
    ) -> jax.Array:
        """Return rows of a sharded weight of this shape; its gradient is summed in its dtype."""

        def take(weight: jax.Array) -> jax.Array:
            return self.gather(weight, shape, dtype)[rows]

        def forward(weight: jax.Array) -> tuple[jax.Array, None]:
            return take(weight), None

        def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
            summed = jnp.zeros(shape, weight.dtype).at[rows].add(gradient.astype(weight.dtype))
            return (self._cut(summed),)

        taking = jax.custom_vjp(take)
        taking.defvjp(forward, backward)
        return taking(weight)

    def _cut(self, gradient: jax.Array) -> jax.Array:
        """Pad and shard the gradient of a weight like the weight."""
        cut = NamedSharding(self.mesh, self.spec(gradient.shape))
        return jax.lax.with_sharding_constraint(self.pad(gradient), cut)

    def shardings(self, state: Any) -> Any:
        """Return the sharding of each array of a state; those of layers are stacked in a scan."""

        def sharding(path: Any, leaf: Any) -> NamedSharding:
            stacked = any(getattr(key, "key", None) == "layers" for key in path)
            spec = self.spec(leaf.shape[stacked:])
            return NamedSharding(self.mesh, P(None, *spec) if stacked else spec)

        return jax.tree_util.tree_map_with_path(sharding, state)

    @cached_property
    def rows(self) -> NamedSharding:
        """The sharding of a batch: each chip has its own rows."""
        return NamedSharding(self.mesh, ROWS)
