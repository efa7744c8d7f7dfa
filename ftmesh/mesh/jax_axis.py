"""The JAX mesh of a topology: one flat axis of devices, since a JAX mesh cannot have holes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ftmesh.errors import TopologyError
from ftmesh.mesh.topology import Topology


def jax_mesh(topology: Topology, axis_name: str, *, with_idle: bool = False) -> jax.sharding.Mesh:
    """See `ftmesh.Topology.jax_mesh`."""
    devices: tuple[Any, ...] = topology.all_devices if with_idle else topology.devices
    if not topology.devices:
        raise TopologyError(
            f"{topology} was not built from devices: use Topology.from_devices(jax.devices(), ...)"
        )
    if with_idle and len(devices) < topology.num_chips * topology.devices_per_chip:
        raise TopologyError(
            f"idle devices take part in the program, and only {len(devices)} of "
            f"{topology.num_chips * topology.devices_per_chip} devices of {topology.name} are there"
        )
    return jax.sharding.Mesh(np.array(devices), (axis_name,))
