"""States in the memory of hosts: whole after a loss, the newest, never of two epochs."""

import threading
import time
from contextlib import ExitStack

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ftmesh.elastic.peer_checkpoint import Memory, Moment
from ftmesh.elastic.peer_store import Blobs, Keeper, serve
from ftmesh.elastic.rpc import Listener
from ftmesh.errors import CheckpointError, ClusterError, TrainingError
from tests.support.known_state import assert_same_bits, held, parameters, remember
from tests.support.peer_stores import SECRET, running

pytestmark = pytest.mark.usefixtures("quick_compiler")

HOSTS = 4


@pytest.fixture(scope="module")
def sharded(quick_compiler):
    return held("row_pair on devices", parameters(), remember())


@pytest.fixture(scope="module")
def started():
    with running(HOSTS) as keepers:
        yield keepers


@pytest.fixture
def keepers(started):
    """Those of four hosts, that hold nothing."""
    for keeper in started.values():
        with keeper.ask() as ask:
            ask.drop("")
    return started


@pytest.fixture
def mortal():
    """Those of four hosts, to be killed."""
    with running(HOSTS) as keepers:
        yield keepers


class Pod:
    """Several processes, one on each host, that have a state in common."""

    def __init__(self, keepers, of, *, epoch=1, processes=HOSTS, **options):
        self.state, self.layouts, self.devices = of
        self.processes, self.lines = range(processes), []
        place = {device: rank for rank, device in enumerate(of.devices or ())}
        addresses = {host: keeper.address for host, keeper in keepers.items()}
        self.memories = [
            Memory(
                addresses,
                host=process,
                secret=SECRET,
                process=process,
                epoch=epoch,
                process_of=lambda device: place[device] % processes,
                say=self.lines.append,
                **{"limit": 10.0, **options},
            )
            for process in self.processes
        ]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for memory in self.memories:
            memory.close()

    def at(self, step):
        return {"optimizer": self.state, "step": np.int64(step)}

    def save(self, *steps, processes=None):
        """The first process comes last, so that it finds everything there."""
        for step in steps:
            for process in reversed(self.processes if processes is None else processes):
                self.memories[process].save(
                    step, self.at(step), layouts=self.layouts, devices=self.devices
                )
                self.memories[process].finish()

    def restore(self, process=0):
        found = self.memories[process].restore(self.at(0), layouts=self.layouts)
        if found is None:
            return None
        step, state = found
        assert_same_bits(state["optimizer"], self.state)
        assert state["step"] == step
        return step


def moments(keepers):
    names = {name for keeper in keepers.values() for name in keeper.names("state/")}
    return sorted({tuple(Moment.of(name)) for name in names})


def test_each_part_is_at_its_host_and_the_next(keepers, sharded):
    with Pod(keepers, sharded) as pod:
        pod.save(30)
    for host in range(HOSTS):
        parts = {host, (host - 1) % HOSTS}
        names = {f"state/1/30/{part}.{kind}" for part in parts for kind in ("bin", "json")}
        index = {"state/1/30/index.json"} if 0 in parts else set()
        assert set(keepers[host].names()) == names | index
    assert pod.lines == []


@pytest.mark.parametrize("processes", [1, 3, 4])
def test_what_four_have_saved_any_number_restores(keepers, sharded, processes):
    with Pod(keepers, sharded) as pod:
        pod.save(30)
    with Pod(keepers, sharded, epoch=2, processes=processes) as pod:
        assert [pod.restore(process) for process in pod.processes] == [30] * processes
        assert pod.lines == []


@pytest.mark.slow
def test_on_another_mesh(keepers, sharded):
    with Pod(keepers, sharded) as pod:
        pod.save(30)
    whole = held("whole", parameters(), remember())
    with Pod(keepers, whole, epoch=2, processes=1) as pod:
        assert pod.restore() == 30


def test_nothing_is_none(keepers, sharded):
    agreed = []
    with Pod(keepers, sharded) as pod:
        assert pod.restore() is None
        assert pod.memories[0].restore(pod.at(0), agree=agreed.append) is None
    assert agreed == ["none"]


def test_one_of_another_model_is_refused(keepers, sharded):
    with Pod(keepers, sharded) as pod:
        pod.save(30)
        with pytest.raises(
            CheckpointError, match="step 30 of epoch 1 in the memory of hosts is of another model"
        ):
            pod.memories[0].restore({"step": np.int64(0)})


class TestLoss:
    def test_any_one_host_may_be_lost(self, mortal, sharded):
        with Pod(mortal, sharded) as pod:
            pod.save(10, 20)
        mortal[2].kill()
        with Pod(mortal, sharded, epoch=2, processes=3) as pod:
            assert [pod.restore(process) for process in pod.processes] == [20] * 3
            assert len(pod.lines) == 3
            assert all("host 2 has no keeper any more: nothing" in line for line in pod.lines)
            pod.lines.clear()
            pod.save(30)  # the last process has host 2's, which is gone, for its own
            assert pod.lines == []
        mortal[0].kill()
        with Pod(mortal, sharded, epoch=3, processes=1) as pod:
            assert pod.restore() == 30

    def test_of_two_neighbours_nothing_is_whole(self, mortal, sharded):
        with Pod(mortal, sharded) as pod:
            pod.save(10, 20)
        mortal[1].kill()
        mortal[2].kill()
        with Pod(mortal, sharded, epoch=2, processes=2) as pod:
            assert pod.restore() is None
            assert [line for line in pod.lines if "step 20" in line] == [
                "passed over the checkpoint of step 20 of epoch 1 in the memory of hosts: it has "
                "no 1.bin"
            ]

    @pytest.mark.slow
    def test_two_copies_bear_two_losses(self, mortal, sharded):
        with Pod(mortal, sharded, copies=2) as pod:
            pod.save(10)
        mortal[1].kill()
        mortal[2].kill()
        with Pod(mortal, sharded, epoch=2, processes=2) as pod:
            assert pod.restore() == 10

    @pytest.mark.slow
    def test_one_that_is_stuck(self, mortal, sharded):
        with Pod(mortal, sharded) as pod:
            pod.save(10)
        mortal[3].stop()
        begin = time.monotonic()
        with Pod(mortal, sharded, epoch=2, processes=1, limit=3) as pod:
            assert pod.restore() == 10
        assert time.monotonic() - begin < 30

    def test_a_copy_that_is_lost_is_made_elsewhere(self, mortal, sharded):
        mortal[1].kill()
        with Pod(mortal, sharded, processes=1) as pod:
            pod.save(10)
            assert len(pod.lines) == 1
        assert [host for host in (0, 2, 3) if mortal[host].names()] == [0, 2]

    def test_too_few_hosts_are_told(self, sharded):
        with running(2) as keepers, Pod(keepers, sharded, processes=1) as pod:
            keepers[0].kill()
            pod.save(10)
            assert pod.lines[-1] == (
                "process 0 has its part of step 10 of epoch 1 in the memory of 1 hosts, and not of "
                "2"
            )
            assert pod.restore() == 10


class TestWhatIsNotWhole:
    def test_a_step_of_which_a_part_is_missing(self, keepers, sharded):
        with Pod(keepers, sharded) as pod:
            pod.save(10)
            pod.save(20, processes=[0, 1, 3])
            assert pod.restore() == 10
            assert pod.lines == [
                "passed over the checkpoint of step 20 of epoch 1 in the memory of hosts: it has "
                "no 2.bin"
            ]
            pod.save(20, processes=[2])
            assert pod.restore() == 20

    def test_a_step_without_its_index(self, keepers, sharded):
        with Pod(keepers, sharded) as pod:
            pod.save(10)
            pod.save(20, processes=[1, 2, 3])
            assert pod.restore() == 10

    def test_another_epoch_does_not_complete_it(self, keepers, sharded):
        with Pod(keepers, sharded) as pod:
            pod.save(10)
            pod.save(20, processes=[0, 1, 3])
        with Pod(keepers, sharded, epoch=2) as pod:
            pod.save(20, processes=[2])
            assert pod.restore() == 10

    def test_a_later_step_of_an_earlier_epoch(self, keepers, sharded):
        """It was whole, and is one to go on from; where it was passed over, it is dropped."""
        with Pod(keepers, sharded) as pod:
            pod.save(20, 25)
        with Pod(keepers, sharded, epoch=2) as pod:
            pod.save(21)
            assert pod.restore() == 25
        with keepers[3].ask() as third, keepers[0].ask() as first:
            third.drop("state/1/25/3")
            first.drop("state/1/25/3")
        with Pod(keepers, sharded, epoch=3) as pod:
            assert [pod.restore(process) for process in pod.processes] == [21] * 4
        assert moments(keepers) == [(21, 2)]

    def test_what_processes_do_not_agree_on_is_left_alone(self, keepers, sharded):
        def disagree(found):
            assert found == "10 of epoch 1, not 20 of epoch 1: it has no 2.bin"
            raise ClusterError("another has 20")

        with Pod(keepers, sharded) as pod:
            pod.save(10)
            pod.save(20, processes=[0, 1, 3])
        with Pod(keepers, sharded, epoch=2) as pod:
            with pytest.raises(ClusterError, match="another has 20"):
                pod.memories[0].restore(pod.at(0), layouts=pod.layouts, agree=disagree)
            assert moments(keepers) == [(10, 1), (20, 1)]

    def test_the_same_step_again_takes_a_new_epoch(self, keepers, sharded):
        with Pod(keepers, sharded) as pod:
            pod.save(10)
            with pytest.raises(CheckpointError, match="10 is not after step 10, which epoch 1 has"):
                pod.save(10)


class TestAFlippedByte:
    @pytest.fixture
    def at_hand(self):
        """Keepers in this process: their memory can be reached."""
        blobs = {host: Blobs(1 << 30) for host in range(2)}
        with ExitStack() as stack:
            listeners = {
                host: stack.enter_context(
                    Listener(
                        lambda channel, held=held: serve(held, channel),
                        secret=SECRET,
                        most_data=1 << 30,
                    )
                )
                for host, held in blobs.items()
            }
            yield blobs, listeners

    def flip(self, blobs, name):
        data, crc32 = blobs._held[name]
        blobs._held[name] = bytes([data[0] ^ 1]) + data[1:], crc32

    def test_the_other_copy_is_taken(self, at_hand, sharded):
        blobs, keepers = at_hand
        with Pod(keepers, sharded, processes=2) as pod:
            pod.save(10)
            self.flip(blobs[0], "state/1/10/0.bin")
            assert pod.restore() == 10
            (line,) = pod.lines
            assert "refuses: state/1/10/0.bin was damaged in its memory" in line

    def test_both_are_and_it_is_passed_over(self, at_hand, sharded):
        blobs, keepers = at_hand
        with Pod(keepers, sharded, processes=2) as pod:
            pod.save(10, 20)
            for host in range(2):
                self.flip(blobs[host], "state/1/20/1.bin")
            assert pod.restore() == 10
            assert pod.lines[-1].endswith("of hosts: no host gives its 1.bin")

    def test_one_that_was_flipped_before_it_was_given(self, at_hand, sharded):
        """The keeper's checksum is right, and the piece's own is not."""
        _, keepers = at_hand
        with Pod(keepers, sharded, processes=2) as pod:
            pod.save(10, 20)
            for host in range(2):
                with Keeper(keepers[host].address, SECRET, 10) as keeper:
                    data = keeper.get("state/1/20/1.bin")
                    keeper.put("state/1/20/1.bin", bytes([data[0] ^ 1]) + data[1:])
            assert pod.restore() == 10
            assert pod.lines[-1].endswith("in 1.bin is damaged")


def test_the_last_few_are_kept(keepers, sharded):
    with Pod(keepers, sharded, keep=2) as pod:
        pod.save(10, 20, 30)
        assert moments(keepers) == [(20, 1), (30, 1)]
        pod.save(40, processes=[0, 1])
        assert moments(keepers) == [(20, 1), (30, 1), (40, 1)]  # 40 is not whole
    with Pod(keepers, sharded, keep=1, epoch=2, processes=3) as pod:
        pod.save(50)
    assert moments(keepers) == [(50, 2)]  # of processes that are gone, too


def test_a_keeper_without_room_is_told_and_training_goes_on(sharded):
    with running(1, limit=1000) as keepers, Pod(keepers, sharded, processes=1) as pod:
        pod.save(10)
        assert "state/1/10/0.bin has" in pod.lines[0]
        assert "of 1000 are free: drop some, or give the keeper more" in pod.lines[0]
        assert pod.lines[1].endswith("in the memory of 0 hosts, and not of 1")
        assert pod.restore() is None


def test_a_state_that_is_not_finite_is_never_kept(keepers):
    addresses = {host: keeper.address for host, keeper in keepers.items()}
    with Memory(addresses, host=0, secret=SECRET, process=0) as memory:
        with pytest.raises(TrainingError, match=r"after step 8 has .* not finite, in w"):
            memory.save(8, {"w": jnp.array([1.0, jnp.nan])})
        memory.save(8, {"w": jnp.array([1.0, 2.0])})
        step, state = memory.restore({"w": jnp.zeros(2)})
    assert step == 8
    np.testing.assert_array_equal(state["w"], [1.0, 2.0])


def test_a_save_waits_for_the_state_and_not_for_the_keepers(keepers, monkeypatch):
    may_go, real = threading.Event(), Keeper.put
    monkeypatch.setattr(Keeper, "put", lambda *blob: (may_go.wait(30), real(*blob))[1])
    addresses = {host: keeper.address for host, keeper in keepers.items()}
    with Memory(addresses, host=0, secret=SECRET, process=0) as memory:
        now = {"w": jnp.arange(3.0)}
        memory.save(4, now)
        assert moments(keepers) == []
        jax.tree.map(lambda x: x.delete(), now)  # as the next step does
        may_go.set()
        step, state = memory.restore({"w": jnp.zeros(3)})
    assert step == 4
    np.testing.assert_array_equal(state["w"], np.arange(3.0))
