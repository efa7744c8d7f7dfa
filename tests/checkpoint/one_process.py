"""One of several processes: saves its part of a state, and restores its part of all.

python one_process.py PORT PROCESS NUMBER FOLDER
"""

import sys
import time

import jax
import numpy as np

from examples.common.data_parallel import DataParallel
from examples.common.device_arrays import REPLICATED
from ftmesh import Topology
from ftmesh.checkpoint.checkpoints import Checkpoints
from tests.support.known_state import make_params, raw_bytes, storing_optimizer


def main(port, process, number, folder):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", int(number), int(process))
    devices = jax.devices()
    parallel = DataParallel.create(
        Topology.from_devices(devices, shape=f"{len(devices) // 2}x2"), "ring"
    )
    optimizer = parallel.optimizer(storing_optimizer())
    replicated = jax.NamedSharding(parallel.mesh, REPLICATED)
    params = {
        name: jax.make_array_from_callback(x.shape, replicated, lambda i, x=x: np.asarray(x[i]))
        for name, x in make_params().items()
    }
    init = parallel.jit(optimizer.init, in_specs=(REPLICATED,), out_specs=optimizer.specs(params))
    state, full_types = init(params), optimizer.full_types(params)
    with Checkpoints(folder, resume=True) as checkpoints:
        checkpoints.save(3, state, full_types=full_types, devices=parallel.live_devices)
    with Checkpoints(folder, resume=True) as checkpoints:
        until = time.monotonic() + 60
        while checkpoints.latest_step is None and time.monotonic() < until:
            time.sleep(0.05)  # until the others have written
        step, restored = checkpoints.restore(state, full_types=full_types)
    for leaf, other in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        for a, b in zip(leaf.addressable_shards, other.addressable_shards, strict=True):
            assert a.device == b.device
            assert raw_bytes(a.data) == raw_bytes(b.data)
    print(f"process {process} has restored step {step}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
