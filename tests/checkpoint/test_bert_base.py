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
from ftmesh.testing import cpu_grid
from tests.support.device_memory import PeakMemory
from tests.support.more import more

BASE = PRESETS["base"]
TYPES = jax.eval_shape(partial(init, make_model(BASE), seed=0))


def stored_and_full_types(parallel, **options):
    """Return the types of the optimizer's state with their shardings, and before sharding."""
    transformation = make_optimizer(BASE, lambda step: 1e-3)
    optimizer = parallel.optimizer(transformation, **options)
    specs = optimizer.specs(TYPES)
    first = parallel.jit(optimizer.init, in_specs=(REPLICATED,), out_specs=specs)
    return parallel.with_shardings(first.eval_shape(TYPES), specs), optimizer.full_types(TYPES)


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


def assemble(state, full_types):
    """Return the tensors of a sharded state."""
    leaves = zip(*map(jax.tree.leaves, (state, full_types)), strict=True)
    return [np.asarray(x).reshape(-1)[: t.size].reshape(t.shape) for x, t in leaves]


OTHERS = {
    "64": ("8x8", None, {}, {}),
    "56": ("8x8", "4x2@2,2", {"algorithm": "row_pair"}, {"min_size": 2**20}),
    "32": ("4x8", None, {"algorithm": "ring"}, {"order": range(len(jax.tree.leaves(TYPES)))[::-1]}),
}


@more
@pytest.mark.slow
def test_from_60_ranks_to_others_bit_for_bit(tmp_path, monkeypatch):
    sixty = DataParallel.create(cpu_grid("8x8", failed="2x2@2,2"), "row_pair")
    types, full_types = stored_and_full_types(sixty)
    params = random_like(TYPES, seed=1)
    state = {"params": params, "optimizer": random_like(types)}
    assert sum(x.size for x in jax.tree.leaves(params)) > 109e6

    peak = PeakMemory()
    monkeypatch.setattr(snapshot, "_copy_to_host", peak.wrap(snapshot._copy_to_host))
    with Checkpoints(tmp_path) as checkpoints:
        full = {"params": None, "optimizer": full_types}
        checkpoints.save(5, state, full_types=full, devices=sixty.live_devices)
    peak.update()
    assert len(peak.before) == 60
    assert peak.growth <= 1.2

    expected = assemble(state["optimizer"], full_types)
    assert len(expected) == 2 * len(jax.tree.leaves(params)) + 2
    del state

    with Checkpoints(tmp_path, resume=True) as checkpoints:
        like = {"params": TYPES, "optimizer": None}
        for shape, failed, plan_options, options in OTHERS.values():
            parallel = DataParallel.create(cpu_grid(shape, failed=failed), **plan_options)
            like["optimizer"], full_types = stored_and_full_types(parallel, **options)
            full = {"params": None, "optimizer": full_types}
            step, restored = checkpoints.restore(like, full_types=full)
            assert step == 5
            assert (
                jax.tree.leaves(restored["optimizer"])[1].sharding.mesh.size == parallel.num_ranks
            )
            compare(assemble(restored["optimizer"], full_types), expected)
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
