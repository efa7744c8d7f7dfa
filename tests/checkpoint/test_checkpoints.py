"""Saving, keeping and restoring checkpoints, and the thread that writes them."""

import errno
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.checkpoint.manifest import describe_tensors
from ftmesh.checkpoint.restore import first_difference
from ftmesh.errors import CheckpointError
from tests.support.checkpointing import restore, save_steps, saved_steps, small_state

pytestmark = pytest.mark.usefixtures("quick_compiler")


def test_old_checkpoints_are_deleted_and_the_last_is_restored(tmp_path):
    save_steps(tmp_path, 10, 20, 30, keep=2)
    assert saved_steps(tmp_path) == [20, 30]
    step, restored, lines = restore(tmp_path)
    assert step == 30
    assert lines == []
    jax.tree.map(np.testing.assert_array_equal, restored, small_state(30.0))
    assert restored["params"]["b"].dtype == jnp.bfloat16


def test_arrays_get_the_sharding_of_the_run(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.arange(8.0)})
    _, restored, _ = restore(tmp_path, {"w": jax.device_put(jnp.zeros(8), split)})
    assert restored["w"].sharding == split
    np.testing.assert_array_equal(restored["w"], np.arange(8.0))


def test_without_a_checkpoint_the_state_is_returned(tmp_path):
    first = small_state(5.0)
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        assert checkpoints.restore(first) == (0, first)
        assert checkpoints.latest_step is None


def test_a_new_run_does_not_overwrite_checkpoints(tmp_path):
    save_steps(tmp_path, 4)
    with pytest.raises(CheckpointError, match="the last of step 4: continue from them with"):
        Checkpoints(tmp_path)


def test_a_step_is_not_overwritten(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": jnp.zeros(3)})
        with pytest.raises(CheckpointError, match="exists already, and is not overwritten"):
            checkpoints.save(1, {"x": jnp.ones(3)})


def test_64_bit_host_values_are_kept(tmp_path):
    """JAX has 32 bits by default."""
    state = {"seed": 2**40 + 5, "x": np.array([1 / 3]), "n": np.int64(2**40)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        step, restored = checkpoints.restore(state)
    assert (step, restored["seed"], restored["x"][0], restored["n"]) == (1, 2**40 + 5, 1 / 3, 2**40)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (small_state(width=4), r"its params/w is float32\[3\], and the run's is float32\[4\]"),
        ({**small_state(), "momentum": jnp.zeros(1)}, "it has no momentum"),
        ({"params": {"w": jnp.zeros(3)}}, "it has params/b, and the run has not"),
        (
            {"params": {"w": jnp.zeros(3, jnp.bfloat16), "b": jnp.zeros(2, jnp.bfloat16)}},
            r"its params/w is float32\[3\], and the run's is bfloat16\[3\]",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_an_error(tmp_path, other, message):
    save_steps(tmp_path, 4)
    with pytest.raises(CheckpointError, match=f"step 4 in .* is of another model.*{message}"):
        restore(tmp_path, other)
    assert restore(tmp_path)[0] == 4  # it is kept


def test_descriptions_do_not_depend_on_values():
    assert (
        first_difference(describe_tensors(small_state()), describe_tensors(small_state(2.0)))
        is None
    )
    assert describe_tensors(small_state())["params/b"] == "bfloat16[2]"


class TestFolders:
    def test_a_file(self, tmp_path):
        (tmp_path / "file").write_text("mine")
        for path in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(CheckpointError, match=f"cannot write checkpoints to {path}: "):
                Checkpoints(path)
        assert (tmp_path / "file").read_text() == "mine"

    def test_a_folder_that_cannot_be_created(self):
        with pytest.raises(CheckpointError, match="cannot write checkpoints to /proc/checkpoints"):
            Checkpoints("/proc/checkpoints")

    def test_checkpoints_of_orbax(self, tmp_path):
        (tmp_path / "4" / "state").mkdir(parents=True)
        (tmp_path / "4" / "_CHECKPOINT_METADATA").write_text("{}")
        for resume in (True, False):
            with pytest.raises(CheckpointError, match="has checkpoints of an older format, which"):
                Checkpoints(tmp_path, resume=resume)

    def test_a_full_disk_is_noticed_before_writing(self, tmp_path, monkeypatch):
        usage = type("usage", (), {"free": 15})
        monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
        with (
            Checkpoints(tmp_path) as checkpoints,
            pytest.raises(CheckpointError, match="it needs 16 B, and 15 B are free"),
        ):
            checkpoints.save(4, small_state())
        assert saved_steps(tmp_path) == []


class TestThread:
    @pytest.fixture
    def full(self, monkeypatch):
        """Let every fsync fail."""

        def fails(handle):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", fails)

    def test_the_next_save_and_close_raise_the_error(self, tmp_path, full):
        message = f"cannot write {tmp_path}: No space left on device"
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(4, small_state())
        with pytest.raises(CheckpointError, match=message):
            checkpoints.save(8, small_state())
        checkpoints.save(8, small_state())
        with pytest.raises(CheckpointError, match=message):
            checkpoints.close()
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []

    def test_the_error_that_ends_a_run_propagates(self, tmp_path, full, capsys):
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(4, small_state())
        with pytest.raises(ZeroDivisionError), checkpoints:
            _ = 1 / 0
        assert "No space left on device" in capsys.readouterr().err

    def test_save_waits_for_the_state_and_not_for_the_disk(self, tmp_path, monkeypatch):
        may_go, real = threading.Event(), os.fsync
        monkeypatch.setattr(os, "fsync", lambda handle: (may_go.wait(30), real(handle))[1])
        with Checkpoints(tmp_path) as checkpoints:
            now = small_state(4.0)
            checkpoints.save(4, now)
            assert checkpoints.latest_step is None
            jax.tree.map(lambda x: x.delete(), now)  # as donation does
            may_go.set()
        step, restored, _ = restore(tmp_path)
        assert step == 4
        jax.tree.map(np.testing.assert_array_equal, restored, small_state(4.0))

    def test_two_threads_can_wait(self, tmp_path, monkeypatch):
        may_go, waits, real = threading.Event(), threading.Event(), os.fsync
        monkeypatch.setattr(os, "fsync", lambda handle: (may_go.wait(30), real(handle))[1])
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(4, small_state())
        first = threading.Thread(target=lambda: (waits.set(), checkpoints.finish()))
        first.start()
        waits.wait(30)
        threading.Timer(0.2, may_go.set).start()
        checkpoints.finish()
        assert checkpoints.latest_step == 4
        first.join(30)
        checkpoints.close()
