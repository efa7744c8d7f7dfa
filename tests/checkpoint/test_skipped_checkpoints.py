"""Damaged checkpoints are skipped; states that are not finite are never saved."""

import os
import shutil
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.checkpoint.storage import dump_json, load_json
from ftmesh.errors import CheckpointError, DamagedCheckpointError, TrainingError
from tests.support.checkpointing import flip_bit, restore, save_steps, saved_steps, small_state

pytestmark = pytest.mark.usefixtures("quick_compiler")


def damage(folder, rng):
    """Flip a bit; cut, lengthen or delete a file; or delete all files."""
    path = folder / rng.choice(["index.json", "0.json", "0.bin"])
    raw = path.read_bytes()
    match rng.integers(6):
        case 0 | 1:
            flip_bit(path, position=rng.integers(len(raw)))
        case 2:
            path.write_bytes(raw[: rng.integers(len(raw))])
        case 3:
            path.write_bytes(raw + rng.bytes(3))
        case 4:
            path.unlink()
        case 5:
            for path in folder.iterdir():
                path.unlink()


class TestDamaged:
    """The newest undamaged checkpoint is restored, and a line says what was skipped and why."""

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("index.json", "its index.json is damaged"),
            ("0.json", "its 0.json is damaged"),
            ("0.bin", "params/b in 0.bin is damaged"),
        ],
    )
    def test_a_flipped_bit(self, tmp_path, name, reason):
        save_steps(tmp_path, 4, 8)
        flip_bit(tmp_path / "8" / name)
        step, restored, lines = restore(tmp_path)
        assert step == 4
        jax.tree.map(np.testing.assert_array_equal, restored, small_state(4.0))
        assert lines == [f"skipped the checkpoint of step 8 in {tmp_path}: {reason}"]

    def test_two_hundred_random_faults(self, tmp_path):
        """A step is restored bit for bit, or a line says why not; older ones are kept."""
        save_steps(tmp_path / "undamaged", 4, 8, 12, keep=9)
        rng = np.random.default_rng(0)
        restored_steps = []
        for number in range(200):
            folder = tmp_path / str(number)
            shutil.copytree(tmp_path / "undamaged", folder)
            for step in rng.permutation([8, 12])[: rng.integers(1, 3)]:
                damage(folder / str(step), rng)
            step, restored, lines = restore(folder)
            jax.tree.map(np.testing.assert_array_equal, restored, small_state(float(step)))
            assert len(lines) == sum(other > step for other in saved_steps(folder))
            assert all(line.startswith("skipped the checkpoint of step") for line in lines)
            restored_steps.append(step)
            shutil.rmtree(folder)
        assert {*restored_steps} == {4, 8, 12}

    def test_files_that_a_killed_run_did_not_write(self, tmp_path):
        save_steps(tmp_path, 4, 8, 12, 16, keep=9)
        (tmp_path / "20").mkdir()
        (tmp_path / "16" / "index.json").unlink()
        (tmp_path / "12" / "0.json").unlink()
        (tmp_path / "8" / "0.bin").write_bytes(b"123")
        (tmp_path / "notes").mkdir()
        (tmp_path / "007").mkdir()
        step, _, lines = restore(tmp_path)
        assert step == 4
        assert [line.rpartition(": ")[2] for line in lines] == [
            "it has no index.json",
            "it has no index.json",
            "it has no 0.json",
            "its 0.bin has 3 bytes, and should have 16",
        ]

    def test_a_pipe_in_place_of_a_file_does_not_block(self, tmp_path):
        save_steps(tmp_path, 4, 8)
        (tmp_path / "8" / "index.json").unlink()
        os.mkfifo(tmp_path / "8" / "index.json")
        assert restore(tmp_path)[0] == 4

    @pytest.mark.parametrize("name", ["index.json", "0.json", "0.bin"])
    @pytest.mark.parametrize("kind", ["folder", "full folder", "pipe", "link to a pipe", "socket"])
    def test_what_is_not_a_file_is_skipped_and_replaced(self, tmp_path, monkeypatch, name, kind):
        folder = tmp_path / "runs"
        save_steps(folder, 4, 8)
        path = folder / "8" / name
        path.unlink()
        with socket.socket(socket.AF_UNIX) as listener:
            match kind:
                case "folder" | "full folder":
                    path.mkdir()
                    if kind == "full folder":
                        (path / "a").touch()
                case "pipe":
                    os.mkfifo(path)
                case "link to a pipe":
                    os.mkfifo(tmp_path / "pipe")
                    path.symlink_to(tmp_path / "pipe")
                case "socket":
                    monkeypatch.chdir(path.parent)  # names of sockets are short
                    listener.bind(name)
            step, restored, lines = restore(folder)
        assert step == 4
        jax.tree.map(np.testing.assert_array_equal, restored, small_state(4.0))
        reason = f"its {name} is not a file"
        assert lines == [f"skipped the checkpoint of step 8 in {folder}: {reason}"]
        save_steps(folder, 8, resume=True)
        assert restore(folder)[0] == 8

    def test_nothing_is_deleted_unless_processes_agree(self, tmp_path):
        save_steps(tmp_path, 3, 6)
        flip_bit(tmp_path / "6" / "0.bin")

        def disagree(result):
            assert result.startswith("3, not 6: ")
            raise CheckpointError("another has 6")

        with (
            Checkpoints(tmp_path, resume=True, log=lambda line: None) as checkpoints,
            pytest.raises(CheckpointError, match="another has 6"),
        ):
            checkpoints.restore(small_state(0.0), agree=disagree)
        assert (tmp_path / "6" / "index.json").exists()
        flip_bit(tmp_path / "6" / "0.bin")
        assert restore(tmp_path)[0] == 6

    def test_without_an_undamaged_checkpoint_nothing_is_deleted(self, tmp_path):
        """Whoever resumes a run does not want to begin again, and may have another copy."""
        save_steps(tmp_path, 4, 8)
        for step in (4, 8):
            flip_bit(tmp_path / str(step) / "0.bin")
        with pytest.raises(DamagedCheckpointError, match=r"all .* are damaged, the last of step 8"):
            restore(tmp_path)
        flip_bit(tmp_path / "4" / "0.bin")
        assert restore(tmp_path)[0] == 4

    def test_lines_go_to_stderr(self, tmp_path, capsys):
        (tmp_path / "9").mkdir()
        with Checkpoints(tmp_path, resume=True) as checkpoints:
            assert checkpoints.restore(small_state())[0] == 0
        printed = capsys.readouterr().err
        assert printed == f"skipped the checkpoint of step 9 in {tmp_path}: it has no index.json\n"

    def test_another_format_is_an_error(self, tmp_path):
        save_steps(tmp_path, 4, 8)
        path = tmp_path / "8" / "index.json"
        path.write_text(
            dump_json(load_json(path.read_bytes(), path.name) | {"format": "ftmesh.checkpoint/9"})
        )
        with pytest.raises(CheckpointError, match=r"8 is of format 'ftmesh\.checkpoint/9', and"):
            restore(tmp_path)


class TestNotFinite:
    @pytest.mark.parametrize(
        "extra",
        [
            {"best_loss": jnp.nan},
            {"w": jnp.array([1.0, jnp.inf])},
            {"w": jnp.array([1.0, jnp.nan])},
            {"w": jnp.array([1.0, -jnp.inf], jnp.bfloat16)},
            {"w": jnp.array([1.0, 1j * jnp.inf])},
        ],
    )
    def test_a_state_that_is_not_finite_is_not_saved(self, tmp_path, extra):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(4, small_state())
            name = next(iter(extra))
            with pytest.raises(TrainingError, match=f"after step 8 has .* not finite, in {name}"):
                checkpoints.save(8, small_state() | extra)
        assert saved_steps(tmp_path) == [4]

    def test_infinite_scalars_and_integers_are_saved(self, tmp_path):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, small_state() | {"best_loss": jnp.inf})  # the initial value
            checkpoints.save(2, {"count": jnp.arange(3), "nothing": jnp.zeros(0)})
        assert saved_steps(tmp_path) == [1, 2]
