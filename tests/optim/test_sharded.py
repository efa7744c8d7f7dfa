"""Sharded optimizers against the same ones unsharded, and the memory they take."""

import dataclasses
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import ArgumentError, CollectiveError, Topology
from ftmesh.optim import ShardedOptimizer, lamb, lars
from ftmesh.testing import cpu_grid, on_one_device
from tests.support.on_devices import without_halves
from tests.support.updates import (
    FEW,
    OPTIMIZERS,
    PARAMS,
    STEPS,
    assert_close,
    at,
    gradients,
    one_step,
    stepped,
    unsharded,
)

pytestmark = pytest.mark.usefixtures("quick_compiler")
SIZE = sum(leaf.size for leaf in jax.tree.leaves(PARAMS))


@pytest.fixture(scope="module")
def damaged():
    """Sixty chips around a hole; twelve of them own nothing."""
    return ftmesh.plan(cpu_grid("8x8", failed="2x2@2,2"), "row_pair")


def sharded(optimizer, mesh, *, check_vma=True):
    specs = optimizer.specs(PARAMS)

    def step(grads, state, params):
        return stepped(optimizer, jax.tree.map(lambda g: g[0], grads), params, state)

    step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P("data"), specs, P()),
            out_specs=(P(), specs),
            check_vma=check_vma,
        )
    )
    params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    state = optimizer.init(PARAMS)
    for now in range(STEPS):
        params, state = step(gradients(PARAMS, mesh.size, now), state, params)
    return params, state


def state_bytes(state):
    """The bytes of a state on each device, as the arrays say."""
    on = {}
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            on[shard.device] = on.get(shard.device, 0) + shard.data.nbytes
    return on


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n != "adam")) for n in OPTIMIZERS],
)
def test_sharded_and_unsharded_agree_on_a_damaged_mesh(damaged, name):
    optimizer = ShardedOptimizer(OPTIMIZERS[name], damaged, "data")
    params, state = sharded(optimizer, damaged.jax_mesh("data"), check_vma=name != "sgd")
    want_params, want_state = unsharded(OPTIMIZERS[name], PARAMS, 60)
    assert_close(params, want_params)
    for leaf in jax.tree.leaves(params):
        copies = {np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}
        assert len(copies) == 1, "chips off the rings must have the same weights"

    layout, slots = optimizer.layout(PARAMS), len(state.rows)
    own = sum(math.prod(bucket.shape) for bucket in layout.buckets)
    each = state_bytes(state)
    assert len(each) == 60
    assert max(each.values()) <= slots * own * 4 + 48  # and a few counters
    assert slots == sum(leaf.size for leaf in jax.tree.leaves(want_state)) // SIZE


@pytest.mark.parametrize(("name", "slots"), [("sgd", 1), ("lamb", 2)])
def test_a_chip_keeps_one_part_in_as_many_as_there_are_owners(damaged, name, slots):
    """Of a model as large as they are; nothing is computed."""
    shapes = {f"layer {i}": (1024, 4096) for i in range(40)} | {"bias": (30522,)}
    params = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    optimizer = ShardedOptimizer(OPTIMIZERS[name], damaged, "data")
    whole = 4 * sum(map(math.prod, shapes.values()))
    owners = len(set(damaged.schedule.owner.tolist()))
    assert owners == 48
    layout, form = optimizer.layout(params), optimizer.form(params)
    assert len(form.dtypes) == slots
    own = 4 * sum(math.prod(bucket.shape) for bucket in layout.buckets)
    assert whole / owners <= own <= 1.02 * whole / owners


def test_a_chip_that_owns_nothing_holds_nothing_but_padding(twelve):
    optimizer = ShardedOptimizer(optax.sgd(0.1, momentum=0.9), twelve, "data")
    ((momentum,),) = on_one_device(lambda g: stepped(optimizer, g)[1])(gradients(FEW, 12, 0)).rows
    _, *chunk = optimizer.layout(FEW).buckets[0].packing.shape
    rows = momentum.reshape(12, -1, math.prod(chunk))
    for rank, chunks in enumerate(rows):
        owned = [chunk for chunk, owner in enumerate(twelve.schedule.owner) if owner == rank]
        assert not np.abs(chunks[len(owned) :]).any()
        assert len(owned) or not np.abs(chunks).any()
    assert np.abs(rows).max() > 0


def test_where_no_ring_fits_every_chip_keeps_an_equal_part():
    plan = ftmesh.plan(Topology.grid("4x4", failed="1x1@1,1;1x1@2,2"))
    assert np.bincount(plan.with_reduce_scatter.schedule.owner).tolist() == [2] * 14
    adam = OPTIMIZERS["adam"]
    optimizer = ShardedOptimizer(adam, plan, "data")
    assert_close(one_step(optimizer, 14), unsharded(adam, FEW, 14, steps=1)[0])


def test_the_state_goes_on_with_another_plan(even, twelve):
    """A step on one plan, the next on one with other owners: as if nothing had happened."""
    adam = optax.adam(0.1)
    before, after = (ShardedOptimizer(adam, plan, "data") for plan in (even, twelve))

    def run(first, second):
        params, state = stepped(before, first)
        state = after.shard_state(before.gather_state(state, params), params)
        return stepped(after, second, params, state)[0]

    params = on_one_device(run)(*(gradients(FEW, 12, step) for step in range(2)))
    assert_close(at(4, params), unsharded(adam, FEW, 12, steps=2)[0])


def test_the_state_is_gathered_and_sharded_outside_too(even):
    optimizer = ShardedOptimizer(optax.sgd(0.1, momentum=0.9), even, "data")
    momentum = {"kernel": FEW["kernel"] + 1, "bias": FEW["bias"] - 1}
    whole = (optax.TraceState(trace=momentum), optax.EmptyState())
    state = optimizer.shard_state(whole, FEW)
    packing = optimizer.layout(FEW).buckets[0].packing
    assert packing.shape == (24, 1, 61)  # 45 * 31 elements in 23 rows, and 31 in one
    assert state_bytes(state)[even.topology.devices[5]] == 2 * 61 * 4
    jax.tree.map(np.testing.assert_array_equal, optimizer.gather_state(state, FEW), whole)


@pytest.mark.parametrize(("name", "sums"), [("sgd", 0), ("adam", 0), ("lars", 1), ("lamb", 2)])
def test_norms_take_one_small_sum(damaged, name, sums):
    """LARS and LAMB one for all their norms, and the clipping in front of LAMB another."""
    optimizer = ShardedOptimizer(OPTIMIZERS[name], damaged, "data")
    specs = optimizer.specs(FEW)
    step = jax.shard_map(
        lambda grads, state, params: stepped(optimizer, grads, params, state),
        mesh=damaged.jax_mesh("data"),
        in_specs=(P(), specs, P()),
        out_specs=(P(), specs),
        check_vma=False,
    )
    text = str(jax.make_jaxpr(step)(FEW, jax.eval_shape(optimizer.init, FEW), FEW))
    assert text.count("ftmesh_all_reduce[") == sums
    assert text.count("ftmesh_reduce_scatter[") == text.count("ftmesh_gather_invariant[") == 1


def test_padding_has_no_part_in_norms(twelve):
    """With eps 0 Adam divides zero by zero wherever there is padding; no weight may see it."""
    transformation = lamb(0.1, eps=0.0)
    params = one_step(ShardedOptimizer(transformation, twelve, "data"), 12)
    assert_close(params, unsharded(transformation, FEW, 12, steps=1)[0])


def test_norms_of_shards_alone_would_be_found_out(even):
    """The fault that sums of norms over all ranks are there to prevent, planted."""
    transformation = lars(0.1, trust_coefficient=1.0)
    alone = SimpleNamespace(psum=lambda sums, axis_name: sums)
    optimizer = ShardedOptimizer(transformation, even, "data", norm_plan=alone)
    want, _ = unsharded(transformation, FEW, 12, steps=1)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_close(one_step(optimizer, 12), want, rtol=1e-2)


def test_sums_and_what_is_summed_already(even):
    total = jax.tree.map(lambda g: g.sum(axis=0), gradients(FEW, 12, 0))
    want = jax.tree.map(lambda p, g: p - np.float32(0.1) * g, FEW, total)
    summing = ShardedOptimizer(optax.sgd(0.1), even, "data", reduce="sum")
    assert_close(one_step(summing, 12), want)
    taking = ShardedOptimizer(optax.sgd(0.1), even, "data", reduce="none")
    run = on_one_device(lambda _: stepped(taking, total)[0])
    assert_close(at(0, run(np.arange(12))), want)
    with pytest.raises(ArgumentError, match="reduce is 'mean', 'sum' or 'none', not 'max'"):
        ShardedOptimizer(optax.sgd(0.1), even, "data", reduce="max")


def test_two_devices_per_chip():
    failed = frozenset({(0, 0), (1, 0), (0, 1), (1, 1)})
    topology = Topology((4, 4), (False, False), failed, devices_per_chip=2)
    optimizer = ShardedOptimizer(OPTIMIZERS["lars"], ftmesh.plan(topology, "ring"), "data")
    assert_close(one_step(optimizer, 24), unsharded(OPTIMIZERS["lars"], FEW, 24, steps=1)[0])


def test_bf16_on_the_wire_buckets_and_norms_on_a_plan_of_their_own(even, twelve):
    """A step of LARS is far smaller than its weights: what bf16 rounds off is hardly seen."""
    optimizer = ShardedOptimizer(
        lars(0.1), even, "data", wire_dtype=jnp.bfloat16, bucket_bytes=1000, norm_plan=twelve
    )
    assert_close(one_step(optimizer, 12), unsharded(lars(0.1), FEW, 12, steps=1)[0], rtol=2e-3)


def test_parameters_of_several_dtypes(even):
    params = {"wide": np.ones((9, 5), np.float32), "half": np.ones(77, jnp.bfloat16)}
    optimizer = ShardedOptimizer(optax.sgd(0.5), even, "data", reduce="sum")

    def run(rank):
        return stepped(optimizer, jax.tree.map(lambda p: jnp.full_like(p, rank), params), params)[0]

    new = on_one_device(run)(np.arange(12))
    for name, leaf in new.items():
        assert leaf.dtype == params[name].dtype
        assert (leaf == 1 - 66 / 2).all()


def test_idle_devices_give_nothing_and_get_the_weights():
    plan = ftmesh.plan(cpu_grid("4x4", failed="2x2@0,0"), "ring", with_idle=True)
    optimizer = ShardedOptimizer(optax.sgd(0.1), plan, "data")
    grads, live = gradients(FEW, 16, 0), plan.program.live
    new = on_one_device(lambda g: stepped(optimizer, g)[0])(grads)
    want = jax.tree.map(lambda p, g: p - np.float32(0.1) * g[live].mean(axis=0), FEW, grads)
    for rank in range(16):
        assert_close(at(rank, new), want)


def test_gradients_that_jax_has_summed_are_not_summed_again(even):
    """Those of replicated parameters, under check_vma=True: w = 1 and g = 1 on twelve ranks."""
    optimizer = ShardedOptimizer(optax.sgd(0.1), even, "data")
    ones = jax.tree.map(jnp.ones_like, FEW)

    def step(params, x):
        grads = jax.grad(lambda p: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(p)) * x[0])(params)
        return stepped(optimizer, grads, params)[0]

    step = jax.shard_map(step, mesh=even.jax_mesh("data"), in_specs=(P(), P("data")), out_specs=P())
    for leaf in jax.tree.leaves(jax.jit(step)(ones, jnp.full(12, 1 / 12))):
        np.testing.assert_allclose(leaf, 0.9, rtol=1e-6)


class TestRefusals:
    def test_a_state_of_other_owners(self, even, twelve):
        ours, other = (ShardedOptimizer(optax.adam(0.1), plan, "data") for plan in (even, twelve))

        def step(make):
            run = on_one_device(lambda g: stepped(ours, g, FEW, make(FEW))[0])
            return jax.eval_shape(run, gradients(FEW, 12, 0))

        step(ours.init)
        for state in (other.init, ours.work.transformation.init):
            with pytest.raises(ArgumentError, match="not sharded for the owners of this plan"):
                step(state)

    def test_a_schedule_without_owners(self, twelve):
        nobody = dataclasses.replace(twelve, schedule=without_halves(twelve.schedule))
        with pytest.raises(CollectiveError, match="'row_pair' has no reduce-scatter half, so nobo"):
            ShardedOptimizer(optax.adam(0.1), nobody, "data")

    def test_other_gradients_than_parameters(self, even):
        optimizer = ShardedOptimizer(optax.sgd(0.1), even, "data")
        with pytest.raises(ArgumentError, match="the structure and shapes of the parameters"):
            on_one_device(lambda g: stepped(optimizer, g)[0])({"kernel": np.zeros((12, 3))})
