"""Checkpoints that are damaged are passed over; what is not finite is never saved."""

import os
import shutil
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.checkpoint.writer import dump, load
from ftmesh.errors import CheckpointError, TrainingError
from tests.support.checkpointing import flip, restored, saved, state, steps

pytestmark = pytest.mark.usefixtures("quick_compiler")


def damage(folder, rng):
    """Flip a bit of a checkpoint, cut, lengthen or take away a file, or all of them."""
    path = folder / rng.choice(["index.json", "0.json", "0.bin"])
    raw = path.read_bytes()
    match rng.integers(6):
        case 0 | 1:
            flip(path, at=rng.integers(len(raw)))
        case 2:
            path.write_bytes(raw[: rng.integers(len(raw))])
        case 3:
            path.write_bytes(raw + rng.bytes(3))
        case 4:
            path.unlink()
        case 5:
            for each in folder.iterdir():
                each.unlink()


class TestWhatIsNotSound:
    """The newest that is sound is taken, and a line says what was passed over, and why."""

    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("index.json", "its index.json is damaged"),
            ("0.json", "its 0.json is damaged"),
            ("0.bin", "params/b in 0.bin is damaged"),
        ],
    )
    def test_a_flipped_bit(self, tmp_path, name, why):
        saved(tmp_path, 4, 8)
        flip(tmp_path / "8" / name)
        step, found, lines = restored(tmp_path)
        assert step == 4
        jax.tree.map(np.testing.assert_array_equal, found, state(4.0))
        assert lines == [f"passed over the checkpoint of step 8 in {tmp_path}: {why}"]

    def test_two_hundred_damages_at_random(self, tmp_path):
        """A whole step is restored to the bit, or a line says why not; and the older ones stay."""
        saved(tmp_path / "whole", 4, 8, 12, keep=9)
        rng = np.random.default_rng(0)
        found_at = []
        for number in range(200):
            folder = tmp_path / str(number)
            shutil.copytree(tmp_path / "whole", folder)
            for step in rng.permutation([8, 12])[: rng.integers(1, 3)]:
                damage(folder / str(step), rng)
            step, found, lines = restored(folder)
            jax.tree.map(np.testing.assert_array_equal, found, state(float(step)))
            assert len(lines) == sum(other > step for other in steps(folder))
            assert all(line.startswith("passed over the checkpoint of step") for line in lines)
            found_at.append(step)
            shutil.rmtree(folder)
        assert {*found_at} == {4, 8, 12}

    def test_files_that_a_killed_run_did_not_come_to(self, tmp_path):
        saved(tmp_path, 4, 8, 12, 16, keep=9)
        (tmp_path / "20").mkdir()
        (tmp_path / "16" / "index.json").unlink()
        (tmp_path / "12" / "0.json").unlink()
        (tmp_path / "8" / "0.bin").write_bytes(b"123")
        (tmp_path / "notes").mkdir()
        (tmp_path / "007").mkdir()
        step, _, lines = restored(tmp_path)
        assert step == 4
        assert [line.rpartition(": ")[2] for line in lines] == [
            "it has no index.json",
            "it has no index.json",
            "it has no 0.json",
            "its 0.bin has 3 bytes, and should have 16",
        ]

    def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(self, tmp_path):
        saved(tmp_path, 4, 8)
        (tmp_path / "8" / "index.json").unlink()
        os.mkfifo(tmp_path / "8" / "index.json")
        assert restored(tmp_path)[0] == 4

    @pytest.mark.parametrize("name", ["index.json", "0.json", "0.bin"])
    @pytest.mark.parametrize("kind", ["folder", "full folder", "pipe", "link to a pipe", "socket"])
    def test_what_is_no_file_is_passed_over_and_written_again(
        self, tmp_path, monkeypatch, name, kind
    ):
        folder = tmp_path / "runs"
        saved(folder, 4, 8)
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
            step, found, lines = restored(folder)
        assert step == 4
        jax.tree.map(np.testing.assert_array_equal, found, state(4.0))
        why = f"its {name} is not a file"
        assert lines == [f"passed over the checkpoint of step 8 in {folder}: {why}"]
        saved(folder, 8, resume=True)
        assert restored(folder)[0] == 8

    def test_what_processes_do_not_agree_on_is_left_alone(self, tmp_path):
        saved(tmp_path, 3, 6)
        flip(tmp_path / "6" / "0.bin")

        def disagree(found):
            assert found.startswith("3, not 6: ")
            raise CheckpointError("another has 6")

        with (
            Checkpoints(tmp_path, resume=True, say=lambda line: None) as checkpoints,
            pytest.raises(CheckpointError, match="another has 6"),
        ):
            checkpoints.restore(state(0.0), agree=disagree)
        assert (tmp_path / "6" / "index.json").exists()
        flip(tmp_path / "6" / "0.bin")
        assert restored(tmp_path)[0] == 6

    def test_nothing_sound_is_nothing(self, tmp_path):
        saved(tmp_path, 4)
        flip(tmp_path / "4" / "0.bin")
        assert restored(tmp_path)[0] == 0

    def test_the_lines_go_to_people(self, tmp_path, capsys):
        (tmp_path / "9").mkdir()
        with Checkpoints(tmp_path, resume=True) as checkpoints:
            assert checkpoints.restore(state())[0] == 0
        said = capsys.readouterr().err
        assert said == f"passed over the checkpoint of step 9 in {tmp_path}: it has no index.json\n"

    def test_another_version_is_refused_in_one_line(self, tmp_path):
        saved(tmp_path, 4, 8)
        path = tmp_path / "8" / "index.json"
        path.write_text(
            dump(load(path.read_bytes(), path.name) | {"format": "ftmesh.checkpoint/9"})
        )
        with pytest.raises(CheckpointError, match=r"8 is of format 'ftmesh\.checkpoint/9', and"):
            restored(tmp_path)


class TestWhatIsNotFinite:
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
    def test_it_is_never_saved(self, tmp_path, extra):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(4, state())
            name = next(iter(extra))
            with pytest.raises(TrainingError, match=f"after step 8 has .* not finite, in {name}"):
                checkpoints.save(8, state() | extra)
        assert steps(tmp_path) == [4]

    def test_what_is_worth_keeping(self, tmp_path):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, state() | {"best_loss": jnp.inf})  # as optimizers keep it at first
            checkpoints.save(2, {"count": jnp.arange(3), "nothing": jnp.zeros(0)})
        assert steps(tmp_path) == [1, 2]
