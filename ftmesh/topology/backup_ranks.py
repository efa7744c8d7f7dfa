"""Picks, for every rank, a nearby rank on another host that keeps a copy of its state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ftmesh.topology.topology import Topology

_SAME_HOST = 1_000_000  # hops: more than any route has


def backup_ranks(topology: Topology, hosts: Sequence[int]) -> NDArray[np.int64] | None:
    """Return a backup rank for each rank: on another host, no two alike, fewest hops in all.

    Args:
        topology: the mesh; distances ignore its failures.
        hosts: the host of each rank, in the order of `Topology.jax_mesh`.

    Returns:
        The backup of each rank, or None if there is no such assignment: with one host, or where
        one host has more than half of the chips.

    >>> backup_ranks(Topology.grid("2x1"), [0, 1]).tolist()
    [1, 0]
    """
    from scipy.optimize import linear_sum_assignment  # a dependency of JAX

    coords = np.repeat(np.array(topology.coords), topology.devices_per_chip, axis=0)
    offsets = np.abs(coords[:, None] - coords[None])
    sizes = np.array(topology.shape)
    offsets = np.where(topology.wrap, np.minimum(offsets, sizes - offsets), offsets)
    host = np.array(hosts)
    hops = np.where(host[:, None] == host[None], _SAME_HOST, offsets.sum(-1))
    _, assignment = linear_sum_assignment(hops)
    backups: NDArray[np.int64] = assignment.astype(np.int64)
    return None if (host[backups] == host).any() else backups
