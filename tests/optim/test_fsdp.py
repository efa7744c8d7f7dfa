"""Weights that are cut along the axis of the plan itself: each rank updates its own piece."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import ArgumentError
from ftmesh.optim import lamb
from ftmesh.testing import cpu_grid
from tests.support.slow import slow
from tests.support.updates import assert_close

pytestmark = pytest.mark.usefixtures("quick_compiler")

RNG = np.random.default_rng(0)
PARAMS = {
    "in": RNG.normal(size=(24, 16)).astype(np.float32) / 4,
    "hidden": RNG.normal(size=(16, 12)).astype(np.float32) / 4,
    "out": RNG.normal(size=(12, 3)).astype(np.float32) / 4,
    "bias": np.zeros(3, np.float32),
}
X = RNG.normal(size=(24, 24)).astype(np.float32)
Y = np.tanh(X[:, :3])
TRANSFORMATIONS = {
    "adam": optax.adam(0.02),
    "clipped lamb": optax.chain(optax.clip_by_global_norm(0.1), lamb(0.02, weight_decay=0.1)),
}
# Cut along the plan's axis; along it and another; along both in one dimension; and not at all.
ALONG_DATA = {"in": P("data"), "hidden": P(None, "data"), "out": P(), "bias": P()}
ALONG_BOTH = {
    "in": P("data", "model"),
    "hidden": P("model", "data"),
    "out": P(("data", "model")),
    "bias": P(),
}


def loss_of(params, x, y):
    hidden = jnp.tanh(jnp.tanh(x @ params["in"]) @ params["hidden"])
    return jnp.mean((hidden @ params["out"] + params["bias"] - y) ** 2)


def train_alone(transformation, steps=5):
    params, state, losses = PARAMS, transformation.init(PARAMS), []
    for _ in range(steps):
        loss, grads = jax.value_and_grad(loss_of)(params, X, Y)
        updates, state = transformation.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return params, state, losses


@pytest.fixture(scope="module")
def plan():
    return ftmesh.plan(cpu_grid("4x4", failed="2x2@2,2"), "ring")


@pytest.fixture(scope="module")
def six():
    """Six ranks, each a pair of devices along "model"."""
    plan = ftmesh.plan(ftmesh.Topology.grid("3x2"), "ring")
    return plan, Mesh(np.array(jax.devices()[:12]).reshape(6, 2), ("data", "model"))


@pytest.mark.parametrize(
    ("axes", "name"),
    [
        slow("data", "adam"),
        ("data", "clipped lamb"),
        ("both", "adam"),
        slow("both", "clipped lamb"),
    ],
)
def test_in_jit(plan, six, name, axes):
    transformation, specs = TRANSFORMATIONS[name], ALONG_DATA
    mesh = plan.jax_mesh("data")
    if axes == "both":
        (plan, mesh), specs = six, ALONG_BOTH
    tx = plan.shard(transformation, specs=specs, mesh=mesh)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    params = jax.device_put(PARAMS, shardings)
    state = tx.init(params)

    @jax.jit
    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(5):
        params, state, loss = step(params, state, X, Y)
        losses.append(float(loss))
    want, want_state, want_losses = train_alone(transformation)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
    assert want_losses[-1] < 0.9 * want_losses[0]
    assert_close(params, want)
    assert_close(tx.gather_state(state, params), want_state)
    for tree in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, dict)):
        if isinstance(tree, dict):  # moments: as the parameters are, or flat
            assert tree["in"].shape == (24, 16)
            assert tree["in"].sharding == shardings["in"]
            assert tree["bias"].shape == (plan.program.num_ranks,)


@pytest.mark.parametrize("name", [slow("adam"), "clipped lamb"])
def test_explicit_axes_need_no_specs(six, name):
    """Types tell how weights are sharded, and norms are those of full tensors."""
    plan, mesh = six
    explicit = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * 2)
    transformation, tx = TRANSFORMATIONS[name], plan.shard(TRANSFORMATIONS[name])

    def step(tx, params, state):
        grads = jax.tree.map(lambda p: jnp.sin(7 * p), params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(explicit):
        shardings = jax.tree.map(lambda spec: NamedSharding(explicit, spec), ALONG_BOTH)
        params = jax.device_put(PARAMS, shardings)
        state = tx.init(params)
        for _ in range(2):
            params, state = jax.jit(partial(step, tx))(params, state)
        full = tx.gather_state(state, params)
        again = tx.shard_state(full, params)
    want, want_state = PARAMS, transformation.init(PARAMS)
    for _ in range(2):
        want, want_state = step(transformation, want, want_state)
    assert_close(jax.device_get(params), jax.device_get(want))
    assert_close(jax.device_get(full), jax.device_get(want_state))
    for leaf, other in zip(*map(jax.tree.leaves, (again, state)), strict=True):
        assert leaf.sharding == other.sharding
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other))


def fsdp_step(tx, *, has_mean):
    """Return a step of a rank: `in` is gathered, and what is left is replicated."""

    def rank_loss(params, x, y):
        full = params | {"in": lax.all_gather(params["in"], "data", tiled=True)}
        loss = loss_of(full, x, y)
        return lax.pmean(loss, "data") if has_mean else loss

    def step(params, state, x, y):
        if has_mean:  # JAX differentiates the mean itself
            loss, grads = jax.value_and_grad(rank_loss)(params, x, y)
        else:
            loss, grads = tx.value_and_grad(rank_loss)(params, x, y)
            loss = lax.pmean(loss, "data")
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


@pytest.mark.parametrize(
    ("has_mean", "overlap", "check_vma", "name"),
    [
        (True, False, True, "adam"),
        slow(True, False, True, "clipped lamb"),
        slow(False, False, False, "adam"),
        (False, False, False, "clipped lamb"),
        slow(False, True, True, "adam"),
        slow(False, True, True, "clipped lamb"),
        slow(False, True, False, "adam"),
        slow(False, True, False, "clipped lamb"),
    ],
)
def test_in_shard_map(plan, name, has_mean, overlap, check_vma):
    specs = {"in": P("data"), "hidden": P(), "out": P(), "bias": P()}
    transformation = TRANSFORMATIONS[name]
    tx = plan.shard(transformation, specs=specs, overlap=overlap)
    state_specs = tx.specs(PARAMS)
    step = jax.jit(
        jax.shard_map(
            fsdp_step(tx, has_mean=has_mean),
            mesh=plan.jax_mesh("data"),
            in_specs=(specs, state_specs, P("data"), P("data")),
            out_specs=(specs, state_specs, P()),
            check_vma=check_vma,
        )
    )
    params, state, losses = PARAMS, tx.init(PARAMS), []
    for _ in range(5):
        params, state, loss = step(params, state, X, Y)
        losses.append(float(loss))
    want, want_state, want_losses = train_alone(transformation)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
    assert_close(params, want)
    assert_close(tx.gather_state(state, params), want_state)


def test_pieces_that_specs_do_not_name(plan):
    """Types show that a parameter varies along the axis."""
    tx = plan.shard(optax.adam(0.1))
    step = jax.shard_map(
        lambda w: tx.update(w, tx.init(w), w)[0],
        mesh=plan.jax_mesh("data"),
        in_specs=P("data"),
        out_specs=P("data"),
    )
    with pytest.raises(ArgumentError, match="varies along 'data', and specs= does not say so"):
        jax.eval_shape(step, jnp.arange(24.0))


def test_idle_devices_hold_no_pieces():
    plan = ftmesh.plan(cpu_grid("4x4", failed="2x2@0,0"), "ring", with_idle=True)
    with pytest.raises(ArgumentError, match="a plan with idle devices cannot shard"):
        plan.shard(optax.adam(0.1), specs=P("data")).init({"w": jnp.ones(32)})
