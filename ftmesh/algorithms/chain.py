"""`line`: chips in a row, each with at most two neighbours, summed over single hops.

A mesh of one side, 1x8 or 8x1 or 8, and whatever else damage leaves of a mesh that a walk can visit
without a choice. Along an open line sums flow to their owners from both ends; where the walk
closes, half of the payload goes round each way. A closed line that loses a chip or a link is an
open one, in the order of the walk.
"""

from __future__ import annotations

import numpy as np

from ftmesh.algorithms.building_blocks import mirrored_all_reduce, reduce_scatter_lines, bidirectional_rings
from ftmesh.errors import PlanError
from ftmesh.schedule.schedule import Schedule
from ftmesh.topology.notation import Coord
from ftmesh.topology.topology import Topology


def build_schedule(topology: Topology) -> Schedule:
    """The whole payload from both ends, or half of it each way where the line closes."""
    if topology.num_live < 2:
        raise PlanError(f"a single {topology.noun} has nothing to sum")
    chips = walk(topology)
    if len(topology.neighbours(chips[0])) == 2:
        return bidirectional_rings(topology, [chips], algorithm="chain", name="two-way ring")
    ranks = np.array([[topology.rank(coord) for coord in chips]], np.int32)
    columns, _ = reduce_scatter_lines(ranks, lane=0, first_chunk=0)
    return mirrored_all_reduce(topology, "chain", len(chips), [("chain", columns)], owner=ranks[0])


def walk(topology: Topology) -> list[Coord]:
    """The live chips in order, from the end of the lower rank; where there is none, from rank 0.

    >>> walk(Topology.grid("6", failed="1@2", wrap=True))
    [(1,), (0,), (5,), (4,), (3,)]
    """
    crossing = [coord for coord in topology.coords if len(topology.neighbours(coord)) > 2]
    if crossing:
        raise PlanError(
            f"it works on {topology.noun}s in a line, each with two neighbours at most, and "
            f"{topology.noun} "
            f"{crossing[0]} has {len(topology.neighbours(crossing[0]))}"
        )
    ends = [coord for coord in topology.coords if len(topology.neighbours(coord)) < 2]
    chips = dict.fromkeys([*ends, *topology.coords][:1])
    while True:
        onward = [b for b in topology.neighbours(next(reversed(chips))) if b not in chips]
        if not onward:
            break
        chips[onward[0]] = None
    if len(chips) < topology.num_live:
        raise PlanError(f"its line ends after {len(chips)} of {topology.num_live} {topology.noun}s")
    return list(chips)
