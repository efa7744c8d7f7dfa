"""Partners: for every rank one of another host, as near as can be, that keeps a copy of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ftmesh.topology.topology import Topology

_FAR = 1_000_000  # more than any way on a mesh


def backup_ranks(topology: Topology, hosts: Sequence[int]) -> NDArray[np.int64] | None:
    """The partner of each rank, of which no two have the same; None where that cannot be.

    `hosts` are those of the ranks, in the order of `Topology.jax_mesh`. Together the ways are as
    short as can be; one host has no other, and a host with most of the chips finds too few.

    >>> backup_ranks(Topology.grid("2x1"), [0, 1]).tolist()
    [1, 0]
    """
    from scipy.optimize import linear_sum_assignment  # JAX brings it

    coords = np.repeat(np.array(topology.coords), topology.devices_per_chip, axis=0)
    off = np.abs(coords[:, None] - coords[None])
    sizes = np.array(topology.shape)
    off = np.where(topology.wrap, np.minimum(off, sizes - off), off)
    where = np.array(hosts)
    far = np.where(where[:, None] == where[None], _FAR, off.sum(-1))
    _, found = linear_sum_assignment(far)
    chosen: NDArray[np.int64] = found.astype(np.int64)
    return None if (where[chosen] == where).any() else chosen
