"""`ring`: one Hamiltonian circuit through every live chip, run in both directions at once.

The paper's figures 3 and 8. How the circuit is found: `ftmesh.topology.hamiltonian`.
"""

from __future__ import annotations

from ftmesh.algorithms.building_blocks import bidirectional_rings, check_one_part
from ftmesh.errors import PlanError
from ftmesh.schedule.schedule import Schedule
from ftmesh.topology.hamiltonian import find_circuit
from ftmesh.topology.ring_order import ring_order
from ftmesh.topology.topology import Topology


def along_ring_order(topology: Topology) -> Schedule:
    """Return the schedule along `ring_order`, whose steps may be longer than one hop.

    Raises:
        PlanError: A step of the ring has no route that is clear of failures.
    """
    check_one_part(topology)
    order = ring_order(topology)
    if order.blocked:
        a, b = order.blocked[0]
        raise PlanError(
            f"the ring that XLA sums along has a step from {topology.noun} {a} to {b} whose route "
            "goes over a failure: plan with executor='ppermute', which stays clear of it"
        )
    return bidirectional_rings(topology, [[*order.coords]], algorithm="ring", name="ring of XLA")


def build_schedule(topology: Topology) -> Schedule:
    """Return the schedule with half of the payload each way round the circuit."""
    circuit = find_circuit(topology)
    return bidirectional_rings(topology, [circuit], algorithm="ring", name="Hamiltonian ring")
