"""`multi_ring`: several circuits through every chip of a torus at once, no two of which share a link.

A torus of k axes has 2k links at every chip: k Hamiltonian circuits, each run in both directions,
use all of them in every round. Each of the 2k directions carries as large a part of the payload.
The rings along an axis are cut and joined until they are one circuit (`ftmesh.algorithms.circuits`).
An axis that does not wrap, or has two chips, adds no circuit; those of the others lead along it.
"""

from __future__ import annotations

from ftmesh.algorithms.circuits import along, join_circuits, wrapping_axes
from ftmesh.algorithms.building_blocks import bidirectional_rings
from ftmesh.errors import PlanError
from ftmesh.schedule.schedule import Schedule
from ftmesh.topology.topology import Topology


def build_schedule(topology: Topology) -> Schedule:
    """A circuit for each axis that wraps, both ways round."""
    axes = wrapping_axes(topology)
    if len(axes) < 2:
        raise PlanError(
            f"it works where two axes or more, of 3 {topology.noun}s or more each, wrap, and of "
            f"{topology.name} {'one' if axes else 'none'} wraps"
        )
    if topology.failed or topology.failed_links:
        raise PlanError(
            f"it needs every link of a torus, since its circuits use up those of a {topology.noun},"
            " and the mesh is damaged"
        )
    circuits = join_circuits(topology, [along(topology, axis) for axis in axes])
    return bidirectional_rings(topology, circuits, algorithm="multi_ring", name=f"{len(axes)} circuits")
