"""`multi_ring`: several edge-disjoint rings through every chip of a torus, at once.

On k axes, k Hamiltonian circuits, each run in both directions with an equal part of the payload,
use all 2k links of every chip in every round. The rings along each axis are joined to one circuit.
An axis that does not wrap, or has two chips, adds none; the circuits of the others pass along it.
"""

from __future__ import annotations

from ftmesh.algorithms.building_blocks import bidirectional_rings
from ftmesh.errors import PlanError
from ftmesh.schedule.schedule import Schedule
from ftmesh.topology.circuits import axis_links, join_circuits, wrapping_axes
from ftmesh.topology.topology import Topology


def build_schedule(topology: Topology) -> Schedule:
    """Return the schedule with one circuit, both ways round, for each axis that wraps."""
    axes = wrapping_axes(topology)
    if len(axes) < 2:
        raise PlanError(
            f"it needs two axes or more that wrap, of 3 {topology.noun}s or more each, and of "
            f"{topology.name} {'one' if axes else 'none'} wraps"
        )
    if topology.failed or topology.failed_links:
        raise PlanError(
            f"its circuits use every link of every {topology.noun}, and the mesh is damaged"
        )
    circuits = join_circuits(topology, [axis_links(topology, axis) for axis in axes])
    name = f"{len(axes)} circuits"
    return bidirectional_rings(topology, circuits, algorithm="multi_ring", name=name)
