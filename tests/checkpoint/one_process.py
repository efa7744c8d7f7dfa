"""One of several real processes: saves its part of a state, and restores its part of all.

python one_process.py PORT PROCESS NUMBER FOLDER
"""

import sys
import time

import jax
import numpy as np

from examples.common.data_parallel import Parallel
from examples.common.device_arrays import WHOLE
from ftmesh import Topology
from ftmesh.checkpoint.checkpoints import Checkpoints
from tests.support.known_state import bits, parameters, remember


def main(port, process, number, folder):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", int(number), int(process))
    devices = jax.devices()
    parallel = Parallel.on(Topology.from_devices(devices, shape=f"{len(devices) // 2}x2"), "ring")
    optimizer = parallel.optimizer(remember())
    whole = jax.NamedSharding(parallel.mesh, WHOLE)
    params = {
        name: jax.make_array_from_callback(x.shape, whole, lambda at, x=x: np.asarray(x[at]))
        for name, x in parameters().items()
    }
    init = parallel.jit(optimizer.init, in_specs=(WHOLE,), out_specs=optimizer.specs(params))
    state, layouts = init(params), [optimizer.layout(params)]
    with Checkpoints(folder, resume=True) as checkpoints:
        checkpoints.save(3, state, layouts=layouts, devices=parallel.live_devices)
    with Checkpoints(folder, resume=True) as checkpoints:
        until = time.monotonic() + 60
        while checkpoints.latest_step is None and time.monotonic() < until:
            time.sleep(0.05)  # the others write, too
        step, found = checkpoints.restore(state, layouts=layouts)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        for a, b in zip(one.addressable_shards, other.addressable_shards, strict=True):
            assert a.device == b.device
            assert bits(a.data) == bits(b.data)
    print(f"process {process} has restored step {step}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
