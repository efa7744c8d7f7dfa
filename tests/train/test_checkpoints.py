"""Checkpoints: whole, the last few, refused where they do not fit, passed over where damaged."""

import errno
import os
import shutil
import socket
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_memory import Watch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from remembering import assert_same_bits, held, parameters, remember

from ftmesh.errors import CheckpointError, TrainingError
from ftmesh.saved import snapshot
from ftmesh.saved.files import dump, load
from ftmesh.saved.naming import about
from ftmesh.saved.newest import first_difference
from ftmesh.train.checkpoints import Checkpoints

pytestmark = pytest.mark.usefixtures("quick_compiler")


def state(scale=1.0, width=3):
    return {"params": {"w": scale * jnp.arange(float(width)), "b": jnp.zeros(2, jnp.bfloat16)}}


def steps(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def saved(folder, *numbers, **options):
    with Checkpoints(folder, **options) as checkpoints:
        for step in numbers:
            checkpoints.save(step, state(float(step)))


def restored(folder, like=None):
    """The step, the state, and the lines that are said."""
    lines = []
    with Checkpoints(folder, resume=True, say=lines.append) as checkpoints:
        step, found = checkpoints.restore(like or state(0.0))
    return step, found, lines


def flip(path, at=3):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 16
    path.write_bytes(raw)


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


class Two:
    """Two processes with every second device each, and a state that both have part in."""

    def __init__(self, folder, of):
        self.folder, self.of = folder, of
        self.place = {device: rank for rank, device in enumerate(of.devices)}

    def open(self, process, **options):
        return Checkpoints(
            self.folder,
            process=process,
            process_of=lambda device: self.place[device] % 2,
            **{"resume": True, **options},
        )

    def save(self, step, processes=(0, 1), **options):
        for process in processes:
            with self.open(process, **options) as checkpoints:
                self.save_to(checkpoints, step)

    def save_to(self, checkpoints, step):
        state, layouts, devices = self.of
        checkpoints.save(step, state, layouts=layouts, devices=devices)

    def restore_from(self, checkpoints):
        step, found = checkpoints.restore(self.of.state, layouts=self.of.layouts)
        assert_same_bits(found, self.of.state)
        return step


@pytest.fixture(scope="module")
def sharded(quick_compiler):
    return held("row_pair on devices", parameters(), remember())


@pytest.fixture
def two(sharded, tmp_path):
    return Two(tmp_path, sharded)


class TestTwoProcesses:
    def test_a_checkpoint_is_there_when_both_have_written(self, two):
        two.save(4)
        two.save(8, [1])
        with two.open(0) as first:
            assert first.latest_step == 4
        two.save(8, [0])
        for process in (0, 1):
            with two.open(process) as checkpoints:
                assert checkpoints.latest_step == 8
                assert two.restore_from(checkpoints) == 8

    def test_what_is_too_old_goes_when_enough_is_complete(self, two):
        for step in (4, 8, 12):
            two.save(step, keep=1)
        assert steps(two.folder) == [8, 12]  # 12 was not complete when the first had written it
        two.save(16, [1], keep=1)
        two.save(16, [0], keep=1)
        assert steps(two.folder) == [16]

    def test_what_was_left_does_not_stand_in_for_a_part_that_is_missing(self, two):
        """Step 8 is written again, on the same mesh: before both have done so, it is none."""
        two.save(4)
        two.save(8)
        flip(two.folder / "8" / "0.bin")
        with two.open(0) as first, two.open(1) as second:
            assert two.restore_from(first) == 4
            assert two.restore_from(second) == 4
            two.save_to(first, 8)
            first.close()
            assert first.latest_step == 4
            two.save_to(second, 8)
            second.close()
            assert first.latest_step == 8

    def test_a_new_run_where_another_was_killed_early(self, two):
        two.save(4, [1])
        with two.open(0, resume=False) as first, two.open(1, resume=False):
            two.save_to(first, 4)
            first.close()
            assert first.latest_step is None

    def test_only_the_first_speaks(self, two, capsys):
        (two.folder / "9").mkdir()
        for process in (1, 0):
            with two.open(process) as checkpoints:
                checkpoints.restore(state())
        assert capsys.readouterr().err.count("passed over the checkpoint of step 9") == 1


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

    def test_in_what_a_rank_owns(self, sharded, tmp_path):
        """In a tensor it is refused; in padding, or where a rank owns nothing, it is no matter."""
        state, layouts, devices = sharded
        bucket = layouts[0].buckets[0]
        assert bucket.packing.shapes == ((300,),)
        chunk, last = divmod(299, bucket.packing.width)  # a row each; what follows is padding
        assert bucket.packing.rows == 1
        assert last + 1 < bucket.packing.width
        (owner,), (place,) = np.nonzero(bucket.owned == chunk)
        idle = np.flatnonzero(bucket.owned[:, 0] == bucket.packing.num_chunks)[0]

        def spoiled(rank, row, column, value):
            arrays = list(state.rows[0])
            arrays[0] = arrays[0].at[rank * bucket.num_rows + row, column].set(value)
            return type(state)(state.inner, (tuple(arrays), *state.rows[1:]), state.owners)

        told = {"layouts": layouts, "devices": devices}
        with Checkpoints(tmp_path) as checkpoints:
            for step, bad in enumerate(
                [(owner, place, last + 1), (owner, place, -1), (idle, 0, 0)]
            ):
                checkpoints.save(step, spoiled(*bad, np.nan), **told)
            for value in (np.inf, np.nan):
                bad = spoiled(owner, place, last, value)
                with pytest.raises(TrainingError, match="not finite, in same/bias"):
                    checkpoints.save(9, bad, **told)
        assert steps(tmp_path) == [0, 1, 2]


class TestMemory:
    def growth(self, sharded, folder, monkeypatch, copy):
        """How much more a device holds while a state is copied to the host."""
        watch = Watch()
        monkeypatch.setattr(snapshot, "_on_host", watch.after(copy))
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(1, sharded.state, layouts=sharded.layouts, devices=sharded.devices)
        watch.look()
        return watch.growth

    def test_saving_takes_none_of_the_devices(self, sharded, tmp_path, monkeypatch):
        assert self.growth(sharded, tmp_path, monkeypatch, snapshot._on_host) <= 1.2

    def test_a_gather_would_be_seen(self, sharded, tmp_path, monkeypatch):
        held, real = [], snapshot._on_host

        def gathering(sources):
            whole = NamedSharding(sharded.state.rows[0][1].sharding.mesh, PartitionSpec())
            held.append(jax.device_put(sharded.state.rows[0][1], whole))
            return real(sources)

        assert self.growth(sharded, tmp_path, monkeypatch, gathering) > 1.2


def test_numbers_of_the_host_keep_their_bits(tmp_path):
    """JAX has no 64 bits, unless asked for."""
    state = {"seed": 2**40 + 5, "x": np.array([1 / 3]), "n": np.int64(2**40)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        step, found = checkpoints.restore(state)
    assert (step, found["seed"], found["x"][0], found["n"]) == (1, 2**40 + 5, 1 / 3, 2**40)


def test_nothing_is_written_over(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": jnp.zeros(3)})
        with pytest.raises(CheckpointError, match="is there already, and is not written over"):
            checkpoints.save(1, {"x": jnp.ones(3)})
