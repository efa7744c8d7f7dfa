"""Checkpoints of states that are sharded over ranks and processes."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ftmesh.checkpoint import snapshot
from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.errors import TrainingError
from tests.support.checkpointing import flip_bit, saved_steps, small_state
from tests.support.device_memory import PeakMemory
from tests.support.known_state import (
    assert_same_bits,
    initial_state,
    make_params,
    storing_optimizer,
)

pytestmark = pytest.mark.usefixtures("quick_compiler")


class TwoProcesses:
    """Two processes with every second device each, and a state that is sharded over both."""

    def __init__(self, folder, saved):
        self.folder, self.saved = folder, saved
        self.rank = {device: rank for rank, device in enumerate(saved.devices)}

    def open(self, process, **options):
        return Checkpoints(
            self.folder,
            process=process,
            process_of=lambda device: self.rank[device] % 2,
            **{"resume": True, **options},
        )

    def save(self, step, processes=(0, 1), **options):
        for process in processes:
            with self.open(process, **options) as checkpoints:
                self.save_to(checkpoints, step)

    def save_to(self, checkpoints, step):
        state, full_types, devices = self.saved
        checkpoints.save(step, state, full_types=full_types, devices=devices)

    def restore_from(self, checkpoints):
        step, restored = checkpoints.restore(self.saved.state, full_types=self.saved.full_types)
        assert_same_bits(restored, self.saved.state)
        return step


@pytest.fixture(scope="module")
def sharded(quick_compiler):
    return initial_state("row_pair on devices", make_params(), storing_optimizer())


@pytest.fixture
def two(sharded, tmp_path):
    return TwoProcesses(tmp_path, sharded)


class TestTwoProcesses:
    def test_a_checkpoint_is_complete_once_both_have_written(self, two):
        two.save(4)
        two.save(8, [1])
        with two.open(0) as first:
            assert first.latest_step == 4
        two.save(8, [0])
        for process in (0, 1):
            with two.open(process) as checkpoints:
                assert checkpoints.latest_step == 8
                assert two.restore_from(checkpoints) == 8

    def test_old_checkpoints_are_deleted_once_newer_ones_are_complete(self, two):
        for step in (4, 8, 12):
            two.save(step, keep=1)
        assert saved_steps(two.folder) == [
            8,
            12,
        ]  # 12 was not complete when the first had written it
        two.save(16, [1], keep=1)
        two.save(16, [0], keep=1)
        assert saved_steps(two.folder) == [16]

    def test_old_files_do_not_complete_a_checkpoint(self, two):
        """Step 8 is written again on the same mesh: it is incomplete until both have done so."""
        two.save(4)
        two.save(8)
        flip_bit(two.folder / "8" / "0.bin")
        with two.open(0) as first, two.open(1) as second:
            assert two.restore_from(first) == 4
            assert two.restore_from(second) == 4
            two.save_to(first, 8)
            first.close()
            assert first.latest_step == 4
            two.save_to(second, 8)
            second.close()
            assert first.latest_step == 8

    def test_a_new_run_after_one_that_was_killed_early(self, two):
        two.save(4, [1])
        with two.open(0, resume=False) as first, two.open(1, resume=False):
            two.save_to(first, 4)
            first.close()
            assert first.latest_step is None

    def test_only_the_first_process_prints(self, two, capsys):
        (two.folder / "9").mkdir()
        for process in (1, 0):
            with two.open(process) as checkpoints:
                checkpoints.restore(small_state())
        assert capsys.readouterr().err.count("skipped the checkpoint of step 9") == 1


class TestMemory:
    def growth(self, sharded, folder, monkeypatch, copy):
        """Return how much the memory of a device grows while a state is copied to the host."""
        peak = PeakMemory()
        monkeypatch.setattr(snapshot, "_copy_to_host", peak.wrap(copy))
        with Checkpoints(folder) as checkpoints:
            state, full_types, devices = sharded
            checkpoints.save(1, state, full_types=full_types, devices=devices)
        peak.update()
        return peak.growth

    def test_saving_allocates_nothing_on_devices(self, sharded, tmp_path, monkeypatch):
        assert self.growth(sharded, tmp_path, monkeypatch, snapshot._copy_to_host) <= 1.2

    def test_a_gather_would_be_noticed(self, sharded, tmp_path, monkeypatch):
        gathered, real = [], snapshot._copy_to_host

        def gathering(sources):
            tiles = sharded.state.same["tiles"]
            replicated = NamedSharding(tiles.sharding.mesh, PartitionSpec())
            gathered.append(jax.device_put(tiles, replicated))
            return real(sources)

        assert self.growth(sharded, tmp_path, monkeypatch, gathering) > 1.2


class TestNotFinite:
    def test_in_sharded_tensors(self, sharded, tmp_path):
        """It is an error in a tensor, and allowed in padding: 91 elements on twelve ranks."""
        state, full_types, devices = sharded
        assert state.same["kernel"].shape == (96,)

        def spoiled(index, value):
            kernel = state.same["kernel"].at[index].set(value)
            return state._replace(same=state.same | {"kernel": kernel})

        options = {"full_types": full_types, "devices": devices}
        with Checkpoints(tmp_path) as checkpoints:
            for step, index in enumerate([91, 95]):
                checkpoints.save(step, spoiled(index, np.nan), **options)
            for index, value in ((90, np.inf), (0, np.nan), (40, -np.inf)):
                with pytest.raises(TrainingError, match="not finite, in same/kernel"):
                    checkpoints.save(9, spoiled(index, value), **options)
        assert saved_steps(tmp_path) == [0, 1]
