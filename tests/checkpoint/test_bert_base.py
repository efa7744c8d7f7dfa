"""BERT-base with LAMB, sharded over 60 emulated devices, is saved and restored onto others.

Weights are on one device: sixty copies would not fit into the memory of a small machine.
"""

from functools import partial

import jax
import numpy as np
import pytest

from examples.bert.config import PRESETS
from examples.bert.model import init
from examples.bert.trainer import make_model, make_optimizer
from examples.common.data_parallel import DataParallel
from examples.common.device_arrays import REPLICATED
from ftmesh.checkpoint import snapshot
from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.layout.owned_buckets import Slot
from ftmesh.testing import cpu_grid
from tests.support.device_memory import PeakMemory
from tests.support.more import more

BASE = PRESETS["base"]
TYPES = jax.eval_shape(partial(init, make_model(BASE), seed=0))


def types_and_layout(parallel, **options):
    """Return the types of the optimizer's state with their shardings, and its layout."""
    transformation = make_optimizer(BASE, lambda step: 1e-3)
    optimizer = parallel.optimizer(transformation, **options)
    specs = optimizer.specs(TYPES)
    first = parallel.jit(optimizer.init, in_specs=(REPLICATED,), out_specs=specs)
    return parallel.with_shardings(first.eval_shape(TYPES), specs), optimizer.layout(TYPES)


def random_like(types, seed=0):
    """Return random arrays, padding included; replicas are equal."""

    def fill(number, type_):
        def part(window):
            rng = np.random.default_rng([seed, number, *(s.start or 0 for s in window)])
            shape = [len(range(*s.indices(n))) for s, n in zip(window, type_.shape, strict=True)]
            if type_.dtype == np.int32:
                return rng.integers(0, 1000, shape, np.int32)
            return rng.random(shape, np.float32)

        if type_.sharding is None:
            return jax.numpy.asarray(part(tuple(slice(None) for _ in type_.shape)))
        return jax.make_array_from_callback(type_.shape, type_.sharding, part)

    leaves, tree = jax.tree.flatten(types)
    return tree.unflatten([fill(i, type_) for i, type_ in enumerate(leaves)])


def assemble(state, layout):
    """Return the tensors of a sharded state, assembled from the table of owners alone."""
    rows = []
    for arrays in state.rows:
        tensors = {}
        for bucket, array in zip(layout.buckets, arrays, strict=True):
            chunks = np.zeros(
                (bucket.packing.num_chunks + 1, *bucket.packing.shape[1:]), np.float32
            )
            chunks[bucket.owned.reshape(-1)] = np.asarray(array).reshape(-1, *chunks.shape[1:])
            tensors |= zip(bucket.members, bucket.packing.unpack(chunks[:-1]), strict=True)
        rows.append(tensors)
    leaves = jax.tree.leaves(state.inner, is_leaf=lambda x: isinstance(x, Slot))
    return [rows[x.row][x.leaf] if isinstance(x, Slot) else np.asarray(x) for x in leaves]


OTHERS = {
    "64": ("8x8", None, {}, {}),
    "56": ("8x8", "4x2@2,2", {"algorithm": "row_pair"}, {"bucket_bytes": 32 * 2**20}),
    "32": ("4x8", None, {"algorithm": "ring"}, {"order": range(len(jax.tree.leaves(TYPES)))[::-1]}),
}


@more
@pytest.mark.slow
def test_from_60_ranks_to_others_bit_for_bit(tmp_path, monkeypatch):
    sixty = DataParallel.create(cpu_grid("8x8", failed="2x2@2,2"), "row_pair")
    types, layout = types_and_layout(sixty)
    params = random_like(TYPES, seed=1)
    state = {"params": params, "optimizer": random_like(types)}
    assert sum(x.size for x in jax.tree.leaves(params)) > 109e6

    peak = PeakMemory()
    monkeypatch.setattr(snapshot, "_copy_to_host", peak.wrap(snapshot._copy_to_host))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, state, layouts=[layout], devices=sixty.live_devices)
    peak.update()
    assert len(peak.before) == 60
    assert peak.growth <= 1.2

    expected = assemble(state["optimizer"], layout)
    assert len(expected) == 2 * len(jax.tree.leaves(params)) + 2
    del state

    with Checkpoints(tmp_path, resume=True) as checkpoints:
        like = {"params": TYPES, "optimizer": None}
        for shape, failed, plan_options, options in OTHERS.values():
            parallel = DataParallel.create(cpu_grid(shape, failed=failed), **plan_options)
            like["optimizer"], layout = types_and_layout(parallel, **options)
            step, restored = checkpoints.restore(like, layouts=[layout])
            assert step == 5
            assert restored["optimizer"].rows[0][0].sharding.mesh.size == parallel.num_ranks
            compare(assemble(restored["optimizer"], layout), expected)
            compare(jax.tree.leaves(restored["params"]), jax.tree.leaves(params))
            del restored
        replicated = make_optimizer(BASE, lambda step: 1e-3)
        like["optimizer"] = jax.eval_shape(replicated.init, TYPES)
        _, restored = checkpoints.restore(like)
        compare(jax.tree.leaves(restored["optimizer"]), expected)


def compare(arrays, expected):
    for array, other in zip(arrays, expected, strict=True):
        array, other = np.asarray(array), np.asarray(other)
        assert (array.shape, array.dtype) == (other.shape, other.dtype)
        assert np.array_equal(array.view(np.int32), other.view(np.int32))
