"""`chain`: an all-reduce over single hops along chips in a line.

It works on meshes of one axis (1x8, 8x1 or 8) and wherever damage leaves every chip with at most
two neighbours. Along an open line, sums flow to their owners from both ends. Around a closed one,
half of the payload goes each way.
"""

from __future__ import annotations

import numpy as np

from ftmesh.algorithms import building_blocks as blocks
from ftmesh.errors import PlanError
from ftmesh.schedule.schedule import Schedule
from ftmesh.topology.notation import Coord
from ftmesh.topology.topology import Topology


def build_schedule(topology: Topology) -> Schedule:
    """Return the schedule along the line, or both ways round it if it closes."""
    if topology.num_live < 2:
        raise PlanError(f"a single {topology.noun} has nothing to sum")
    chips = line_order(topology)
    if len(topology.neighbours(chips[0])) == 2:
        return blocks.bidirectional_rings(topology, [chips], algorithm="chain", name="two-way ring")
    ranks = np.array([[topology.rank(coord) for coord in chips]], np.int32)
    transfers, _ = blocks.reduce_scatter_lines(ranks, lane=0, first_chunk=0)
    phases = [("chain", transfers)]
    return blocks.mirrored_all_reduce(topology, "chain", len(chips), phases, owner=ranks[0])


def line_order(topology: Topology) -> list[Coord]:
    """Return the live chips in order, from the end with the lower rank; if closed, from rank 0."""
    noun = topology.noun
    branching = [coord for coord in topology.coords if len(topology.neighbours(coord)) > 2]
    if branching:
        raise PlanError(
            f"it needs {noun}s in a line, each with at most two neighbours, and {noun} "
            f"{branching[0]} has {len(topology.neighbours(branching[0]))}"
        )
    ends = [coord for coord in topology.coords if len(topology.neighbours(coord)) < 2]
    chips = dict.fromkeys([*ends, *topology.coords][:1])
    while True:
        unvisited = [b for b in topology.neighbours(next(reversed(chips))) if b not in chips]
        if not unvisited:
            break
        chips[unvisited[0]] = None
    if len(chips) < topology.num_live:
        raise PlanError(f"its line ends after {len(chips)} of {topology.num_live} {noun}s")
    return list(chips)
