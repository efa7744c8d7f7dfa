"""Sum over all processes until the end, as a program without a controller does.

    python step_loop.py STEPS [PAUSE]

Prints "step N" after each; PAUSE is the time of a step in seconds. With SAVES it takes a second to
save something before an early exit.
"""

import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ftmesh.distributed import initialize


def save():
    """Take a second, as a checkpoint that is being written."""
    time.sleep(1)
    print("loop: saved", file=sys.stderr, flush=True)


def main(steps, pause=0.05):
    """Run the steps."""
    with initialize(name="loop", timeout=150) as group:
        if "SAVES" in os.environ:
            group.before_exit(save)
        mesh = Mesh(np.array(jax.devices()), "data")
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        x = jax.make_array_from_callback((mesh.size,), sharding, lambda i: np.ones(1, np.float32))
        total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))
        for step in range(int(steps)):
            assert total(x) == mesh.size
            print(f"step {step}", flush=True)
            time.sleep(float(pause))
        group.barrier("the end")


if __name__ == "__main__":
    main(*sys.argv[1:])
