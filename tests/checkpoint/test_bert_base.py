"""BERT-base with LAMB, its state sharded over 60 emulated devices, through files onto others.

Weights are on one device: sixty copies would not fit into the memory of a small machine.
"""

from functools import partial

import jax
import numpy as np
import pytest

from examples.bert.config import PRESETS
from examples.bert.model import init
from examples.bert.steps import make_model, make_transformation
from examples.common.data_parallel import Parallel
from examples.common.device_arrays import WHOLE
from ftmesh.checkpoint import snapshot
from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.optim.state import Slot
from ftmesh.testing import cpu_grid
from tests.support.device_memory import Watch
from tests.support.more import more

BASE = PRESETS["base"]
TYPES = jax.eval_shape(partial(init, make_model(BASE), seed=0))


def types_and_layout(parallel, **options):
    """The types of the optimizer's state as it lies on the devices, and where everything is."""
    transformation = make_transformation(BASE, lambda step: 1e-3)
    optimizer = parallel.optimizer(transformation, **options)
    specs = optimizer.specs(TYPES)
    first = parallel.jit(optimizer.init, in_specs=(WHOLE,), out_specs=specs)
    return parallel.typed(first.eval_shape(TYPES), specs), optimizer.layout(TYPES)


def filled(types, seed=0):
    """Random numbers in every array, and in its padding; replicas have the same."""

    def fill(at, type_):
        def part(window):
            rng = np.random.default_rng([seed, at, *(s.start or 0 for s in window)])
            shape = [len(range(*s.indices(n))) for s, n in zip(window, type_.shape, strict=True)]
            if type_.dtype == np.int32:
                return rng.integers(0, 1000, shape, np.int32)
            return rng.random(shape, np.float32)

        if type_.sharding is None:
            return jax.numpy.asarray(part(tuple(slice(None) for _ in type_.shape)))
        return jax.make_array_from_callback(type_.shape, type_.sharding, part)

    leaves, tree = jax.tree.flatten(types)
    return tree.unflatten([fill(at, type_) for at, type_ in enumerate(leaves)])


def tensors(state, layout):
    """The tensors of a sharded state, put together by the table of owners alone."""
    rows = []
    for arrays in state.rows:
        found = {}
        for bucket, array in zip(layout.buckets, arrays, strict=True):
            chunks = np.zeros(
                (bucket.packing.num_chunks + 1, *bucket.packing.shape[1:]), np.float32
            )
            chunks[bucket.owned.reshape(-1)] = np.asarray(array).reshape(-1, *chunks.shape[1:])
            found |= zip(bucket.members, bucket.packing.unpack(chunks[:-1]), strict=True)
        rows.append(found)
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
    sixty = Parallel.on(cpu_grid("8x8", failed="2x2@2,2"), "row_pair")
    types, layout = types_and_layout(sixty)
    params = filled(TYPES, seed=1)
    state = {"params": params, "optimizer": filled(types)}
    assert sum(x.size for x in jax.tree.leaves(params)) > 109e6

    watch = Watch()
    monkeypatch.setattr(snapshot, "_on_host", watch.after(snapshot._on_host))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, state, layouts=[layout], devices=sixty.live_devices)
    watch.look()
    assert len(watch.before) == 60
    assert watch.growth <= 1.2

    wanted = tensors(state["optimizer"], layout)
    assert len(wanted) == 2 * len(jax.tree.leaves(params)) + 2
    del state

    with Checkpoints(tmp_path, resume=True) as checkpoints:
        like = {"params": TYPES, "optimizer": None}
        for shape, failed, on, options in OTHERS.values():
            parallel = Parallel.on(cpu_grid(shape, failed=failed), **on)
            like["optimizer"], layout = types_and_layout(parallel, **options)
            step, found = checkpoints.restore(like, layouts=[layout])
            assert step == 5
            assert found["optimizer"].rows[0][0].sharding.mesh.size == parallel.num_ranks
            compare(tensors(found["optimizer"], layout), wanted)
            compare(jax.tree.leaves(found["params"]), jax.tree.leaves(params))
            del found
        whole = make_transformation(BASE, lambda step: 1e-3)
        like["optimizer"] = jax.eval_shape(whole.init, TYPES)
        _, found = checkpoints.restore(like)
        compare(jax.tree.leaves(found["optimizer"]), wanted)


def compare(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert np.array_equal(one.view(np.int32), other.view(np.int32))
