"""An optimizer whose state is a copy of the parameters, in every placement.

Placements are emulated or on devices, with idle devices or two per chip, replicated or sharded.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.common.data_parallel import DataParallel
from examples.common.device_arrays import REPLICATED
from ftmesh import Topology
from ftmesh.optim import ShardedOptimizer
from ftmesh.testing import cpu_grid


class StoredParams(NamedTuple):
    count: Any
    same: Any
    half: Any
    best: Any


def storing_optimizer():
    def init(params):
        half = jax.tree.map(lambda x: x if jnp.iscomplexobj(x) else x.astype(jnp.bfloat16), params)
        return StoredParams(jnp.int32(7), params, half, jnp.float32(jnp.inf))

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


def two_group_storing_optimizer(params):
    """Return an optimizer that keeps some tensors in one state and the others in another."""
    labels = {name: "odd" if "k" in name else "even" for name in params}
    return optax.multi_transform({"odd": storing_optimizer(), "even": storing_optimizer()}, labels)


def make_params(seed=0):
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


DAMAGE = {"failed": "2x2@0,0"}
PLACEMENTS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "row_pair on devices": (
        partial(cpu_grid, "4x4", **DAMAGE),
        {"algorithm": "row_pair"},
        {"min_size": 40},
    ),
    "ring in another order": (
        partial(Topology.grid, "4x4", **DAMAGE),
        {"algorithm": "ring", "overlap": True, "bucket_bytes": 9999},
        {"order": range(12)[::-1]},
    ),
    "idle on devices": (partial(cpu_grid, "4x4", failed="2x2@2,2"), {"with_idle": True}, {}),
    "two to a chip": (
        partial(Topology, (4, 2), (False, False), devices_per_chip=2),
        {},
        {},
    ),
    "more chips": (partial(Topology.grid, "8x8", failed="4x2@2,2"), {}, {}),
    "replicated": (partial(Topology.grid, "4x4", **DAMAGE), {}, {"sharded": False}),
}


class StateToSave(NamedTuple):
    """A state and the arguments of `Checkpoints.save` that go with it."""

    state: Any
    full_types: Any
    devices: Any


def initial_state(placement, params, transformation):
    topology, plan_options, options = PLACEMENTS[placement]
    parallel = DataParallel.create(topology(), **plan_options)
    optimizer = parallel.optimizer(transformation, **options)
    init = parallel.jit(optimizer.init, in_specs=(REPLICATED,), out_specs=optimizer.specs(params))
    is_sharded = isinstance(optimizer, ShardedOptimizer)
    full_types = optimizer.full_types(params) if is_sharded else None
    return StateToSave(init(parallel.put(params)), full_types, parallel.live_devices)


def raw_bytes(array):
    return np.asarray(array).tobytes()


def assert_same_bits(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for (path, leaf), other in zip(
        jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(expected), strict=True
    ):
        assert leaf.dtype == other.dtype, path
        assert leaf.shape == other.shape, path
        assert raw_bytes(leaf) == raw_bytes(other), path
