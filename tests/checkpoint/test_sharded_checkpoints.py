"""Checkpoints of states that ranks and processes share."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ftmesh.checkpoint import snapshot
from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.errors import TrainingError
from tests.support.checkpointing import flip, state, steps
from tests.support.device_memory import Watch
from tests.support.known_state import assert_same_bits, held, parameters, remember

pytestmark = pytest.mark.usefixtures("quick_compiler")


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


class TestWhatIsNotFinite:
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
