"""The data of the loops in this folder, and what they leave behind for the tests."""

import os
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ftmesh.elastic import StepSampler

WIDTH = 12
SAMPLER = StepSampler(96, 24, num_epochs=3, seed=1)
STEPS = len(SAMPLER)
_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(96, WIDTH)).astype(np.float32)
Y = np.tanh(X @ _RNG.normal(size=(WIDTH, 1))).astype(np.float32)


def batch(step, sharding):
    """The batch of a step; prints the examples that this process reads."""
    sampler = SAMPLER.for_sharding(sharding)
    rows = sampler[step]
    chips = sharding.mesh.size
    print(f"step {step} with {chips} chips reads {' '.join(map(str, rows))}", flush=True)
    return jax.make_array_from_process_local_data(sharding, (X[rows], Y[rows]))


def report(params):
    """Save the weights, which may be sharded over processes, in the folder OUT."""
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    params = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(params)
    paths = jax.tree_util.tree_leaves_with_path(params)
    weights = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in paths}
    np.savez(Path(os.environ["OUT"]) / f"{jax.process_index()}.npz", **weights)
