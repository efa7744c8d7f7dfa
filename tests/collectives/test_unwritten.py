"""All-gathers begin with a buffer of anything, of which nothing may be left."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import Topology
from ftmesh.collectives.reduce_scatter import gather_rows
from ftmesh.testing import shard_map_on_one_device
from tests.support.on_devices import per_rank, plan_on_cpu
from tests.support.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compiler")

# On which every rank owns as much as every other.
EVEN = {"ring": ("4x4", "2x2@2,2"), "row_pair": ("4x4", None), "two_dim": ("4x4", None)}


@pytest.fixture
def poison(monkeypatch):
    """On CPU JAX has zeros for anything; here it is what no sum is. Counts how often it is used."""
    used = []

    def poisoned(shape, dtype):
        used.append(shape)
        worst = jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max
        return jnp.full(shape, worst, dtype)

    monkeypatch.setattr(lax, "empty", poisoned)
    return used


@pytest.mark.parametrize("algorithm", ["ring", *map(slow, ("row_pair", "two_dim"))])
def test_gather_overwrites_all_of_the_buffer(poison, algorithm):
    plan = plan_on_cpu(algorithm, *EVEN[algorithm])
    ranks = plan.program.num_ranks
    x = np.random.default_rng(0).integers(-99, 99, (ranks, 4099)).astype(np.float32)
    x = {"float32": x, "bfloat16": x.astype(jnp.bfloat16)}

    def both(x):
        return gather_rows(x, "data", plan=plan), plan.all_gather(x, "data")

    for result in per_rank(plan, lambda x: jax.tree.map(both, x), x).values():
        for gathered in result:
            np.testing.assert_array_equal(gathered, np.tile(x["float32"], (ranks, 1, 1)))
    assert poison


def test_integers_and_derivatives(poison):
    plan = plan_on_cpu("ring", "4x4", "2x2@0,0")
    counts = np.arange(12 * 500, dtype=np.int32).reshape(12, 500)
    gathered = per_rank(plan, lambda x: plan.all_gather(x, "data"), counts)
    np.testing.assert_array_equal(gathered, np.tile(counts, (12, 1, 1)))

    def slope(x):
        return jax.grad(lambda x: (plan.all_gather(x, "data") ** 2).sum())(x)

    x = np.random.default_rng(1).normal(size=(12, 300)).astype(np.float32)
    np.testing.assert_allclose(per_rank(plan, slope, x), 2 * 12 * x, rtol=1e-5)
    assert poison


@pytest.mark.parametrize("failed", ["4x2@6,14", slow("2x2@0,0;4x2@6,14")])
def test_on_five_hundred_ranks(poison, failed):
    plan = ftmesh.plan(Topology.grid("16x32", failed=failed), "ring")
    ranks = plan.topology.num_live
    x = np.random.default_rng(2).integers(-9, 9, (ranks, 11)).astype(np.float32)

    def gather(x):
        return gather_rows(x[0], "data", plan=plan)[None]

    every = shard_map_on_one_device(
        gather, num_ranks=ranks, axis_name="data", in_specs=P("data"), out_specs=P("data")
    )
    np.testing.assert_array_equal(jax.jit(every)(x), np.tile(x, (ranks, 1, 1)))
    assert poison


def test_sharded_optimizer_has_the_same_bits(poison, monkeypatch):
    optax = pytest.importorskip("optax")
    plan = plan_on_cpu("ring", "4x4", "2x2@2,2")
    params = {"w": np.ones((130, 40), np.float32), "b": np.ones(7, np.float32)}
    grads = jax.tree.map(
        lambda leaf: np.random.default_rng(3).normal(size=(12, *leaf.shape)).astype("f"), params
    )
    optimizer = plan.shard(optax.adam(1e-2), "data")

    def step(grads):
        state = optimizer.init(params)
        updates, _ = optimizer.update(grads, state, params)
        return updates

    result = per_rank(plan, step, grads, check_vma=False)
    assert poison
    monkeypatch.undo()
    jax.tree.map(
        np.testing.assert_array_equal, result, per_rank(plan, step, grads, check_vma=False)
    )


def test_poison_is_visible(poison):
    """These tests would fail if an all-gather left something out."""
    plan = plan_on_cpu("ring", "4x4", "2x2@2,2")
    program = plan.with_reduce_scatter.program
    shorter = tuple(replace(loop, num_rounds=loop.num_rounds - 1) for loop in program.all_gather)
    plan.with_reduce_scatter.__dict__["program"] = replace(program, all_gather=shorter)
    x = np.ones((12, 4096), np.float32)
    result = per_rank(plan, lambda x: gather_rows(x, "data", plan=plan), x, check_vma=False)
    assert np.isnan(result).any(axis=(1, 2)).all()
    assert poison
