"""Checkpoints: whole, the last few, and refused where they do not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ftmesh.errors import CheckpointError
from ftmesh.train.checkpoints import Checkpoints, about, first_difference, is_finite


def state(scale=1.0, width=3):
    return {"params": {"w": scale * jnp.arange(float(width)), "b": jnp.zeros(2, jnp.bfloat16)}}


def test_the_last_few_are_kept_and_the_last_is_restored(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, state(float(step)))
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["20", "30"]
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        step, found = checkpoints.restore(state(0.0))
    assert step == 30
    jax.tree.map(np.testing.assert_array_equal, found, state(30.0))


def test_arrays_go_where_those_of_the_run_are(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.arange(8.0)})
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        _, found = checkpoints.restore({"w": jax.device_put(jnp.zeros(8), split)})
    assert found["w"].sharding == split
    np.testing.assert_array_equal(found["w"], np.arange(8.0))


def test_without_one_the_run_starts_as_it_is(tmp_path):
    first = state(5.0)
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        assert checkpoints.restore(first) == (0, first)


def test_checkpoints_are_not_overwritten(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, state())
    with pytest.raises(CheckpointError, match="the last of step 4: go on from them with --resume"):
        Checkpoints(tmp_path)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (state(width=4), r"its params/w is float32\[3\], and the run's is float32\[4\]"),
        ({**state(), "momentum": jnp.zeros(1)}, "it has no momentum"),
        ({"params": {"w": jnp.zeros(3)}}, "it has params/b, and the run has not"),
    ],
)
def test_one_of_another_model_is_refused(tmp_path, other, says):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, state())
    with (
        Checkpoints(tmp_path, resume=True) as checkpoints,
        pytest.raises(CheckpointError, match=says),
    ):
        checkpoints.restore(other)
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        assert checkpoints.restore(state(0.0))[0] == 4  # and is still there


def test_half_a_checkpoint_is_none(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, state())
        checkpoints.save(8, state())
    (tmp_path / "8").rename(tmp_path / "8.orbax-checkpoint-tmp-1")  # as a killed run leaves it
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        assert checkpoints.restore(state())[0] == 4


def test_descriptions_of_equal_states_do_not_differ():
    assert first_difference(about(state()), about(state(2.0))) is None
    assert about(state())["params/b"] == "bfloat16[2]"


def test_what_is_worth_keeping():
    assert is_finite(state())
    assert is_finite(state() | {"best_loss": jnp.inf})  # as optimizers keep it at the start
    assert not is_finite(state() | {"best_loss": jnp.nan})
    assert not is_finite({"w": jnp.array([1.0, jnp.inf])})
    assert not is_finite({"w": jnp.array([1.0, jnp.nan])})
    assert is_finite({"count": jnp.arange(3), "nothing": jnp.zeros(0)})
