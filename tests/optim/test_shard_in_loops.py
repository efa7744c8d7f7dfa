"""Sharded optimizers where optax transformations are used: jit, TrainState, nnx, chains, pmap."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import reduce_on_plateau

import ftmesh
from ftmesh import ArgumentError, CollectiveError, Topology
from tests.support.updates import FEW, OPTIMIZERS, assert_close, gradients, unsharded

pytestmark = pytest.mark.usefixtures("quick_compiler")


def mean_of(step=0):
    return jax.tree.map(lambda g: jnp.asarray(g.mean(axis=0)), gradients(FEW, 12, step))


def trained(transformation, steps=2):
    """Weights after some steps with means of gradients, in a jit without shard_map."""
    state = jax.jit(lambda: TrainState.create(apply_fn=None, params=FEW, tx=transformation))()
    step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    for now in range(steps):
        state = step(state, mean_of(now))
    return state


def test_one_step_of_a_train_state(twelve):
    """w = 1, g = 1, and a rate of 0.1."""
    params = {"w": jnp.ones(40)}
    state = TrainState.create(apply_fn=None, params=params, tx=twelve.shard(optax.sgd(0.1)))
    state = state.apply_gradients(grads=params)
    np.testing.assert_allclose(state.params["w"], 0.9, rtol=1e-6)


def slow(name):
    return pytest.param(name, marks=pytest.mark.slow)


# Those of optax trace to other operations where there is a mesh.
KINDS = OPTIMIZERS | {
    "optax lamb": optax.lamb(0.1),
    "optax lars": optax.lars(0.1),
    "block rms": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
    "centred": optax.stateless(lambda u, _: jax.tree.map(lambda x: x - jnp.mean(x), u)),
}


@pytest.mark.parametrize("name", ["adam", "lamb", *map(slow, ["optax lamb", "optax lars"])])
def test_a_train_state(twelve, name):
    state = trained(twelve.shard(KINDS[name]))
    assert_close(state.params, unsharded(KINDS[name], FEW, 12)[0])
    (row, *_), *_ = state.opt_state.rows
    assert row.sharding.is_equivalent_to(NamedSharding(twelve.jax_mesh("data"), P("data")), 2)


def wrapped(shard):
    """Optimizers made of others, with `shard` around one of them."""
    return {
        "chain": optax.chain(optax.clip(0.5), shard(optax.adam(0.1)), optax.scale(0.5)),
        "MultiSteps": optax.MultiSteps(shard(optax.adam(0.1)), 2),
        "inject": optax.inject_hyperparams(lambda rate: shard(optax.sgd(rate, 0.9)))(rate=0.1),
        "inside": shard(optax.inject_hyperparams(optax.adam)(learning_rate=0.1)),
    }


@pytest.mark.parametrize("name", wrapped(lambda tx: tx))
def test_in_other_transformations(twelve, name):
    state = trained(wrapped(twelve.shard)[name])
    want = trained(wrapped(lambda tx: tx)[name])
    assert_close(state.params, want.params)


def test_a_rate_that_is_changed_on_the_way(twelve):
    state = trained(wrapped(twelve.shard)["inside"], steps=1)
    hyper = state.opt_state.inner
    hyper = hyper._replace(hyperparams=hyper.hyperparams | {"learning_rate": jnp.float32(0)})
    still = jax.tree.map(np.asarray, state.params)
    state = state.replace(opt_state=dataclasses.replace(state.opt_state, inner=hyper))
    state = state.apply_gradients(grads=mean_of())
    jax.tree.map(np.testing.assert_array_equal, state.params, still)


def test_nnx(twelve):
    """The same weights as with the optimizer alone, after two steps."""
    found = []
    for transformation in (OPTIMIZERS["adam"], twelve.shard(OPTIMIZERS["adam"])):
        model = nnx.Linear(31, 45, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
            optimizer.update(model, grads)

        for _ in range(2):
            step(model, optimizer, jnp.ones((4, 31)))
        found.append(nnx.to_pure_dict(nnx.state(model)))
    assert_close(*found)


def test_pmap(twelve):
    """Own gradients, of which the mean is made on the way."""
    optimizer = twelve.shard(OPTIMIZERS["lars"], "batch")

    def step(grads):
        updates, _ = optimizer.update(grads, optimizer.init(FEW), FEW)
        return optax.apply_updates(FEW, updates)

    run = jax.pmap(step, axis_name="batch", devices=twelve.topology.devices)
    params = jax.tree.map(lambda p: p[3], run(gradients(FEW, 12, 0)))
    assert_close(params, unsharded(OPTIMIZERS["lars"], FEW, 12, steps=1)[0])


SPECS = {"kernel": P(None, "model"), "bias": P()}
WIDE = {"kernel": np.arange(45 * 32, dtype=np.float32).reshape(45, 32) / 500, "bias": FEW["bias"]}


@pytest.fixture(scope="module")
def six():
    """Six ranks, each a pair of devices along "model"."""
    plan = ftmesh.plan(Topology.grid("3x2"), "ring")
    mesh = Mesh(np.array(jax.devices()[:12]).reshape(6, 2), ("data", "model"))
    return plan, mesh


@pytest.mark.parametrize("name", ["adam", slow("lamb"), slow("optax lamb"), "block rms", "centred"])
def test_weights_that_are_cut_along_another_axis(six, name):
    """Norms, means and sizes are those of all pieces; a device keeps a part of its piece."""
    plan, mesh = six
    optimizer = plan.shard(KINDS[name], specs=SPECS, mesh=mesh)
    params = jax.tree.map(lambda p, spec: jax.device_put(p, NamedSharding(mesh, spec)), WIDE, SPECS)
    grads = jax.tree.map(lambda p: jnp.sin(p * 7), params)

    @jax.jit
    def step(params, grads):
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    got, state = step(params, grads)
    want, inner = WIDE, KINDS[name].init(WIDE)
    for _ in range(2):
        updates, inner = KINDS[name].update(jax.device_get(grads), inner, want)
        want = optax.apply_updates(want, updates)
    assert_close(got, want)
    bucket = optimizer.layout(params).buckets[0]
    assert bucket.packing.shapes == ((45, 16), (31,)) or bucket.packing.shapes == ((31,), (45, 16))
    for row in state.rows:
        assert {shard.data.shape for shard in row[0].addressable_shards} == {bucket.shape}
    text = jax.jit(step).lower(params, grads).compile().as_text()
    assert "all-gather" not in text


def test_nothing_says_how_weights_lie(six):
    plan, mesh = six
    with pytest.raises(ArgumentError, match="nothing says how weights lie along them"):
        plan.shard(optax.sgd(0.1), mesh=mesh).init(WIDE)


def test_norms_of_pieces_that_nothing_tells_of(six):
    """In a shard_map over both axes, where types say that weights differ along "model"."""
    plan, mesh = six
    optimizer = plan.shard(optax.clip_by_global_norm(1.0))
    step = jax.shard_map(
        lambda w: optimizer.update(w, optimizer.init(w), w)[0],
        mesh=mesh,
        in_specs=P("model"),
        out_specs=P("model"),
    )
    with pytest.raises(ArgumentError, match="tensors differ along 'model' too: give specs="):
        jax.eval_shape(step, jnp.arange(8.0))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"specs": P("models")}, r"specs name \['models'\], and the mesh has axes"),
        ({"order": [0, 0, 1]}, "order must have each position from 0 to 1 once"),
        ({"order": [1]}, "order must have each position from 0 to 1 once"),
    ],
)
def test_options_that_make_no_sense(twelve, options, why):
    with pytest.raises(ArgumentError, match=why):
        twelve.shard(optax.sgd(0.1), **options).init(FEW)


def test_a_state_of_another_plan(even, twelve):
    state = even.shard(optax.sgd(0.1, 0.9)).init(FEW)
    with pytest.raises(ArgumentError, match="not sharded for the owners of this plan"):
        twelve.shard(optax.sgd(0.1, 0.9)).update(FEW, state, FEW)


def test_eager_steps_are_compiled_once(twelve, caplog):
    optimizer = twelve.shard(optax.sgd(0.1, 0.9))
    state = optimizer.init(FEW)
    _, state = optimizer.update(FEW, state, FEW)
    with jax.log_compiles(True):
        optimizer.update(FEW, state, FEW)
    assert not [line for line in caplog.messages if "Finished XLA compilation" in line]


def in_shard_map(plan, step, *args):
    """Types of what a step gives that every rank takes on its own number."""
    mapped = jax.shard_map(
        step, mesh=plan.jax_mesh("data"), in_specs=(P(), P("data")), out_specs=P()
    )
    return jax.eval_shape(mapped, *args, jnp.arange(12.0))


def test_gradients_of_which_some_are_summed_already(even):
    optimizer = even.shard(optax.sgd(1.0))

    def step(params, x):
        own = {"p": jax.lax.pcast(params["p"], "data", to="varying"), "q": params["q"]}
        grads = jax.grad(lambda own: jnp.sum(own["p"] * x) + jnp.sum(own["q"] * x))(own)
        return optimizer.update(grads, optimizer.init(params), params)[0]

    with pytest.raises(ArgumentError, match="some of these gradients differ along 'data'"):
        in_shard_map(even, step, {"p": jnp.ones(6), "q": jnp.ones(6)})


def test_a_loss_of_a_rank_is_not_one_for_all(even):
    optimizer = even.shard(optax.chain(optax.sgd(1.0), reduce_on_plateau()))

    def step(params, x):
        return optimizer.update(params, optimizer.init(params), params, value=x[0])[0]

    with pytest.raises(ArgumentError, match="extra arguments must be the same at all ranks"):
        in_shard_map(even, step, {"p": jnp.ones(6)})


def test_a_mesh_of_another_size(six, twelve):
    optimizer = twelve.shard(optax.sgd(0.1), specs=P(), mesh=six[1])
    with pytest.raises(CollectiveError, match="axis 'data' has 6 devices, but the plan"):
        optimizer.init(WIDE)
