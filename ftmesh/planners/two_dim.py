"""`two_dim`: along x then along y for one half of the payload, y then x for the other, at once.

The paper's figures 4 and 5. Both phases run on rings along single rows and columns. On a line
without wrap links such a ring is folded, which takes hops of two and uses each direction of every
link once; on a line that wraps, half of each half runs backwards, for the same reason.
"""

from __future__ import annotations

import numpy as np

from ftmesh.planners.rings import all_reduce, fold, reduce_scatter
from ftmesh.schedule import Schedule, join
from ftmesh.topology import Topology


def refusal(topology: Topology) -> str | None:
    """Why `two_dim` cannot serve `topology`; None where it can."""
    if len(topology.shape) != 2 or min(topology.shape) < 2:
        return f"it needs a 2-D mesh with sides of 2 or more, not {topology.name}"
    if topology.failed or topology.failed_links:
        return "it needs every row and column whole, and the mesh is damaged"
    return None


def plan(topology: Topology) -> Schedule:
    """Two halves of the payload, each reduce-scattered along one axis and then the other.

    Where one side is a multiple of the other, a step along the short side is spread over as many
    rounds, so that both halves move pieces of one size in every round.
    """
    place_of = np.array([topology.rank(c) for c in np.ndindex(topology.shape)], np.int32)
    ranks = place_of.reshape(topology.shape)
    short, long = sorted(topology.shape)
    spread = long // short if long % short == 0 else 1
    strands = [+1, -1] if any(topology.wrap) else [+1]
    chips = topology.num_live
    num_chunks = 2 * len(strands) * chips
    owner = np.empty(num_chunks, np.int32)
    first, second = [], []
    for half, axes in enumerate([(0, 1), (1, 0)]):
        along, across = (topology.shape[axis] for axis in axes)
        grid = ranks.transpose(axes)[fold(along, wraps=topology.wrap[axes[0]])]
        grid = grid[:, fold(across, wraps=topology.wrap[axes[1]])]
        for strand, direction in enumerate(strands):
            lane = half * len(strands) + strand
            rings = grid[::direction, ::direction]
            columns, owned = reduce_scatter(
                rings.T,
                lane=lane,
                first_chunk=lane * chips,
                count=across,
                rounds_per_step=spread if along < across else 1,
            )
            first.append(columns)
            columns, owned = reduce_scatter(rings, lane=lane, first_chunk=owned[0])
            second.append(columns)
            owner[owned] = rings
    halves = [("x rings and y rings", join(first)), ("y rings and x rings", join(second))]
    return all_reduce(topology, "two_dim", num_chunks, halves, owner)
