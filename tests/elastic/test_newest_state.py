"""The state that a generation continues from, and what it leaves of earlier ones."""

from contextlib import ExitStack

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ftmesh.checkpoint import Checkpoints
from ftmesh.elastic import step_commit
from ftmesh.elastic.controller_client import Membership
from ftmesh.elastic.elastic_group import ElasticGroup
from ftmesh.elastic.peer_checkpoint import PeerCheckpoint
from ftmesh.elastic.step_commit import HeldStep, newest_state
from ftmesh.errors import CheckpointError
from tests.support.peer_stores import SECRET, running_stores
from tests.support.pods import process_groups, run_in_all


def process_of(device):
    return device.id % 2


def state(value, devices=slice(2)):
    """An array that is cut over both processes; of four devices, two have each half."""
    mesh = Mesh(np.array(jax.devices()[devices]).reshape(-1, 2), ("copy", "x"))
    return {"w": jax.device_put(jnp.full(4, float(value)), NamedSharding(mesh, P("x")))}


class Generation:
    """A controller that says which generation it is, and of which start."""

    def __init__(self, number, first):
        self.membership, self.first_generation = Membership(number, (0, 1)), first


class Processes:
    """Two processes, as threads, with checkpoints on disk and in peer stores."""

    def __init__(self, folder, stores, generation, *, first=None):
        self.stack = ExitStack()
        self.groups = [
            ElasticGroup(**vars(group), controller=Generation(generation, first or generation))
            for group in self.stack.enter_context(process_groups(2))
        ]
        addresses = {host: store.address for host, store in stores.items()}
        self.peers = [
            self.stack.enter_context(
                PeerCheckpoint(
                    addresses, host=process, secret=SECRET, process=process,
                    generation=generation, process_of=process_of, say=lambda line: None,
                )
            )
            for process in (0, 1)
        ]  # fmt: skip
        self.checkpoints = [
            self.stack.enter_context(
                Checkpoints(folder, resume=True, process=process, process_of=process_of)
            )
            for process in (0, 1)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stack.close()

    def save(self, stores, step, processes=(1, 0)):
        for process in processes:
            stores[process].save(step, state(step))
            stores[process].finish()

    def newest(self, held=None, like=None):
        """The step, value and source that both processes continue from, or their errors."""

        def find(group):
            own = self.checkpoints[group.process]
            step, found, source = newest_state(
                group, self.peers[group.process], held, like or state(0), None, None, own,
                own.latest_step, None,
            )  # fmt: skip
            return step, float(found["w"][0]), source

        return run_in_all(find, self.groups)


@pytest.fixture
def stores():
    with running_stores(2) as running:
        yield running


class TestParts:
    """A process was lost while the others had written their parts of the checkpoint of step 50."""

    @pytest.mark.parametrize("written", [(1,), (0,)])
    def test_they_do_not_complete_the_next_one(self, tmp_path, stores, written):
        with Processes(tmp_path, stores, 1) as run:
            run.save(run.checkpoints, 40)
            run.save(run.peers, 48)
            run.save(run.checkpoints, 50, written)
        with Processes(tmp_path, stores, 2) as run:
            assert run.newest() == [(48, 48.0, "host memory")] * 2
            first, second = run.checkpoints
            for process in (0, 1):
                assert first.latest_step == second.latest_step == 40
                run.save(run.checkpoints, 50, [process])
            assert first.latest_step == second.latest_step == 50

    def test_of_a_process_that_is_lost_for_good(self, tmp_path, stores):
        (tmp_path / "50").mkdir()
        (tmp_path / "50" / "7.json").touch()
        (tmp_path / "50" / "notes.txt").touch()
        with Processes(tmp_path, stores, 1) as run:
            assert run.newest() == [(0, 0.0, "start")] * 2
        assert [path.name for path in (tmp_path / "50").iterdir()] == ["notes.txt"]

    def test_complete_checkpoints_are_kept(self, tmp_path, stores):
        """From the devices a run may go back to before a checkpoint."""
        with Processes(tmp_path, stores, 2, first=1) as run:
            run.save(run.checkpoints, 50)
            assert run.newest(HeldStep(49, state(49))) == [(49, 49.0, "devices")] * 2
            assert run.checkpoints[0].latest_step == 50


class TestHeld:
    """The processes hold a state of which each has a part."""

    @pytest.fixture(autouse=True)
    def cut(self, monkeypatch):
        """In one process every array is whole, and all devices are of one process."""
        monkeypatch.setattr(step_commit, "surviving_parts", lambda *arguments: (False, True))

    def test_a_newer_checkpoint_is_no_loss(self, tmp_path, stores):
        """Step 50 was saved before the commit of the step was known."""
        with Processes(tmp_path, stores, 2, first=1) as run:
            run.save(run.checkpoints, 50)
            assert run.newest(HeldStep(49, state(49))) == [(49, 49.0, "devices")] * 2

    def test_it_is_saved_from_healthy_chips(self, tmp_path, stores):
        """The first chip is out, and its copy of the first half wrong."""
        held = state(49, slice(4))
        shards = held["w"].addressable_shards
        held["w"] = jax.make_array_from_single_device_arrays(
            (4,), held["w"].sharding, [x.data + (x.device.id == 0) for x in shards]
        )
        with Processes(tmp_path, stores, 2, first=1) as run:
            found = run.newest(HeldStep(49, held), state(0, slice(2, 4)))
            assert found == [(49, 49.0, "devices")] * 2

    def test_a_lost_part(self, tmp_path, stores, monkeypatch):
        monkeypatch.setattr(step_commit, "_save_parts", lambda *arguments: None)
        with Processes(tmp_path, stores, 2, first=1) as run:
            run.save(run.peers, 48)
            for error in run.newest(HeldStep(49, state(49))):
                assert isinstance(error, CheckpointError)
                assert str(error) == "a part of step 49 was lost"
