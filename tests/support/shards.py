"""A sharded LAMB state on 4x4 with some chips failed, and the tensors in it."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from examples.common.data_parallel import Parallel
from examples.common.device_arrays import SPLIT, WHOLE
from ftmesh.checkpoint.reader import Saved
from ftmesh.checkpoint.snapshot import Copier
from ftmesh.checkpoint.writer import part_of
from ftmesh.optim import lamb
from ftmesh.testing import cpu_grid


class On(NamedTuple):
    """What there is on a mesh: how ranks run, what lies how, and how it is shared out."""

    parallel: Any
    like: Any  # the types of the state
    layouts: Any
    devices: Any


SHAPES = {"kernel": (13, 7), "tiles": (40, 64), "bias": (300,), "one": (1,), "last": (5, 9, 3)}


def sharded_on(failed="", partners=None):
    """On 4x4 less some blocks; with `partners`, the ranks have copies of each other's shards."""
    parallel = replace(Parallel.on(cpu_grid("4x4", failed=failed)), partners=partners)
    optimizer = parallel.optimizer(lamb(0.1, weight_decay=0.01), bucket_bytes=4000)
    params = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in SHAPES.items()}
    specs = optimizer.specs(params)
    first = parallel.jit(optimizer.init, in_specs=(WHOLE,), out_specs=specs)
    like = parallel.typed(first.eval_shape(params), specs)
    layouts = [optimizer.layout(params)]
    return On(parallel, like, layouts, parallel.live_devices)


def state_on(on, seed=1):
    """A state in which no two numbers need be the same, as after many steps; and its copies."""
    chance = np.random.default_rng(seed)

    def filled(like):
        values = chance.normal(size=like.shape) * 100
        numbers = np.asarray(values).astype(like.dtype)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda at: numbers[at])

    state = jax.tree.map(filled, on.like)
    if on.parallel.partners is None:
        return state, ()
    return state, on.parallel.jit(on.parallel.copies, in_specs=(SPLIT,), out_specs=SPLIT)(
        state.rows
    )


def given(on, state, process_of=lambda device: 0, **options):
    """The files of a state that each process gives, by its number; those that are left do."""
    files = {}
    for process in sorted(set(map(process_of, options.get("devices", on.devices)))):
        copier = Copier(process, process_of, layouts=on.layouts, **options)
        snapshot = copier.snapshot(1, state)
        if process in snapshot.index.processes:
            part = part_of(snapshot.index, process, snapshot.pieces)
            files[process] = {name: b"".join(content) for name, content in part}
    return files


def tensors_in(files):
    """Every tensor, whole, by its name."""
    saved = Saved({name: blob for own in files.values() for name, blob in own.items()})
    saved.check()
    return {tensor.name: saved.tensor(tensor.name).tobytes() for tensor in saved.index.tensors}


def tensors_of(on, state):
    return tensors_in(given(on, state))


def without(state, lost):
    """The same state, in which nothing is left of what some devices had."""

    def spoiled(array):
        parts = [
            jax.device_put(np.full(shard.data.shape, 77, array.dtype), shard.device)
            if shard.device in lost
            else shard.data
            for shard in array.addressable_shards
        ]
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)

    return jax.tree.map(spoiled, state)
