"""Sharded optimizers against the same ones unsharded, and the memory they take."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from on_devices import without_halves
from updates import (
    FEW,
    OPTIMIZERS,
    PARAMS,
    STEPS,
    assert_close,
    at,
    gradients,
    one_step,
    unsharded,
)

import ftmesh
from ftmesh import ArgumentError, CollectiveError, Topology
from ftmesh.optim.layerwise import squared_norms
from ftmesh.testing import cpu_grid, on_one_device
from ftmesh.train import ShardedOptimizer, lamb, lars

pytestmark = pytest.mark.usefixtures("quick_compiler")


@pytest.fixture(scope="module")
def damaged():
    """Sixty chips around a hole; twelve of them own nothing."""
    return ftmesh.plan(cpu_grid("8x8", failed="2x2@2,2"), "row_pair")


def sharded(optimizer, mesh, *, check_vma=True):
    specs = optimizer.specs(PARAMS)

    def step(grads, state, params):
        return optimizer.update(jax.tree.map(lambda g: g[0], grads), state, params)

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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sharded_and_unsharded_agree_on_a_damaged_mesh(damaged, name):
    optimizer = ShardedOptimizer(OPTIMIZERS[name], damaged, "data")
    params, state = sharded(optimizer, damaged.jax_mesh("data"), check_vma=name != "sgd")
    want_params, want_state = unsharded(OPTIMIZERS[name], PARAMS, 60)
    assert_close(params, want_params)
    for leaf in jax.tree.leaves(params):
        copies = {np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}
        assert len(copies) == 1, "chips off the rings must have the same weights"

    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(want_state) if np.ndim(leaf))
    owners = len(set(damaged.schedule.owner.tolist()))
    assert owners == 48
    each = state_bytes(state)
    assert len(each) == 60
    assert max(each.values()) <= 1.02 * whole / owners + 16  # and a few counters


def test_a_chip_that_owns_nothing_holds_nothing_but_padding(twelve):
    optimizer = ShardedOptimizer(optax.sgd(0.1, momentum=0.9), twelve, "data")
    run = on_one_device(lambda g: optimizer.update(g, optimizer.init(FEW), FEW)[1])
    momentum = run(gradients(FEW, 12, 0)).inner[0].trace["kernel"]
    for rank, shard in enumerate(momentum):
        assert (np.abs(shard).max() > 0) == (rank in twelve.schedule.owner)


def test_the_state_goes_on_with_another_plan(even, twelve):
    """A step on one plan, the next on one with other owners: as if nothing had happened."""
    adam = optax.adam(0.1)
    before, after = (ShardedOptimizer(adam, plan, "data") for plan in (even, twelve))

    def run(first, second):
        params, state = before.update(first, before.init(FEW), FEW)
        state = after.shard_state(before.gather_state(state, params), params)
        return after.update(second, state, params)[0]

    params = on_one_device(run)(*(gradients(FEW, 12, step) for step in range(2)))
    assert_close(at(4, params), unsharded(adam, FEW, 12, steps=2)[0])


def test_the_state_is_gathered_and_sharded_outside_too(even):
    optimizer = ShardedOptimizer(optax.sgd(0.1, momentum=0.9), even, "data")
    momentum = {"kernel": FEW["kernel"] + 1, "bias": FEW["bias"] - 1}
    whole = (optax.TraceState(trace=momentum), optax.EmptyState())
    state = optimizer.shard_state(whole, FEW)
    assert state_bytes(state)[even.topology.devices[5]] == (2 * 59 + 2 * 2) * 4
    jax.tree.map(np.testing.assert_array_equal, optimizer.gather_state(state, FEW), whole)


@pytest.mark.parametrize(("name", "sums"), [("sgd", 0), ("adam", 0), ("lars", 1), ("lamb", 2)])
def test_norms_take_one_small_sum(damaged, name, sums):
    """LARS and LAMB one for all their norms, and the clipping in front of LAMB another."""
    optimizer = ShardedOptimizer(OPTIMIZERS[name], damaged, "data")
    specs = optimizer.specs(PARAMS)
    step = jax.shard_map(
        optimizer.update,
        mesh=damaged.jax_mesh("data"),
        in_specs=(P(), specs, P()),
        out_specs=(P(), specs),
        check_vma=False,
    )
    text = str(jax.make_jaxpr(step)(PARAMS, jax.eval_shape(optimizer.init, PARAMS), PARAMS))
    assert text.count("ftmesh_all_reduce[") == sums
    assert text.count("ftmesh_reduce_scatter[") == text.count("ftmesh_gather_invariant[") == 1


def test_padding_has_no_part_in_norms(twelve):
    """With eps 0 Adam divides zero by zero wherever there is padding; no weight may see it."""
    transformation = lamb(0.1, eps=0.0)
    params = one_step(ShardedOptimizer(transformation, twelve, "data"), 12)
    assert_close(params, unsharded(transformation, FEW, 12, steps=1)[0])


def test_norms_of_shards_alone_would_be_found_out(even, monkeypatch):
    """The fault that refusals and sums of norms are there to prevent, planted."""
    optimizer = ShardedOptimizer(lars(0.1, trust_coefficient=1.0), even, "data")
    monkeypatch.setattr(ShardedOptimizer, "_norms", lambda self, shapes: squared_norms)
    want, _ = unsharded(optimizer.transformation, FEW, 12, steps=1)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_close(one_step(optimizer, 12), want, rtol=1e-2)


def test_sums_and_what_is_summed_already(even):
    optimizer = ShardedOptimizer(optax.sgd(0.1), even, "data")
    total = jax.tree.map(lambda g: g.sum(axis=0), gradients(FEW, 12, 0))
    want = jax.tree.map(lambda p, g: p - np.float32(0.1) * g, FEW, total)
    assert_close(one_step(optimizer, 12, reduce="sum"), want)
    run = on_one_device(
        lambda _: optimizer.update(total, optimizer.init(FEW), FEW, reduce="none")[0]
    )
    assert_close(at(0, run(np.arange(12))), want)
    with pytest.raises(ArgumentError, match="reduce is 'mean', 'sum' or 'none', not 'max'"):
        one_step(optimizer, 12, reduce="max")


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
    optimizer = ShardedOptimizer(optax.sgd(0.5), even, "data")

    def run(rank):
        grads = jax.tree.map(lambda p: jnp.full_like(p, rank), params)
        return optimizer.update(grads, optimizer.init(params), params, reduce="sum")[0]

    new = on_one_device(run)(np.arange(12))
    for name, leaf in new.items():
        assert leaf.dtype == params[name].dtype
        assert (leaf == 1 - 66 / 2).all()


def test_idle_devices_give_nothing_and_get_the_weights():
    plan = ftmesh.plan(cpu_grid("4x4", failed="2x2@0,0"), "ring", with_idle=True)
    optimizer = ShardedOptimizer(optax.sgd(0.1), plan, "data")
    grads, live = gradients(FEW, 16, 0), plan.program.live
    new = on_one_device(lambda g: optimizer.update(g, optimizer.init(FEW), FEW)[0])(grads)
    want = jax.tree.map(lambda p, g: p - np.float32(0.1) * g[live].mean(axis=0), FEW, grads)
    for rank in range(16):
        assert_close(at(rank, new), want)


class TestRefusals:
    def test_a_state_of_other_owners(self, even, twelve):
        ours, other = (ShardedOptimizer(optax.adam(0.1), plan, "data") for plan in (even, twelve))

        def step(make):
            run = on_one_device(lambda g: ours.update(g, make(FEW), FEW)[0])
            return jax.eval_shape(run, gradients(FEW, 12, 0))

        step(ours.init)
        for state in (other.init, ours.transformation.init):
            with pytest.raises(ArgumentError, match="not sharded for the owners of this plan"):
                step(state)

    def test_a_schedule_without_owners(self, twelve):
        nobody = dataclasses.replace(twelve, schedule=without_halves(twelve.schedule))
        with pytest.raises(CollectiveError, match="'row_pair' has no reduce-scatter half, so nobo"):
            ShardedOptimizer(optax.adam(0.1), nobody, "data")

    def test_gradients_that_jax_has_summed(self, even):
        optimizer = ShardedOptimizer(optax.sgd(0.1), even, "data")
        step = jax.shard_map(
            lambda params: optimizer.update(params, optimizer.init(params), params)[0],
            mesh=even.jax_mesh("data"),
            in_specs=P(),
            out_specs=P(),
        )
        with pytest.raises(CollectiveError, match="is the same on every device already"):
            jax.eval_shape(step, FEW)

    def test_other_gradients_than_parameters(self, even):
        optimizer = ShardedOptimizer(optax.sgd(0.1), even, "data")
        with pytest.raises(ArgumentError, match="the structure and shapes of the parameters"):
            on_one_device(lambda g: optimizer.update(g, optimizer.init(FEW), FEW)[0])(
                {"kernel": np.zeros((12, 3))}
            )
