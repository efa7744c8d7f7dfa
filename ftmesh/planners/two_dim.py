"""`two_dim`: along x then along y for one half of the payload, y then x for the other, at once.

The paper's figures 4 and 5. Along an axis that wraps, rows (or columns) are rings, and half of each
half runs backwards, so that both directions of every link are used. Along one that does not, a
ring would have to fold back over its own links, with hops of two; sums flow along the line to
their owners instead, from both ends, which takes as many rounds and single hops.
"""

from __future__ import annotations

import numpy as np

from ftmesh.errors import PlanError
from ftmesh.mesh.topology import Topology
from ftmesh.planners.scatter import all_reduce, along_lines, along_rings
from ftmesh.schedule.columns import join
from ftmesh.schedule.schedule import Schedule


def plan(topology: Topology) -> Schedule:
    """Two halves of the payload, each reduce-scattered along one axis and then the other.

    Where one side is a multiple of the other, a step along the short side is spread over as many
    rounds, so that both halves move pieces of one size in every round.
    """
    if len(topology.shape) != 2 or min(topology.shape) < 2:
        raise PlanError(
            f"it works on meshes of two axes, of 2 {topology.noun}s or more each, not on "
            f"{topology.name}"
        )
    if topology.failed or topology.failed_links:
        raise PlanError("it needs every row and column whole, and the mesh is damaged")
    ranks = np.array([topology.rank(c) for c in np.ndindex(topology.shape)], np.int32)
    ranks = ranks.reshape(topology.shape)
    short, long = sorted(topology.shape)
    spread = long // short if long % short == 0 else 1
    strands = [+1, -1] if any(topology.wrap) else [+1]
    chips = topology.num_live
    num_chunks = 2 * len(strands) * chips
    owner = np.empty(num_chunks, np.int32)
    first, second = [], []
    for half, axes in enumerate([(0, 1), (1, 0)]):
        along, across = (along_rings if topology.wrap[axis] else along_lines for axis in axes)
        grid = ranks.transpose(axes)
        for strand, direction in enumerate(strands):
            part = half * len(strands) + strand
            grid = grid[::direction, ::direction]
            columns, owned = along(
                grid.T,
                lane=2 * part,
                first_chunk=part * chips,
                count=grid.shape[1],
                rounds_per_step=spread if grid.shape[0] == short else 1,
            )
            first.append(columns)
            columns, owned = across(grid, lane=2 * part, first_chunk=owned[0])
            second.append(columns)
            owner[owned] = grid
    halves = [("x first and y first", join(first)), ("y next and x next", join(second))]
    return all_reduce(topology, "two_dim", num_chunks, halves, owner)
