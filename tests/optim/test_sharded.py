"""Sharded optimizers give the weights of unsharded ones, and use no more memory than expected."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import ArgumentError, Topology
from ftmesh.optim import ShardedOptimizer, lamb, lars
from ftmesh.optim.communication import Communication
from ftmesh.testing import cpu_grid, on_one_device
from tests.support.on_devices import without_reduce_scatter
from tests.support.updates import (
    OPTIMIZERS,
    PARAMS,
    SMALL_PARAMS,
    STEPS,
    apply_update,
    assert_close,
    gradients,
    params_after_step,
    take_rank,
    train_unsharded,
)

pytestmark = pytest.mark.usefixtures("quick_compiler")
SIZE = sum(leaf.size for leaf in jax.tree.leaves(PARAMS))


@pytest.fixture(scope="module")
def damaged():
    """Sixty chips around a hole."""
    return ftmesh.plan(cpu_grid("8x8", failed="2x2@2,2"), "ring")


def train_sharded(optimizer, mesh, *, check_vma=True):
    specs = optimizer.specs(PARAMS)

    def step(grads, state, params):
        return apply_update(optimizer, jax.tree.map(lambda g: g[0], grads), params, state)

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
    for i in range(STEPS):
        params, state = step(gradients(PARAMS, mesh.size, i), state, params)
    return params, state


def part_size(leaf):
    """Return how many elements each of sixty chips has: whole rows, if these are of 128 elements.

    Here that takes no more than a quarter of padding.
    """
    width = np.shape(leaf)[-1] if np.ndim(leaf) else 1
    unit = width if width % 128 == 0 else 1
    return math.ceil(np.size(leaf) / (60 * unit)) * unit


def counter_bytes(state):
    """Return the bytes of what belongs to no parameter."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.dtype == np.int32)


def state_bytes(state):
    """Return the bytes of a state on each device."""
    sizes = {}
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            sizes[shard.device] = sizes.get(shard.device, 0) + shard.data.nbytes
    return sizes


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n != "adam")) for n in OPTIMIZERS],
)
def test_sharded_and_unsharded_agree_on_a_damaged_mesh(damaged, name):
    optimizer = ShardedOptimizer(OPTIMIZERS[name], damaged, "data")
    params, state = train_sharded(optimizer, damaged.jax_mesh("data"), check_vma=name != "sgd")
    want_params, want_state = train_unsharded(OPTIMIZERS[name], PARAMS, 60)
    assert_close(params, want_params)
    for leaf in jax.tree.leaves(params):
        copies = {np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}
        assert len(copies) == 1, "all chips must have the same weights"
    slots = sum(leaf.size for leaf in jax.tree.leaves(want_state)) // SIZE
    own = sum(part_size(leaf) for leaf in jax.tree.leaves(PARAMS))
    sizes = state_bytes(state)
    assert len(sizes) == 60
    assert set(sizes.values()) == {slots * own * 4 + counter_bytes(want_state)}


@pytest.mark.parametrize(("name", "slots"), [("sgd", 1), ("lamb", 2)])
def test_a_chip_stores_one_part_in_as_many_as_there_are_chips(damaged, name, slots):
    """For a large model; nothing is computed. Matrices are cut by whole rows: 18 of 1,024."""
    shapes = {f"layer {i}": (1024, 4096) for i in range(40)} | {"bias": (30522,)}
    params = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    optimizer = ShardedOptimizer(OPTIMIZERS[name], damaged, "data")
    stored = jax.eval_shape(optimizer.init, params)
    own = sum(leaf.size // 60 for leaf in jax.tree.leaves(stored) if leaf.ndim)
    assert own == slots * (40 * 18 * 4096 + 509)


@pytest.mark.parametrize("algorithm", ["ring", "row_pair"])
def test_a_state_is_in_natural_order(algorithm):
    """Whatever fails and whatever the algorithm: each momentum is that of one device."""
    sgd = optax.sgd(0.1, momentum=0.9)
    plan = ftmesh.plan(cpu_grid("4x4", failed="2x2@2,2"), algorithm)
    optimizer, grads = plan.shard(sgd), jax.tree.map(lambda p: 7 * p + 1, SMALL_PARAMS)
    _, state = optimizer.update(grads, optimizer.init(SMALL_PARAMS), SMALL_PARAMS)
    _, want = sgd.update(grads, sgd.init(SMALL_PARAMS), SMALL_PARAMS)
    assert jax.tree.structure(state) == jax.tree.structure(want)
    for leaf, tensor in zip(*map(jax.tree.leaves, (state, want)), strict=True):
        assert leaf.shape == (-(-tensor.size // 12) * 12,)
        assert leaf.sharding == NamedSharding(plan.jax_mesh("data"), P("data"))
        np.testing.assert_array_equal(leaf[: tensor.size], tensor.reshape(-1))


def test_without_a_ring_every_chip_stores_an_equal_part():
    plan = ftmesh.plan(Topology.grid("4x4", failed="1x1@1,1;1x1@2,2"))
    assert np.bincount(plan.with_reduce_scatter.schedule.owner).tolist() == [2] * 14
    adam = OPTIMIZERS["adam"]
    optimizer = ShardedOptimizer(adam, plan, "data")
    assert_close(
        params_after_step(optimizer, 14), train_unsharded(adam, SMALL_PARAMS, 14, steps=1)[0]
    )


@pytest.mark.parametrize("is_gathered", [False, True])
def test_a_state_moves_to_another_plan(even, twelve, is_gathered):
    """One step on one plan and the next on another of as many ranks give the same weights."""
    adam = optax.adam(0.1)
    before, after = (ShardedOptimizer(adam, plan, "data") for plan in (even, twelve))

    def run(first, second):
        params, state = apply_update(before, first)
        if is_gathered:
            state = after.shard_state(before.gather_state(state, params), params)
        return apply_update(after, second, params, state)[0]

    params = on_one_device(run)(*(gradients(SMALL_PARAMS, 12, step) for step in range(2)))
    assert_close(take_rank(4, params), train_unsharded(adam, SMALL_PARAMS, 12, steps=2)[0])


def test_states_are_gathered_and_sharded_outside_shard_map(even):
    optimizer = ShardedOptimizer(optax.sgd(0.1, momentum=0.9), even, "data")
    momentum = {"kernel": SMALL_PARAMS["kernel"] + 1, "bias": SMALL_PARAMS["bias"] - 1}
    replicated = (optax.TraceState(trace=momentum), optax.EmptyState())
    state = optimizer.shard_state(replicated, SMALL_PARAMS)
    assert state_bytes(state)[even.topology.devices[5]] == (117 + 3) * 4  # of 45 * 31 and 31
    jax.tree.map(
        np.testing.assert_array_equal, optimizer.gather_state(state, SMALL_PARAMS), replicated
    )


def test_a_state_moves_to_another_number_of_chips(even):
    """Outside shard_map, from 12 chips to 15 and back."""
    adam = optax.adam(0.1)
    fifteen = ftmesh.plan(cpu_grid("4x4", failed="1x1@1,1"))
    params, state = SMALL_PARAMS, even.shard(adam).init(SMALL_PARAMS)
    want, want_state = SMALL_PARAMS, adam.init(SMALL_PARAMS)
    for plan in (even, fifteen, even):
        optimizer = plan.shard(adam)
        state = optimizer.shard_state(optimizer.gather_state(state, SMALL_PARAMS), SMALL_PARAMS)
        grads = jax.tree.map(jnp.sin, want)
        updates, state = optimizer.update(grads, state, jax.device_get(params))
        params = optax.apply_updates(jax.device_get(params), jax.device_get(updates))
        updates, want_state = adam.update(grads, want_state, want)
        want = optax.apply_updates(want, updates)
    assert_close(params, want)
    assert_close(even.shard(adam).gather_state(state, SMALL_PARAMS), want_state)


@pytest.mark.parametrize(("name", "sums"), [("sgd", 0), ("adam", 0), ("lars", 1), ("lamb", 2)])
def test_norms_take_one_small_all_reduce(damaged, name, sums):
    """LARS and LAMB need one for all their norms, and clipping before LAMB another."""
    optimizer = ShardedOptimizer(OPTIMIZERS[name], damaged, "data")
    specs = optimizer.specs(SMALL_PARAMS)
    step = jax.shard_map(
        lambda grads, state, params: apply_update(optimizer, grads, params, state),
        mesh=damaged.jax_mesh("data"),
        in_specs=(P(), specs, P()),
        out_specs=(P(), specs),
        check_vma=False,
    )
    text = str(
        jax.make_jaxpr(step)(
            SMALL_PARAMS, jax.eval_shape(optimizer.init, SMALL_PARAMS), SMALL_PARAMS
        )
    )
    assert text.count("ftmesh_all_reduce[") == sums
    assert text.count("ftmesh_reduce_scatter[") == text.count("ftmesh_all_gather_invariant[") == 1


def test_padding_does_not_enter_norms(twelve):
    """With eps 0 Adam divides zero by zero in the padding."""
    transformation = lamb(0.1, eps=0.0)
    params = params_after_step(ShardedOptimizer(transformation, twelve, "data"), 12)
    assert_close(params, train_unsharded(transformation, SMALL_PARAMS, 12, steps=1)[0])


def test_padding_of_whole_rows_does_not_enter_norms(even):
    """30 rows on twelve ranks, which divide its elements: three rows each, and six of padding."""
    params = {"w": np.random.default_rng(0).normal(size=(30, 128)).astype(np.float32)}
    grads = {"w": np.float32(1 + np.arange(12)[:, None, None] + np.abs(params["w"]))}  # not zero
    transformation = lamb(0.1, eps=0.0)
    optimizer = ShardedOptimizer(transformation, even, "data")
    run = on_one_device(lambda grads: apply_update(optimizer, grads, params)[0])
    mean = {"w": grads["w"].mean(axis=0)}
    updates, _ = transformation.update(mean, transformation.init(params), params)
    assert_close(take_rank(7, run(grads)), optax.apply_updates(params, updates))


def test_norms_of_shards_alone_give_other_weights(even, monkeypatch):
    """The tests above would notice if norms were not summed over all ranks."""
    monkeypatch.setattr(Communication, "sum_vectors", lambda self, _, vectors: vectors)
    transformation = lars(0.1, trust_coefficient=1.0)
    optimizer = ShardedOptimizer(transformation, even, "data")
    want, _ = train_unsharded(transformation, SMALL_PARAMS, 12, steps=1)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_close(params_after_step(optimizer, 12), want, rtol=1e-2)


def test_reduce_sum_and_none(even):
    total = jax.tree.map(lambda g: g.sum(axis=0), gradients(SMALL_PARAMS, 12, 0))
    want = jax.tree.map(lambda p, g: p - np.float32(0.1) * g, SMALL_PARAMS, total)
    summing = ShardedOptimizer(optax.sgd(0.1), even, "data", reduce="sum")
    assert_close(params_after_step(summing, 12), want)
    replicated = ShardedOptimizer(optax.sgd(0.1), even, "data", reduce="none")
    run = on_one_device(lambda _: apply_update(replicated, total)[0])
    assert_close(take_rank(0, run(np.arange(12))), want)
    with pytest.raises(ArgumentError, match="reduce must be 'mean', 'sum' or 'none', not 'max'"):
        ShardedOptimizer(optax.sgd(0.1), even, "data", reduce="max")


def test_two_devices_per_chip():
    failed = frozenset({(0, 0), (1, 0), (0, 1), (1, 1)})
    topology = Topology((4, 4), (False, False), failed, devices_per_chip=2)
    optimizer = ShardedOptimizer(OPTIMIZERS["lars"], ftmesh.plan(topology, "ring"), "data")
    assert_close(
        params_after_step(optimizer, 24),
        train_unsharded(OPTIMIZERS["lars"], SMALL_PARAMS, 24, steps=1)[0],
    )


def test_bf16_wire_small_buckets_and_a_norm_plan(even, twelve):
    """A step of LARS is far smaller than its weights, so the rounding to bf16 hardly shows."""
    optimizer = ShardedOptimizer(
        lars(0.1), even, "data", wire_dtype=jnp.bfloat16, bucket_bytes=1000, norm_plan=twelve
    )
    assert_close(
        params_after_step(optimizer, 12),
        train_unsharded(lars(0.1), SMALL_PARAMS, 12, steps=1)[0],
        rtol=2e-3,
    )


def test_parameters_of_several_dtypes(even):
    params = {"wide": np.ones((9, 5), np.float32), "half": np.ones(77, jnp.bfloat16)}
    optimizer = ShardedOptimizer(optax.sgd(0.5), even, "data", reduce="sum")

    def run(rank):
        return apply_update(
            optimizer, jax.tree.map(lambda p: jnp.full_like(p, rank), params), params
        )[0]

    new = on_one_device(run)(np.arange(12))
    for name, leaf in new.items():
        assert leaf.dtype == params[name].dtype
        assert (leaf == 1 - 66 / 2).all()


def test_numbers_of_the_state_keep_their_dtype(even):
    """They start in the parameters' narrowest dtype, and updates compute them in a wider one."""
    params = {"wide": jnp.ones((8, 4)), "half": jnp.ones((4, 8), jnp.bfloat16)}

    def train(tx):
        new, state = params, tx.init(params)
        for _ in range(2):
            updates, state = jax.jit(tx.update)(new, state, new)
            new = optax.apply_updates(new, updates)
        return jax.tree.map(np.float32, new)

    prodigy = optax.contrib.prodigy(0.1)
    assert_close(train(even.shard(prodigy)), train(prodigy), rtol=2e-2)


def test_idle_devices_contribute_nothing_and_get_the_weights():
    plan = ftmesh.plan(cpu_grid("4x4", failed="2x2@0,0"), "ring", with_idle=True)
    optimizer = ShardedOptimizer(optax.sgd(0.1), plan, "data")
    grads, live = gradients(SMALL_PARAMS, 16, 0), plan.program.live
    new = on_one_device(lambda g: apply_update(optimizer, g)[0])(grads)
    want = jax.tree.map(
        lambda p, g: p - np.float32(0.1) * g[live].mean(axis=0), SMALL_PARAMS, grads
    )
    for rank in range(16):
        assert_close(take_rank(rank, new), want)


def test_gradients_that_jax_has_summed_are_not_summed_again(even):
    """Gradients of replicated parameters under check_vma=True: w = 1 and g = 1 on twelve ranks."""
    optimizer = ShardedOptimizer(optax.sgd(0.1), even, "data")
    ones = jax.tree.map(jnp.ones_like, SMALL_PARAMS)

    def step(params, x):
        grads = jax.grad(lambda p: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(p)) * x[0])(params)
        return apply_update(optimizer, grads, params)[0]

    step = jax.shard_map(step, mesh=even.jax_mesh("data"), in_specs=(P(), P("data")), out_specs=P())
    for leaf in jax.tree.leaves(jax.jit(step)(ones, jnp.full(12, 1 / 12))):
        np.testing.assert_allclose(leaf, 0.9, rtol=1e-6)


def test_a_schedule_without_a_reduce_scatter(twelve):
    """The whole all-reduce runs, and each rank takes its part."""
    adam = OPTIMIZERS["adam"]
    nobody = dataclasses.replace(twelve, schedule=without_reduce_scatter(twelve.schedule))
    optimizer = ShardedOptimizer(adam, nobody, "data")
    want, _ = train_unsharded(adam, SMALL_PARAMS, 12, steps=1)
    assert_close(params_after_step(optimizer, 12), want)


class TestErrors:
    def test_a_state_that_is_not_sharded(self, even):
        ours = ShardedOptimizer(optax.adam(0.1), even, "data")

        def step(make):
            run = on_one_device(
                lambda g: apply_update(ours, g, SMALL_PARAMS, make(SMALL_PARAMS))[0]
            )
            return jax.eval_shape(run, gradients(SMALL_PARAMS, 12, 0))

        step(ours.init)
        with pytest.raises(ArgumentError, match="it is not sharded, or for another number of"):
            step(ours.transformation.init)

    def test_a_state_of_another_transformation(self, even):
        state = even.shard(optax.sgd(0.1)).init(SMALL_PARAMS)
        with pytest.raises(ArgumentError, match="is that of another transformation"):
            even.shard(optax.adam(0.1)).update(SMALL_PARAMS, state, SMALL_PARAMS)

    def test_a_state_of_other_parameters(self, even):
        optimizer = even.shard(optax.adam(0.1))
        state = optimizer.init({"kernel": np.ones((4, 100)), "bias": np.ones(31)})
        with pytest.raises(ArgumentError, match="does not store a tensor of shape"):
            optimizer.gather_state(state, SMALL_PARAMS)

    def test_other_gradients_than_parameters(self, even):
        optimizer = ShardedOptimizer(optax.sgd(0.1), even, "data")
        with pytest.raises(ArgumentError, match="the structure and shapes of the parameters"):
            on_one_device(lambda g: apply_update(optimizer, g)[0])({"kernel": np.zeros((12, 3))})
