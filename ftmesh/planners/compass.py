"""Compass lanes: one for each direction of travel, ``2 * axis``, and one more if backwards.

Every link has one direction, so a lane is part of the same permutation in all rounds.
"""

from __future__ import annotations

import numpy as np

from ftmesh.mesh.topology import Topology
from ftmesh.schedule.columns import Ints


def compass_lanes(topology: Topology, src: Ints, dst: Ints) -> Ints:
    """The lane of each hop between neighbouring ranks; one over the edge goes on, not back."""
    coords = np.array(topology.coords)
    step = coords[dst] - coords[src]
    over_edge = abs(step) > 1
    backwards = np.where(over_edge, step > 0, step < 0).any(axis=1)
    axis = (step != 0).argmax(axis=1)
    lanes: Ints = (2 * axis + backwards).astype(np.int32)
    return lanes


def sources(topology: Topology) -> Ints:
    """The rank that each lane brings something from to each rank, ``[lane, rank]``.

    Where a lane has no link, that is `num_live`, which is no rank.

    >>> sources(Topology.grid("3")).tolist()
    [[3, 0, 1], [1, 2, 3]]
    """
    live = topology.num_live
    found = np.full((2 * len(topology.shape), live), live, np.int32)
    if topology.links:
        ends = [[topology.rank(a), topology.rank(b)] for a, b in topology.links]
        src, dst = np.array(ends, np.int32).T
        found[compass_lanes(topology, src, dst), dst] = src
    return found
