"""Sharded optimizers in jit, TrainState, nnx, optax.chain and pmap."""

import cProfile
import pstats

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
from ftmesh.testing import cpu_grid
from tests.support.slow import slow
from tests.support.updates import OPTIMIZERS, SMALL_PARAMS, assert_close, gradients, train_unsharded

pytestmark = pytest.mark.usefixtures("quick_compiler")


def mean_gradients(step=0):
    return jax.tree.map(lambda g: jnp.asarray(g.mean(axis=0)), gradients(SMALL_PARAMS, 12, step))


def train(transformation, steps=2):
    """Return the TrainState after some steps with mean gradients, in jit without shard_map."""
    state = jax.jit(
        lambda: TrainState.create(apply_fn=None, params=SMALL_PARAMS, tx=transformation)
    )()
    step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    for i in range(steps):
        state = step(state, mean_gradients(i))
    return state


def test_one_step_of_a_train_state(twelve):
    """w = 1, g = 1, and a learning rate of 0.1."""
    params = {"w": jnp.ones(40)}
    state = TrainState.create(apply_fn=None, params=params, tx=twelve.shard(optax.sgd(0.1)))
    state = state.apply_gradients(grads=params)
    np.testing.assert_allclose(state.params["w"], 0.9, rtol=1e-6)


# Those of optax trace to other operations if a mesh is set.
TRANSFORMATIONS = OPTIMIZERS | {
    "optax lamb": optax.lamb(0.1),
    "optax lars": optax.lars(0.1),
    "block rms": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
    "centred": optax.stateless(lambda u, _: jax.tree.map(lambda x: x - jnp.mean(x), u)),
}


@pytest.mark.parametrize("name", ["lamb", *map(slow, ["adam", "optax lamb", "optax lars"])])
def test_a_train_state(twelve, name):
    state = train(twelve.shard(TRANSFORMATIONS[name]))
    assert_close(state.params, train_unsharded(TRANSFORMATIONS[name], SMALL_PARAMS, 12)[0])
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert len(moments) >= 2
    for leaf in moments:
        assert leaf.sharding.is_equivalent_to(NamedSharding(twelve.jax_mesh("data"), P("data")), 1)


def wrapped(shard):
    """Return optimizers made of others, with `shard` around one of them."""
    return {
        "chain": optax.chain(optax.clip(0.5), shard(optax.adam(0.1)), optax.scale(0.5)),
        "MultiSteps": optax.MultiSteps(shard(optax.adam(0.1)), 2),
        "inject": optax.inject_hyperparams(lambda rate: shard(optax.sgd(rate, 0.9)))(rate=0.1),
        "inside": shard(optax.inject_hyperparams(optax.adam)(learning_rate=0.1)),
    }


@pytest.mark.parametrize("name", [slow("chain"), "MultiSteps", slow("inject"), "inside"])
def test_inside_other_transformations(twelve, name):
    state = train(wrapped(twelve.shard)[name])
    want = train(wrapped(lambda tx: tx)[name])
    assert_close(state.params, want.params)


def test_a_learning_rate_that_changes(twelve):
    state = train(wrapped(twelve.shard)["inside"], steps=1)
    hyper = state.opt_state
    hyper = hyper._replace(hyperparams=hyper.hyperparams | {"learning_rate": jnp.float32(0)})
    before = jax.tree.map(np.asarray, state.params)
    state = state.replace(opt_state=hyper)
    state = state.apply_gradients(grads=mean_gradients())
    jax.tree.map(np.testing.assert_array_equal, state.params, before)


def test_nnx(twelve):
    """Two steps give the same weights as without sharding."""
    params = []
    for transformation in (OPTIMIZERS["adam"], twelve.shard(OPTIMIZERS["adam"])):
        model = nnx.Linear(31, 45, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
            optimizer.update(model, grads)

        for _ in range(2):
            step(model, optimizer, jnp.ones((4, 31)))
        params.append(nnx.to_pure_dict(nnx.state(model)))
    assert_close(*params)


def test_pmap(twelve):
    """Every rank gives its own gradients, and `update` averages them."""
    optimizer = twelve.shard(OPTIMIZERS["lars"], "batch")

    def step(grads):
        updates, _ = optimizer.update(grads, optimizer.init(SMALL_PARAMS), SMALL_PARAMS)
        return optax.apply_updates(SMALL_PARAMS, updates)

    devices = list(twelve.jax_mesh("batch").devices.flat)
    run = jax.pmap(step, axis_name="batch", devices=devices)
    params = jax.tree.map(lambda p: p[3], run(gradients(SMALL_PARAMS, 12, 0)))
    assert_close(params, train_unsharded(OPTIMIZERS["lars"], SMALL_PARAMS, 12, steps=1)[0])


SPECS = {"kernel": P(None, "model"), "bias": P()}
WIDE = {
    "kernel": np.arange(45 * 32, dtype=np.float32).reshape(45, 32) / 500,
    "bias": SMALL_PARAMS["bias"],
}


@pytest.fixture(scope="module")
def six():
    """Six ranks, each a pair of devices along "model"."""
    plan = ftmesh.plan(Topology.grid("3x2"), "ring")
    mesh = Mesh(np.array(jax.devices()[:12]).reshape(6, 2), ("data", "model"))
    return plan, mesh


@pytest.mark.parametrize(
    "name", ["adam", *map(slow, ["lamb", "optax lamb", "block rms", "centred"])]
)
def test_weights_that_are_sharded_along_another_axis(six, name):
    """Norms, means and sizes are those of full tensors; a device keeps a part of its shard."""
    plan, mesh = six
    optimizer = plan.shard(TRANSFORMATIONS[name], specs=SPECS, mesh=mesh)
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
    want, inner = WIDE, TRANSFORMATIONS[name].init(WIDE)
    for _ in range(2):
        updates, inner = TRANSFORMATIONS[name].update(jax.device_get(grads), inner, want)
        want = optax.apply_updates(want, updates)
    assert_close(got, want)
    for leaf, full in zip(*map(jax.tree.leaves, (state, inner)), strict=True):
        if full.shape == (45, 32):
            assert leaf.shape == (1, 2, 720)
            assert leaf.sharding.spec == P(None, "model", "data")
            for column in range(2):  # each shard in its natural order
                part = full[:, 16 * column :][:, :16].reshape(-1)
                np.testing.assert_allclose(leaf[0, column], part, rtol=1e-5, atol=1e-6)
        elif full.ndim:
            assert leaf.shape == (36,)
    assert_close(optimizer.gather_state(state, params), inner)
    again = optimizer.shard_state(inner, params)
    assert [x.sharding for x in jax.tree.leaves(again)] == [
        NamedSharding(mesh, spec) for spec in jax.tree.leaves(optimizer.specs(params))
    ]
    text = jax.jit(step).lower(params, grads).compile().as_text()
    assert "all-gather" not in text


def test_a_state_of_other_specs(six):
    """Its arrays have other shapes, so it is rejected and not permuted."""
    plan, mesh = six
    columns, rows = (
        plan.shard(optax.sgd(0.1, 0.9), specs={"w": spec}, mesh=mesh)
        for spec in (P(None, "model"), P("model"))
    )
    params = {"w": jnp.ones((12, 24))}
    state = columns.init(params)
    columns.update(params, state, params)
    with pytest.raises(ArgumentError, match=r"shape \(1, 2, 144\) where .* stores \(2, 1, 144\)"):
        rows.update(params, state, params)
    moved = rows.shard_state(columns.gather_state(state, params), params)
    rows.update(params, moved, params)


def test_a_mesh_with_another_axis_needs_specs(six):
    plan, mesh = six
    with pytest.raises(ArgumentError, match="are sharded along them is not known here"):
        plan.shard(optax.sgd(0.1), mesh=mesh).init(WIDE)


def test_norms_of_sharded_weights_need_specs(six):
    """In a shard_map over both axes, types show that weights vary along "model"."""
    plan, mesh = six
    optimizer = plan.shard(optax.clip_by_global_norm(1.0))
    step = jax.shard_map(
        lambda w: optimizer.update(w, optimizer.init(w), w)[0],
        mesh=mesh,
        in_specs=P("model"),
        out_specs=P("model"),
    )
    with pytest.raises(ArgumentError, match="which vary along 'model' too: give specs="):
        jax.eval_shape(step, jnp.arange(8.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"specs": P("models")}, r"specs name \['models'\], and the mesh has axes"),
        ({"order": [0, 0, 1]}, "order must have each position from 0 to 1 once"),
        ({"order": [1]}, "order must have each position from 0 to 1 once"),
    ],
)
def test_invalid_options(twelve, options, message):
    with pytest.raises(ArgumentError, match=message):
        twelve.shard(optax.sgd(0.1), **options).init(SMALL_PARAMS)


def test_a_state_for_another_number_of_chips(twelve):
    fifteen = ftmesh.plan(cpu_grid("4x4", failed="1x1@1,1"))
    state = fifteen.shard(optax.sgd(0.1, 0.9)).init(SMALL_PARAMS)
    with pytest.raises(
        ArgumentError, match=r"of shape \(45,\) where this optimizer stores \(36,\)"
    ):
        twelve.shard(optax.sgd(0.1, 0.9)).update(SMALL_PARAMS, state, SMALL_PARAMS)


def test_eager_steps_are_compiled_once(twelve, caplog):
    optimizer = twelve.shard(optax.sgd(0.1, 0.9))
    state = optimizer.init(SMALL_PARAMS)
    _, state = optimizer.update(SMALL_PARAMS, state, SMALL_PARAMS)
    with jax.log_compiles(True):
        optimizer.update(SMALL_PARAMS, state, SMALL_PARAMS)
    assert not [line for line in caplog.messages if "Finished XLA compilation" in line]


def in_shard_map(plan, step, *args):
    """Return the types of a step's results; every rank gets its own number."""
    mapped = jax.shard_map(
        step, mesh=plan.jax_mesh("data"), in_specs=(P(), P("data")), out_specs=P()
    )
    return jax.eval_shape(mapped, *args, jnp.arange(12.0))


def test_gradients_that_are_partly_summed(even):
    optimizer = even.shard(optax.sgd(1.0))

    def step(params, x):
        own = {"p": jax.lax.pcast(params["p"], "data", to="varying"), "q": params["q"]}
        grads = jax.grad(lambda own: jnp.sum(own["p"] * x) + jnp.sum(own["q"] * x))(own)
        return optimizer.update(grads, optimizer.init(params), params)[0]

    with pytest.raises(ArgumentError, match="some of these gradients vary along 'data'"):
        in_shard_map(even, step, {"p": jnp.ones(6), "q": jnp.ones(6)})


def test_extra_arguments_must_be_replicated(even):
    optimizer = even.shard(optax.chain(optax.sgd(1.0), reduce_on_plateau()))

    def step(params, x):
        return optimizer.update(params, optimizer.init(params), params, value=x[0])[0]

    with pytest.raises(ArgumentError, match="extra arguments must be the same at all ranks"):
        in_shard_map(even, step, {"p": jnp.ones(6)})


def test_a_mesh_of_another_size(six, twelve):
    optimizer = twelve.shard(optax.sgd(0.1), specs=P(), mesh=six[1])
    with pytest.raises(CollectiveError, match="axis 'data' has 6 devices, but the plan"):
        optimizer.init(WIDE)


def test_traced_arrays_are_not_asked_for_their_sharding(twelve):
    """JAX searches the whole program for its answer, which with 2,000 leaves takes minutes."""
    params = {f"w{i}": jnp.ones(24) for i in range(4)}
    optimizer = twelve.shard(optax.sgd(1e-3))
    state = jax.eval_shape(optimizer.init, params)

    def update(params, state):
        return optimizer.update(jax.tree.map(jnp.sin, params), state, params)

    def searches(function):
        with cProfile.Profile() as profile:
            jax.jit(function).trace(params, state)
        return [name for _, _, name in pstats.Stats(profile).stats if name == "find_progenitors"]

    assert not searches(update)
    assert searches(lambda params, state: getattr(params["w0"], "sharding", None) and state)
