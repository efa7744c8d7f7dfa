"""Orbax saves and restores the state of a sharded optimizer, onto any chips."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.experimental import v1 as ocp1

import ftmesh
from ftmesh.checkpoint import Checkpoints, read_tensors
from ftmesh.testing import cpu_grid
from tests.support.slow import slow
from tests.support.updates import assert_close

pytestmark = [
    pytest.mark.usefixtures("quick_compiler"),
    pytest.mark.filterwarnings("ignore"),  # Orbax warns of its own future, and leaves files open
]

RNG = np.random.default_rng(0)
PARAMS = {
    "kernel": RNG.normal(size=(13, 7)).astype(np.float32),
    "tiles": RNG.normal(size=(16, 128)).astype(np.float32),
    "bias": RNG.normal(size=30).astype(np.float32),
    "gain": np.full((), 2, np.float32),
}
ADAM = optax.adam(0.05)
PLANS = {
    "16": ("4x4", None, "ring"),
    "16 others": ("6x4", "4x2@2,2", "ring"),
    "15": ("4x4", "1x1@1,1", "auto"),
    "15 others": ("4x4", "1x1@3,3", "auto"),
    "12": ("4x4", "2x2@2,2", "ring"),
    "12 others": ("4x4", "2x2@0,0", "ring"),
    "12 by row_pair": ("4x4", "2x2@2,2", "row_pair"),
}
SAME_NUMBER = [
    slow("16", "16 others"),
    slow("15", "15 others"),
    ("12", "12 others"),
    slow("12", "12 by row_pair"),
    slow("12 by row_pair", "12 others"),
]
OTHER_NUMBERS = [slow("16", "12"), slow("16", "15"), ("15", "12"), slow("12 others", "16")]


@pytest.fixture(scope="module")
def optimizers(quick_compiler):
    return {
        name: ftmesh.plan(cpu_grid(shape, failed=failed), algorithm).shard(ADAM)
        for name, (shape, failed, algorithm) in PLANS.items()
    }


def train(tx, params, state, steps):
    for _ in range(steps):
        grads = jax.tree.map(lambda p: jnp.sin(3 * p), params)
        updates, state = tx.update(grads, state, params)
        updates = jax.device_get(updates)
        params = jax.tree.map(lambda p, u: np.asarray(p + u, np.float32), params, updates)
    return params, state


@pytest.fixture(scope="module")
def trained(optimizers):
    """What two steps give: weights and state on any of the plans."""
    results = {}

    def after_two_steps(name):
        if name not in results:
            tx = optimizers[name]
            results[name] = train(tx, PARAMS, tx.init(PARAMS), 2)
        return results[name]

    return after_two_steps


class Manager:
    """Orbax's CheckpointManager, with arrays restored to the shapes of a target or as saved."""

    def save(self, folder, tree):
        with ocp.CheckpointManager(folder) as manager:
            manager.save(2, args=ocp.args.StandardSave(tree))

    def restore(self, folder, like):
        with ocp.CheckpointManager(folder) as manager:
            return manager.restore(2, args=ocp.args.StandardRestore(like))

    def restore_padded(self, folder, like):
        args = ocp.checkpoint_utils.construct_restore_args(like, strict=False)
        with ocp.CheckpointManager(folder, item_handlers=ocp.PyTreeCheckpointHandler()) as manager:
            return manager.restore(2, args=ocp.args.PyTreeRestore(like, restore_args=args))


class NewApi:
    """The same by Orbax's new API."""

    def save(self, folder, tree):
        with ocp1.training.Checkpointer(folder) as checkpointer:
            checkpointer.save(2, tree)

    def restore(self, folder, like):
        with ocp1.training.Checkpointer(folder) as checkpointer:
            return checkpointer.load(2, like)

    def restore_padded(self, folder, like):
        context = ocp1.Context()
        context.array.loading.enable_padding_and_truncation = True
        with context:
            return self.restore(folder, like)


@pytest.fixture(params=[Manager, NewApi])
def orbax(request):
    return request.param()


def like_of(tx):
    """Return the types and shardings of a state, as a program that starts has them."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tx.init(PARAMS))


def check_continued(tx, params, state):
    """Assert that two more steps give what four steps of plain Adam do."""
    two, moments = train(ADAM, PARAMS, ADAM.init(PARAMS), 2)
    assert_close(tx.gather_state(state, PARAMS), moments)
    assert_close(params, two)
    params, state = train(tx, params, state, 2)
    want, want_state = train(ADAM, two, moments, 2)
    assert_close(params, want)
    assert_close(tx.gather_state(state, PARAMS), want_state)


@pytest.mark.parametrize(("source", "target"), SAME_NUMBER)
def test_onto_as_many_chips(optimizers, trained, orbax, tmp_path, source, target):
    """Another hole, or another algorithm."""
    params, state = trained(source)
    orbax.save(tmp_path / "saved", {"params": params, "optimizer": state})
    tx = optimizers[target]
    like = {"params": PARAMS, "optimizer": like_of(tx)}
    restored = orbax.restore(tmp_path / "saved", like)
    pairs = zip(*map(jax.tree.leaves, (restored["optimizer"], like["optimizer"])), strict=True)
    for leaf, type_ in pairs:
        assert leaf.sharding == type_.sharding
    check_continued(tx, restored["params"], restored["optimizer"])


@pytest.mark.parametrize(("source", "target"), OTHER_NUMBERS)
def test_onto_another_number(optimizers, trained, orbax, tmp_path, source, target):
    """Orbax rejects it, or pads and cuts, or restores it as it is, to be converted."""
    params, state = trained(source)
    orbax.save(tmp_path / "saved", state)
    tx = optimizers[target]
    with pytest.raises(Exception) as caught:  # noqa: PT011 (of a class that Orbax does not export)
        orbax.restore(tmp_path / "saved", like_of(tx))
    errors = (caught.value, caught.value.__cause__, caught.value.__context__)
    assert any("is not compatible with the stored shape" in str(error) for error in errors)
    del caught, errors
    gc.collect()  # what Orbax leaves behind then
    check_continued(tx, params, orbax.restore_padded(tmp_path / "saved", like_of(tx)))
    as_saved = orbax.restore(tmp_path / "saved", jax.tree.map(np.asarray, state))
    with pytest.raises(ftmesh.ArgumentError, match="for another number of chips"):
        tx.update(params, as_saved, params)
    converted = tx.shard_state(tx.gather_state(as_saved, PARAMS), PARAMS)
    check_continued(tx, params, converted)


def test_into_a_plain_optimizer_and_back(optimizers, trained, orbax, tmp_path):
    """A gathered state is that of optax alone."""
    tx, (params, state) = optimizers["12"], trained("12")
    orbax.save(tmp_path / "plain", tx.gather_state(state, PARAMS))
    restored = orbax.restore(tmp_path / "plain", ADAM.init(PARAMS))
    check_continued(tx, params, tx.shard_state(restored, PARAMS))


def test_a_checkpoint_of_this_package(optimizers, trained, orbax, tmp_path):
    """Its tensors, as one function reads them, are saved by Orbax and restored."""
    tx, (params, state) = optimizers["15"], trained("15")
    full = {"params": None, "optimizer": tx.full_types(PARAMS)}
    with Checkpoints(tmp_path / "own") as checkpoints:
        checkpoints.save(2, {"params": params, "optimizer": state}, full_types=full)
    orbax.save(tmp_path / "orbax", read_tensors(tmp_path / "own" / "2"))
    like = read_tensors(tmp_path / "own" / "2")
    restored = orbax.restore(tmp_path / "orbax", like)["optimizer"]
    moments = [restored["0"][key] for key in ("count", "mu", "nu")]
    plain = (type(ADAM.init(PARAMS)[0])(*moments), optax.EmptyState())
    check_continued(tx, params, tx.shard_state(plain, PARAMS))


def test_a_permuted_state_would_be_noticed(optimizers, trained):
    tx, (params, state) = optimizers["12"], trained("12")
    rolled = jax.tree.map(lambda x: jnp.roll(x, 1) if x.ndim else x, state)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_continued(tx, params, rolled)
