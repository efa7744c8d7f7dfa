"""A sharded LAMB state on a damaged 4x4 mesh, and the tensors in it."""

from typing import Any, NamedTuple

import jax
import numpy as np

from examples.common.data_parallel import DataParallel
from examples.common.device_arrays import REPLICATED, SHARDED
from ftmesh.checkpoint.snapshot import Snapshotter
from ftmesh.checkpoint.storage import CheckpointReader, process_files
from ftmesh.optim import lamb
from ftmesh.testing import cpu_grid


class ShardedSetup(NamedTuple):
    parallel: Any
    like: Any  # the types of the state
    full_types: Any
    devices: Any


SHAPES = {"kernel": (13, 7), "tiles": (40, 64), "bias": (300,), "one": (1,), "last": (5, 9, 3)}


def sharded_setup(failed=""):
    """Set up LAMB on 4x4."""
    parallel = DataParallel.create(cpu_grid("4x4", failed=failed))
    optimizer = parallel.optimizer(lamb(0.1, weight_decay=0.01))
    params = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in SHAPES.items()}
    specs = optimizer.specs(params)
    first = parallel.jit(optimizer.init, in_specs=(REPLICATED,), out_specs=specs)
    like = parallel.with_shardings(first.eval_shape(params), specs)
    return ShardedSetup(parallel, like, optimizer.full_types(params), parallel.live_devices)


def random_state(setup, seed=1):
    """Return a random state."""
    rng = np.random.default_rng(seed)

    def filled(like):
        values = rng.normal(size=like.shape) * 100
        numbers = np.asarray(values).astype(like.dtype)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: numbers[index])

    return jax.tree.map(filled, setup.like)


def sharded_arrays(state):
    return [leaf for leaf in jax.tree.leaves(state) if leaf.sharding.spec == SHARDED]


def snapshot_files(setup, state, process_of=lambda device: 0, **options):
    """Return the files that every process writes of a state, by process."""
    files = {}
    for process in sorted(set(map(process_of, options.get("devices", setup.devices)))):
        snapshotter = Snapshotter(process, process_of, full_types=setup.full_types, **options)
        snapshot = snapshotter.snapshot(1, state)
        if process in snapshot.manifest.processes:
            part = process_files(snapshot.manifest, process, snapshot.pieces)
            files[process] = {name: b"".join(content) for name, content in part}
    return files


def read_tensors(files):
    """Return the bytes of every tensor by name."""
    saved = CheckpointReader({name: blob for own in files.values() for name, blob in own.items()})
    saved.check()
    return {tensor.name: saved.tensor(tensor.name).tobytes() for tensor in saved.manifest.tensors}


def tensor_bytes(setup, state):
    return read_tensors(snapshot_files(setup, state))


def spoil_devices(state, lost):
    """Return the state with other values on the `lost` devices."""

    def spoiled(array):
        parts = [
            jax.device_put(np.full(shard.data.shape, 77, array.dtype), shard.device)
            if shard.device in lost
            else shard.data
            for shard in array.addressable_shards
        ]
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)

    return jax.tree.map(spoiled, state)
