"""Checks that replicated arrays are bitwise the same on every chip.

Each device computes a 32-bit digest of its own copy, and only that leaves the device. Equal arrays
have equal digests; a difference in a single element always changes the digest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ftmesh.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from ftmesh.errors import ArgumentError, TopologyError
from ftmesh.topology.notation import Coord
from ftmesh.topology.topology import Topology

K = TypeVar("K", bound=Hashable)

_MULTIPLIERS = np.uint32(2654435761), np.uint32(2246822519)  # odd
_UINTS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def check_replicas(
    tree: Any,
    topology: Topology,
    *,
    group: ProcessGroup = SINGLE_PROCESS,
    timeout: float | None = None,
) -> tuple[Coord, ...]:
    """Return the live chips whose copy of `tree` differs from that of most chips.

    Args:
        tree: Arrays that are replicated over a mesh of `topology`.
        topology: A mesh with devices.
        group: The processes that take part. All must call this, and all get the same result.
        timeout: Seconds to wait for other processes; by default the group's.

    Returns:
        The coords of chips whose copy differs in any bit; all chips if there is no majority.

    Raises:
        TopologyError: The topology has no devices.
        ArgumentError: An array is not replicated, or the arrays are on different meshes.
    """
    arrays = jax.tree.leaves(tree)
    if not topology.devices:
        raise TopologyError(f"{topology} has no devices: there is only one copy to check")
    if not arrays:
        return ()
    digests = _program(_common_mesh(arrays))(arrays)
    coords, per_chip = topology.physical.coords, topology.physical.devices_per_chip
    index_of = {device: index for index, device in enumerate(topology.physical.devices)}
    mesh = {*_common_mesh(arrays).devices.flat}
    if missing := [device for device in topology.devices if device not in mesh]:
        raise ArgumentError(
            f"the arrays are not on {len(missing)} of the {len(topology.devices)} live devices of "
            f"{topology}, such as {missing[0]}: pass the topology of their mesh"
        )
    local = {
        index_of[shard.device]: int(np.asarray(shard.data)[0])
        for shard in digests.addressable_shards
        if shard.device in index_of  # idle devices may hold anything
    }
    group = group.for_topology(topology)
    by_process = group.gather([*local.items()], "digests of replicated arrays", timeout=timeout)
    outliers = find_outliers(dict(row for rows in by_process.values() for row in rows))
    return tuple(dict.fromkeys(coords[index // per_chip] for index in sorted(outliers)))


def find_outliers(values: Mapping[K, Hashable]) -> list[K]:
    """Return the keys whose value is not the most common one; all keys if there is a tie.

    >>> find_outliers({"a": 1, "b": 2, "c": 1}), find_outliers({"a": 1, "b": 2})
    (['b'], ['a', 'b'])
    """
    counts = Counter(values.values()).most_common(2)
    if len(counts) < 2:
        return []
    (common, count), (_, second_count) = counts
    return [key for key, value in values.items() if value != common or count == second_count]


def _common_mesh(arrays: list[Any]) -> Mesh:
    for array in arrays:
        sharding = getattr(array, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not sharding.is_fully_replicated:
            raise ArgumentError(
                f"an array of shape {np.shape(array)} has the sharding {sharding}: only arrays "
                "replicated over a mesh, by NamedSharding(mesh, PartitionSpec()), can be compared"
            )
    meshes = {array.sharding.mesh for array in arrays}
    if len(meshes) > 1:
        raise ArgumentError("the arrays are on different meshes: check one mesh at a time")
    mesh: Mesh = meshes.pop()
    return mesh


@lru_cache(maxsize=16)
def _program(mesh: Mesh) -> Any:
    """Build the program that returns the digest of every device's own copies."""

    def digest_all(arrays: list[Any]) -> jax.Array:
        return _sum_of_hashes(jnp, jnp.stack([digest(array) for array in arrays]))[None]

    specs: Any = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec(mesh.axis_names)}
    return jax.jit(jax.shard_map(digest_all, mesh=mesh, **specs, check_vma=False))


def digest(array: Any) -> jax.Array:
    """Compute the digest of an array of any dtype, inside a program."""
    return _sum_of_hashes(jnp, _as_words(array))


def digest_words(words: Any) -> np.uint32:
    """Compute the digest of a NumPy array of uint32."""
    return np.uint32(_sum_of_hashes(np, words))


def _as_words(array: Any) -> Any:
    """The bits of an array as a flat uint32 array; narrower elements are widened, not packed."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    if jax.dtypes.itemsize_bits(array.dtype) < 8:  # which as many bits of a wider type hold
        is_integer = jnp.issubdtype(array.dtype, jnp.integer)
        array = array.astype(jnp.int8 if is_integer else jnp.float32)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag])
    uint = _UINTS[min(array.dtype.itemsize, 4)]
    return jax.lax.bitcast_convert_type(array, uint).astype(jnp.uint32).reshape(-1)


def _sum_of_hashes(xp: Any, words: Any) -> Any:
    """Sum the words, each hashed together with its index.

    The hash is one to one, so a change of one word always changes the sum. A sum of words times odd
    numbers would miss two changes of sign.
    """
    hashed = words ^ xp.arange(len(words), dtype=xp.uint32) * _MULTIPLIERS[0]
    for shift, multiplier in zip((16, 13), _MULTIPLIERS, strict=True):
        hashed = (hashed ^ hashed >> np.uint32(shift)) * multiplier
    return (hashed ^ hashed >> np.uint32(16)).sum(dtype=xp.uint32)
