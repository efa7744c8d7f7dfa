"""A process of a pod that looks at its mesh, and at copies of which one chip's is wrong."""

import json

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ftmesh import jax_mesh
from ftmesh.distributed import initialize
from ftmesh.distributed.consensus import agreed_topology
from ftmesh.health.doctor import examine
from ftmesh.health.probe_programs import Probes
from ftmesh.health.replica_check import check_replicas
from ftmesh.testing.emulation import UnhealthySpec


def main():
    with initialize(timeout=60) as group:
        topology = agreed_topology(group)
        unhealthy = UnhealthySpec.parse("wrong@3,1;link-wrong@1,0-1,1;link-wrong@2,1-3,1", topology)
        probes = Probes(
            matrix_size=16,
            num_words=1 << 10,
            pattern_words=1 << 8,
            repeats=3,
            unhealthy=unhealthy,
        )
        found = examine(topology, group=group, probes=probes)
        sharding = NamedSharding(jax_mesh(topology, "data"), P())
        own = [d for d in topology.devices if d.process_index == group.process]
        chips = [topology.devices.index(device) for device in own]
        copies = [
            jax.device_put(np.arange(9) + (chip == 6), device)
            for chip, device in zip(chips, own, strict=True)
        ]
        array = jax.make_array_from_single_device_arrays((9,), sharding, copies)
        differ = check_replicas([array], topology, group=group)
        told = {**found.to_json(), "seconds": 0, "differ": differ}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
