"""An optimizer whose state is made of the parameters, so that what it should be is known.

On every kind of ranks: emulated or devices, some of them idle, two to a chip, whole or sharded.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.common.data_parallel import Parallel
from examples.common.device_arrays import WHOLE
from ftmesh import Topology
from ftmesh.optim import ShardedOptimizer
from ftmesh.testing import cpu_grid


class Memory(NamedTuple):
    count: Any
    same: Any
    half: Any
    best: Any


def remember():
    def init(params):
        half = jax.tree.map(lambda x: x if jnp.iscomplexobj(x) else x.astype(jnp.bfloat16), params)
        return Memory(jnp.int32(7), params, half, jnp.float32(jnp.inf))

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


def remember_apart(params):
    """Some tensors in one state, the others in another."""
    labels = {name: "odd" if "k" in name else "even" for name in params}
    return optax.multi_transform({"odd": remember(), "even": remember()}, labels)


def parameters(seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    return {
        "kernel": normal(13, 7),
        "tiles": normal(40, 256),
        "conv k": normal(3, 3, 8, 128),
        "bias": normal(300),
        "one": normal(1),
        "scalar": normal(),
        "empty k": normal(0, 3),
        "half": normal(9, 5).astype(jnp.bfloat16),
        "small k": normal(11).astype(np.float16),
        "count": rng.integers(-100, 100, (3, 2), np.int32),
        "wave": (normal(4) + 1j * normal(4)).astype(np.complex64),
        "last": normal(5, 128, 3),
    }


HOLE = {"failed": "2x2@0,0"}
SETTINGS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "row_pair on devices": (
        partial(cpu_grid, "4x4", **HOLE),
        {"algorithm": "row_pair"},
        {"bucket_bytes": 2000},
    ),
    "ring in another order": (
        partial(Topology.grid, "4x4", **HOLE),
        {"algorithm": "ring"},
        {"order": range(12)[::-1], "bucket_bytes": 9999},
    ),
    "idle on devices": (partial(cpu_grid, "4x4", failed="2x2@2,2"), {"with_idle": True}, {}),
    "two to a chip": (
        partial(Topology, (4, 2), (False, False), devices_per_chip=2),
        {},
        {},
    ),
    "more chips": (partial(Topology.grid, "8x8", failed="4x2@2,2"), {}, {}),
    "whole": (partial(Topology.grid, "4x4", **HOLE), {}, {"sharded": False}),
}


class Held(NamedTuple):
    """A state, and what `Checkpoints.save` is told of it."""

    state: Any
    layouts: Any
    devices: Any


def held(setting, params, transformation):
    """The first state."""
    topology, on, options = SETTINGS[setting]
    parallel = Parallel.on(topology(), **on)
    optimizer = parallel.optimizer(transformation, **options)
    init = parallel.jit(optimizer.init, in_specs=(WHOLE,), out_specs=optimizer.specs(params))
    layouts = [optimizer.layout(params)] if isinstance(optimizer, ShardedOptimizer) else []
    return Held(init(parallel.put(params)), layouts, parallel.live_devices)


def bits(array):
    return np.asarray(array).tobytes()


def assert_same_bits(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        assert one.dtype == other.dtype, path
        assert one.shape == other.shape, path
        assert bits(one) == bits(other), path
