"""`ring`: one Hamiltonian circuit through every live chip, run in both directions at once.

The paper's figures 3 and 8. How the circuit is found: `ftmesh.topology.hamiltonian`.
"""

from __future__ import annotations

from ftmesh.algorithms.building_blocks import bidirectional_rings
from ftmesh.schedule.schedule import Schedule
from ftmesh.topology.hamiltonian import find_circuit
from ftmesh.topology.topology import Topology


def build_schedule(topology: Topology) -> Schedule:
    """Return the schedule with half of the payload each way round the circuit."""
    circuit = find_circuit(topology)
    return bidirectional_rings(topology, [circuit], algorithm="ring", name="Hamiltonian ring")
