"""Equal: whether what must be the same on every chip is, and which chips differ.

    check_equal(state.params, topology, cluster=cluster)  # () where all is well

Four bytes leave each device: a digest of its own copy, made there.

Digests: 32 bits that stand for an array, made where it lies.

Equal arrays have equal digests; one element that differs always changes them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ftmesh.distributed.process_group import ALONE, Cluster
from ftmesh.errors import ArgumentError, TopologyError
from ftmesh.health.findings import minority
from ftmesh.topology.notation import Coord
from ftmesh.topology.topology import Topology


def check_equal(
    tree: Any, topology: Topology, *, cluster: Cluster = ALONE, limit: float | None = None
) -> tuple[Coord, ...]:
    """The live chips whose copy of `tree` is not, bit for bit, that of most; all, if none is.

    Its arrays are replicated over a mesh that `topology` has given. The same comes back in every
    process. All of them take part, each when it comes to this, within `limit` seconds.
    """
    arrays = jax.tree.leaves(tree)
    if not topology.devices:
        raise TopologyError(f"{topology} has no devices: all of its ranks have one copy")
    if not arrays:
        return ()
    digests = _program(_mesh_of(arrays))(arrays)
    cluster = cluster.on(topology)
    coords = topology.wires.coords
    each = topology.wires.devices_per_chip
    index_of = {device: index for index, device in enumerate(topology.devices)}
    own = {
        index_of[shard.device]: int(np.asarray(shard.data)[0])
        for shard in digests.addressable_shards
        if shard.device in index_of  # idle devices may have anything
    }
    told = cluster.gather([*own.items()], "digests of what is equal", limit=limit)
    found = minority({index: value for rows in told.values() for index, value in rows})
    return tuple(dict.fromkeys(coords[index // each] for index in sorted(found)))


def _mesh_of(arrays: list[Any]) -> Mesh:
    """The mesh that all of the arrays are replicated over."""
    for array in arrays:
        sharding = getattr(array, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not sharding.is_fully_replicated:
            raise ArgumentError(
                f"an array of shape {np.shape(array)} lies as {sharding}: only what is replicated "
                "over a mesh, as NamedSharding(mesh, PartitionSpec()), can be the same everywhere"
            )
    meshes = {array.sharding.mesh for array in arrays}
    if len(meshes) > 1:
        raise ArgumentError("the arrays lie on different meshes: check those of one at a time")
    mesh: Mesh = meshes.pop()
    return mesh


@lru_cache(maxsize=16)
def _program(mesh: Mesh) -> Any:
    """The digest of every device's own copy, side by side."""
    names = PartitionSpec(mesh.axis_names)
    return jax.jit(
        jax.shard_map(
            lambda arrays: digest_of_tree(arrays)[None],
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=names,
            check_vma=False,
        )
    )


_MIX, _OTHER_MIX = np.uint32(2654435761), np.uint32(2246822519)  # odd
_UINTS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def digest(array: Any) -> jax.Array:
    """The digest of an array, of whatever dtype, for use inside a program."""
    return _summed(jnp, _words(array))


def digest_of_words(words: Any) -> np.uint32:
    """The same of uint32 in NumPy."""
    return np.uint32(_summed(np, words))


def digest_of_tree(tree: Any) -> jax.Array:
    """The digest of all arrays of a tree together."""
    leaves = [digest(leaf) for leaf in jax.tree.leaves(tree)]
    return _summed(jnp, jnp.stack(leaves)) if leaves else jnp.zeros((), jnp.uint32)


def _words(array: Any) -> Any:
    """The bits of an array as a row of uint32; what is narrower is widened, not packed."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag])
    narrow = _UINTS[min(array.dtype.itemsize, 4)]
    return jax.lax.bitcast_convert_type(array, narrow).astype(jnp.uint32).reshape(-1)


def _summed(xp: Any, words: Any) -> Any:
    """The sum of words that are stirred, each differently by its index.

    Stirring is one to one, so that no change of one word leaves the sum as it was; a sum of words
    times odd numbers would not see two signs that change.
    """
    mixed = words ^ xp.arange(len(words), dtype=xp.uint32) * _MIX
    for shift, factor in ((16, _MIX), (13, _OTHER_MIX)):
        mixed = (mixed ^ mixed >> np.uint32(shift)) * factor
    return (mixed ^ mixed >> np.uint32(16)).sum(dtype=xp.uint32)
