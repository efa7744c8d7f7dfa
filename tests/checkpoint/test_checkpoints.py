"""Checkpoints: whole, the last few, refused where they do not fit, written by a thread."""

import errno
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.checkpoint.restore import first_difference
from ftmesh.checkpoint.tensor_names import about
from ftmesh.errors import CheckpointError
from tests.support.checkpointing import restored, saved, state, steps

pytestmark = pytest.mark.usefixtures("quick_compiler")


def test_the_last_few_are_kept_and_the_last_is_restored(tmp_path):
    saved(tmp_path, 10, 20, 30, keep=2)
    assert steps(tmp_path) == [20, 30]
    step, found, lines = restored(tmp_path)
    assert step == 30
    assert lines == []
    jax.tree.map(np.testing.assert_array_equal, found, state(30.0))
    assert found["params"]["b"].dtype == jnp.bfloat16


def test_arrays_go_where_those_of_the_run_are(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.arange(8.0)})
    _, found, _ = restored(tmp_path, {"w": jax.device_put(jnp.zeros(8), split)})
    assert found["w"].sharding == split
    np.testing.assert_array_equal(found["w"], np.arange(8.0))


def test_without_one_the_run_starts_as_it_is(tmp_path):
    first = state(5.0)
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        assert checkpoints.restore(first) == (0, first)
        assert checkpoints.latest_step is None


def test_checkpoints_are_not_overwritten(tmp_path):
    saved(tmp_path, 4)
    with pytest.raises(CheckpointError, match="the last of step 4: go on from them with --resume"):
        Checkpoints(tmp_path)


def test_nothing_is_written_over(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": jnp.zeros(3)})
        with pytest.raises(CheckpointError, match="is there already, and is not written over"):
            checkpoints.save(1, {"x": jnp.ones(3)})


def test_numbers_of_the_host_keep_their_bits(tmp_path):
    """JAX has no 64 bits, unless asked for."""
    state = {"seed": 2**40 + 5, "x": np.array([1 / 3]), "n": np.int64(2**40)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        step, found = checkpoints.restore(state)
    assert (step, found["seed"], found["x"][0], found["n"]) == (1, 2**40 + 5, 1 / 3, 2**40)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (state(width=4), r"its params/w is float32\[3\], and the run's is float32\[4\]"),
        ({**state(), "momentum": jnp.zeros(1)}, "it has no momentum"),
        ({"params": {"w": jnp.zeros(3)}}, "it has params/b, and the run has not"),
        (
            {"params": {"w": jnp.zeros(3, jnp.bfloat16), "b": jnp.zeros(2, jnp.bfloat16)}},
            r"its params/w is float32\[3\], and the run's is bfloat16\[3\]",
        ),
    ],
)
def test_one_of_another_model_is_refused(tmp_path, other, says):
    saved(tmp_path, 4)
    with pytest.raises(CheckpointError, match=f"step 4 in .* is of another model.*{says}"):
        restored(tmp_path, other)
    assert restored(tmp_path)[0] == 4  # and is still there


def test_descriptions_of_equal_states_do_not_differ():
    assert first_difference(about(state()), about(state(2.0))) is None
    assert about(state())["params/b"] == "bfloat16[2]"


class TestFolders:
    def test_a_file(self, tmp_path):
        (tmp_path / "file").write_text("mine")
        for path in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(CheckpointError, match=f"cannot write checkpoints to {path}: "):
                Checkpoints(path)
        assert (tmp_path / "file").read_text() == "mine"

    def test_one_that_cannot_be_made(self):
        with pytest.raises(CheckpointError, match="cannot write checkpoints to /proc/checkpoints"):
            Checkpoints("/proc/checkpoints")

    def test_one_with_checkpoints_of_orbax(self, tmp_path):
        (tmp_path / "4" / "state").mkdir(parents=True)
        (tmp_path / "4" / "_CHECKPOINT_METADATA").write_text("{}")
        for resume in (True, False):
            with pytest.raises(CheckpointError, match="has checkpoints of an older format, which"):
                Checkpoints(tmp_path, resume=resume)

    def test_too_little_space_is_said_before_anything_is_written(self, tmp_path, monkeypatch):
        usage = type("usage", (), {"free": 15})
        monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
        with (
            Checkpoints(tmp_path) as checkpoints,
            pytest.raises(CheckpointError, match="it takes 16 B, and 15 B are free"),
        ):
            checkpoints.save(4, state())
        assert steps(tmp_path) == []


class TestTheThread:
    @pytest.fixture
    def full(self, monkeypatch):
        """A disk that is full when data is to be there."""

        def fails(handle):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", fails)

    def test_a_full_disk_is_told_at_the_next_save_and_at_the_end(self, tmp_path, full):
        says = f"cannot write {tmp_path}: No space left on device"
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(4, state())
        with pytest.raises(CheckpointError, match=says):
            checkpoints.save(8, state())
        checkpoints.save(8, state())
        with pytest.raises(CheckpointError, match=says):
            checkpoints.close()
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []

    def test_it_does_not_hide_what_has_ended_the_run(self, tmp_path, full, capsys):
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(4, state())
        with pytest.raises(ZeroDivisionError), checkpoints:
            _ = 1 / 0
        assert "No space left on device" in capsys.readouterr().err

    def test_a_save_waits_for_the_state_and_not_for_the_disk(self, tmp_path, monkeypatch):
        may_go, real = threading.Event(), os.fsync
        monkeypatch.setattr(os, "fsync", lambda handle: (may_go.wait(30), real(handle))[1])
        with Checkpoints(tmp_path) as checkpoints:
            now = state(4.0)
            checkpoints.save(4, now)
            assert checkpoints.latest_step is None
            jax.tree.map(lambda x: x.delete(), now)  # as the next step does
            may_go.set()
        step, found, _ = restored(tmp_path)
        assert step == 4
        jax.tree.map(np.testing.assert_array_equal, found, state(4.0))

    def test_two_threads_wait_for_the_same_one(self, tmp_path, monkeypatch):
        may_go, waits, real = threading.Event(), threading.Event(), os.fsync
        monkeypatch.setattr(os, "fsync", lambda handle: (may_go.wait(30), real(handle))[1])
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(4, state())
        first = threading.Thread(target=lambda: (waits.set(), checkpoints.finish()))
        first.start()
        waits.wait(30)
        threading.Timer(0.2, may_go.set).start()
        checkpoints.finish()  # as at an early end, when the loop waits too
        assert checkpoints.latest_step == 4
        first.join(30)
        checkpoints.close()
