"""Reducing gradients during the backward pass gives the same weights."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import ftmesh
from examples.common.data_parallel import DataParallel
from ftmesh import ArgumentError, Topology
from ftmesh.collectives import ReducedGradients
from ftmesh.optim import ShardedOptimizer
from ftmesh.testing import cpu_grid, on_one_device
from tests.support.updates import (
    OPTIMIZERS,
    SMALL_PARAMS,
    apply_update,
    assert_close,
    gradients,
    loss_with_gradients,
    params_after_step,
    take_rank,
    train_unsharded,
)

pytestmark = pytest.mark.usefixtures("quick_compiler")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in ("adam", "lamb")]
)
def test_overlap_gives_the_same_weights(twelve, name):
    optimizer = ShardedOptimizer(OPTIMIZERS[name], twelve, "data", overlap=True, bucket_bytes=1000)

    def run(grads):
        _, grads = optimizer.value_and_grad(loss_with_gradients(grads))(SMALL_PARAMS)
        return apply_update(optimizer, grads)[0]

    params = on_one_device(run)(gradients(SMALL_PARAMS, 12, 0))
    assert_close(
        take_rank(4, params), train_unsharded(OPTIMIZERS[name], SMALL_PARAMS, 12, steps=1)[0]
    )


@pytest.mark.parametrize(
    ("overlap", "check_vma"),
    [
        (True, True),
        (False, False),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_a_step_with_auxiliary_outputs(twelve, overlap, check_vma):
    optimizer = ShardedOptimizer(OPTIMIZERS["lars"], twelve, "data", overlap=overlap)
    specs = optimizer.specs(SMALL_PARAMS)

    def loss(params, grads):
        value = loss_with_gradients(jax.tree.map(lambda g: g[0], grads))(params)
        return value, value / 2

    def step(grads, state, params):
        (value, half), grads = optimizer.value_and_grad(loss, has_aux=True)(params, grads)
        params, state = apply_update(optimizer, grads, params, state)
        return params, state, (value - 2 * half)[None]

    step = jax.shard_map(
        step,
        mesh=twelve.jax_mesh("data"),
        in_specs=(P("data"), specs, P()),
        out_specs=(P(), specs, P("data")),
        check_vma=check_vma,
    )
    params, _, difference = jax.jit(step)(
        gradients(SMALL_PARAMS, 12, 0), optimizer.init(SMALL_PARAMS), SMALL_PARAMS
    )
    assert_close(params, train_unsharded(OPTIMIZERS["lars"], SMALL_PARAMS, 12, steps=1)[0])
    assert (difference == 0).all()


def test_a_mesh_with_another_axis():
    """Two models with weights of their own, which vary along that axis too."""
    plan = ftmesh.plan(Topology.grid("4x4", failed="2x2@0,0"), "ring")
    optimizer = ShardedOptimizer(optax.sgd(0.1), plan, "data", overlap=True)
    grads = gradients(SMALL_PARAMS, 24, 0)

    def step(grads, params):
        grads, params = (jax.tree.map(lambda x: x[0], tree) for tree in (grads, params))
        _, grads = optimizer.value_and_grad(loss_with_gradients(grads))(params)
        new, _ = apply_update(optimizer, grads, params)
        return jax.tree.map(lambda p: p[None], new)

    step = jax.shard_map(
        step,
        mesh=Mesh(np.array(jax.devices()[:24]).reshape(12, 2), ("data", "model")),
        in_specs=(P(("data", "model")), P("model")),
        out_specs=P("model"),
    )
    new = jax.jit(step)(grads, jax.tree.map(lambda p: np.stack([p, p]), SMALL_PARAMS))
    for model in range(2):
        mean = jax.tree.map(lambda g, m=model: g[m::2].sum(axis=0) / 12, grads)
        want = jax.tree.map(lambda p, g: p - np.float32(0.1) * g, SMALL_PARAMS, mean)
        assert_close(take_rank(model, new), want)


@pytest.mark.parametrize(("sharded", "num_phases"), [(True, 1), (False, 2)])
def test_dtypes_and_order_of_transfers(sharded, num_phases):
    """The program of a rank has 11 rounds for each phase, in both directions.

    Partial sums go through 11 additions, too many for bfloat16; results are sent in it.
    """
    topology = cpu_grid("4x4", failed="2x2@0,0")
    params = {"a": np.ones((40, 40), np.float32), "b": np.ones((40, 400), np.float32)}
    parallel = DataParallel.create(topology, "ring", overlap=True, bucket_bytes=1)

    def sizes(loss):
        types = params, jax.ShapeDtypeStruct((1, 40), np.float32)
        optimizer = parallel.optimizer(
            optax.sgd(0.1),
            sharded=sharded,
            wire_dtype=jnp.bfloat16,
            order=parallel.backward_order(lambda *args: (loss(*args), None), *types),
        )
        step = jax.shard_map(
            lambda params, x: jax.tree.leaves(optimizer.value_and_grad(loss)(params, x)[1]),
            mesh=parallel.mesh,
            in_specs=(P(), P("data")),
            out_specs=P("data"),
            check_vma=False,
        )
        text = jax.jit(step).lower(params, np.ones((12, 40), np.float32)).as_text()
        permuted = re.findall(r"collective_permute.*-> tensor<([\dx]+)x(\w+)>", text)
        assert len(permuted) == text.count("collective_permute") == 2 * num_phases * 2 * 11
        dtypes = ["f32"] * 22 + ["bf16"] * 22 * (num_phases - 1)
        assert [dtype for _, dtype in permuted] == dtypes * 2
        elements = [np.prod([int(n) for n in size.split("x")]) for size, _ in permuted]
        return elements[: len(elements) // 2], elements[len(elements) // 2 :]

    # The gradient of the second layer comes first.
    chained = sizes(lambda p, x: jnp.sum(jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) ** 2))
    assert min(chained[0]) > max(chained[1])
    chained = sizes(lambda p, x: jnp.sum(jnp.tanh(jnp.tanh(x @ p["b"]) @ p["b"].T @ p["a"])))
    assert min(chained[1]) > max(chained[0])


@pytest.mark.slow
def test_reduced_gradients_are_not_reduced_again(even, twelve):
    ours, other = (
        ShardedOptimizer(optax.sgd(0.1), plan, "data", overlap=True) for plan in (even, twelve)
    )
    fifteen = ftmesh.plan(Topology.grid("4x4", failed="1x1@1,1"))
    too_many = ShardedOptimizer(optax.sgd(0.1), fifteen, "data", overlap=True)
    want = params_after_step(ShardedOptimizer(optax.sgd(0.1), even, "data"), 12)
    assert_close(params_after_step(ours, 12), want)  # a rank's own gradients

    def step(maker, optimizer):
        def run(grads):
            _, grads = maker.value_and_grad(loss_with_gradients(grads))(SMALL_PARAMS)
            return apply_update(optimizer, grads)[0]

        return take_rank(7, on_one_device(run)(gradients(SMALL_PARAMS, 12, 0)))

    assert_close(step(ours, ours), want)
    assert_close(step(other, ours), want)
    parts = too_many.layout(SMALL_PARAMS).leaves
    zeros = [np.zeros((12, *leaf.own_shape), np.float32) for leaf in parts]
    run = on_one_device(lambda g: apply_update(ours, ReducedGradients(g, is_sharded=True)))
    with pytest.raises(ArgumentError, match="sharded for another plan"):
        run(zeros)
    plain = DataParallel.create(
        Topology.grid("4x4", failed="2x2@0,0"), "ring", overlap=True
    ).optimizer(optax.sgd(0.1), sharded=False)
    assert_close(step(plain, plain), want)
    assert_close(step(plain, ours), want)
    with pytest.raises(ArgumentError, match="are sharded, and this optimizer takes replicated"):
        step(ours, plain)


@pytest.mark.slow
def test_several_dtypes_idle_devices_and_unused_leaves():
    plan = ftmesh.plan(cpu_grid("4x4", failed="2x2@0,0"), "ring", with_idle=True)
    optimizer = ShardedOptimizer(optax.sgd(0.5), plan, "data", overlap=True)
    params = {"wide": np.ones((9, 5), np.float32), "half": np.ones(77, jnp.bfloat16),
              "unused": np.ones(3, np.float32)}  # fmt: skip

    def run(rank):
        def loss(params):
            return rank * (params["wide"].sum() + params["half"].sum().astype(jnp.float32))

        _, grads = optimizer.value_and_grad(loss)(params)
        return apply_update(optimizer, grads, params)[0]

    live = plan.program.live
    new = take_rank(live, on_one_device(run)(12 * np.arange(16, dtype=np.float32) % 24))
    assert (live % 2).sum() == 6
    assert (new["wide"] == 1 - 6 / 2).all()
    assert (new["half"] == 1 - 6 / 2).all()
    assert (new["unused"] == 1).all()


@pytest.mark.parametrize(("overlap", "buckets"), [(True, 2), (False, 1)])
def test_buckets_are_smaller_with_overlap(even, overlap, buckets):
    """For 40 MB in two leaves; nothing is computed."""
    optimizer = ShardedOptimizer(optax.sgd(0.1), even, "data", overlap=overlap)
    params = {name: jax.ShapeDtypeStruct((5_000_000,), np.float32) for name in "ab"}

    def step(params):
        _, grads = optimizer.value_and_grad(loss_with_gradients(params))(params)
        return apply_update(optimizer, grads, params)[0]

    step = jax.shard_map(
        step, mesh=even.jax_mesh("data"), in_specs=P(), out_specs=P(), check_vma=False
    )
    text = str(jax.make_jaxpr(step)(params))
    assert text.count("ftmesh_reduce_scatter[") == buckets
    assert text.count("ftmesh_all_gather_invariant[") == buckets
