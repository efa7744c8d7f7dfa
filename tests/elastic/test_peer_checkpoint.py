"""In-memory checkpoints: complete after a loss, the newest, never of two generations."""

import threading
import time
from contextlib import ExitStack

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ftmesh.elastic.peer_checkpoint import PeerCheckpoint, SavedStep
from ftmesh.elastic.peer_store import BlobStore, PeerStore, serve
from ftmesh.elastic.rpc import Listener
from ftmesh.errors import CheckpointError, ClusterError
from tests.support.known_state import (
    assert_same_bits,
    initial_state,
    make_params,
    storing_optimizer,
)
from tests.support.peer_stores import SECRET, running_stores

pytestmark = pytest.mark.usefixtures("quick_compiler")

HOSTS = 4


@pytest.fixture(scope="module")
def sharded(quick_compiler):
    return initial_state("row_pair on devices", make_params(), storing_optimizer())


@pytest.fixture(scope="module")
def started():
    with running_stores(HOSTS) as stores:
        yield stores


@pytest.fixture
def stores(started):
    """Empty stores of four hosts."""
    for store in started.values():
        with store.client() as ask:
            ask.drop("")
    return started


@pytest.fixture
def killable():
    """Stores of four hosts that a test may kill."""
    with running_stores(HOSTS) as stores:
        yield stores


class Pod:
    """Processes that share a state, one on each host."""

    def __init__(self, stores, saved, *, generation=1, processes=HOSTS, **options):
        self.state, self.devices = saved.state, saved.devices
        self.full_types = {"optimizer": saved.full_types, "step": None}
        self.processes, self.lines = range(processes), []
        ranks = {device: rank for rank, device in enumerate(saved.devices or ())}
        addresses = {host: store.address for host, store in stores.items()}
        self.checkpoints = [
            PeerCheckpoint(
                addresses,
                host=process,
                secret=SECRET,
                process=process,
                generation=generation,
                process_of=lambda device: ranks[device] % processes,
                say=self.lines.append,
                **{"timeout": 10.0, **options},
            )
            for process in self.processes
        ]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for checkpoint in self.checkpoints:
            checkpoint.close()

    def state_after(self, step):
        return {"optimizer": self.state, "step": np.int64(step)}

    def save(self, *steps, processes=None):
        """The first process saves last, so that it sees everything."""
        for step in steps:
            for process in reversed(self.processes if processes is None else processes):
                self.checkpoints[process].save(
                    step, self.state_after(step), full_types=self.full_types, devices=self.devices
                )
                self.checkpoints[process].finish()

    def restore(self, process=0):
        restored = self.checkpoints[process].restore(
            self.state_after(0), full_types=self.full_types
        )
        if restored is None:
            return None
        step, state = restored
        assert_same_bits(state["optimizer"], self.state)
        assert state["step"] == step
        return step


def saved_steps(stores):
    names = {name for store in stores.values() for name in store.names("state/")}
    return sorted({tuple(SavedStep.from_blob_name(name)) for name in names})


def test_a_part_is_at_its_host_and_the_next(stores, sharded):
    with Pod(stores, sharded) as pod:
        pod.save(30)
    for host in range(HOSTS):
        parts = {host, (host - 1) % HOSTS}
        names = {f"state/1/30/{part}.{kind}" for part in parts for kind in ("bin", "json")}
        index = {"state/1/30/index.json"} if 0 in parts else set()
        assert set(stores[host].names()) == names | index
    assert pod.lines == []


@pytest.mark.parametrize("processes", [1, 3, 4])
def test_any_number_of_processes_restores(stores, sharded, processes):
    with Pod(stores, sharded) as pod:
        pod.save(30)
    with Pod(stores, sharded, generation=2, processes=processes) as pod:
        assert [pod.restore(process) for process in pod.processes] == [30] * processes
        assert pod.lines == []


@pytest.mark.slow
def test_on_another_mesh(stores, sharded):
    with Pod(stores, sharded) as pod:
        pod.save(30)
    whole = initial_state("replicated", make_params(), storing_optimizer())
    with Pod(stores, whole, generation=2, processes=1) as pod:
        assert pod.restore() == 30


def test_nothing_saved(stores, sharded):
    agreed = []
    with Pod(stores, sharded) as pod:
        assert pod.restore() is None
        assert pod.checkpoints[0].restore(pod.state_after(0), agree=agreed.append) is None
    assert agreed == ["none"]


def test_another_model_is_rejected(stores, sharded):
    with Pod(stores, sharded) as pod:
        pod.save(30)
        with pytest.raises(
            CheckpointError,
            match="step 30 of generation 1 in the memory of hosts is of another model",
        ):
            pod.checkpoints[0].restore({"step": np.int64(0)})


class TestLoss:
    def test_one_lost_host(self, killable, sharded):
        with Pod(killable, sharded) as pod:
            pod.save(10, 20)
        killable[2].kill()
        with Pod(killable, sharded, generation=2, processes=3) as pod:
            assert [pod.restore(process) for process in pod.processes] == [20] * 3
            assert len(pod.lines) == 3
            assert all("the peer store of host 2 is lost: nothing" in line for line in pod.lines)
            pod.lines.clear()
            pod.save(30)  # host 2 of the last process is gone
            assert pod.lines == []
        killable[0].kill()
        with Pod(killable, sharded, generation=3, processes=1) as pod:
            assert pod.restore() == 30

    def test_two_lost_neighbours(self, killable, sharded):
        with Pod(killable, sharded) as pod:
            pod.save(10, 20)
        killable[1].kill()
        killable[2].kill()
        with Pod(killable, sharded, generation=2, processes=2) as pod:
            assert pod.restore() is None
            assert [line for line in pod.lines if "step 20" in line] == [
                "skipped the checkpoint of step 20 of generation 1 in the memory of hosts: it has "
                "no 1.bin"
            ]

    @pytest.mark.slow
    def test_two_copies_survive_two_losses(self, killable, sharded):
        with Pod(killable, sharded, copies=2) as pod:
            pod.save(10)
        killable[1].kill()
        killable[2].kill()
        with Pod(killable, sharded, generation=2, processes=2) as pod:
            assert pod.restore() == 10

    @pytest.mark.slow
    def test_a_stopped_store(self, killable, sharded):
        with Pod(killable, sharded) as pod:
            pod.save(10)
        killable[3].stop()
        begin = time.monotonic()
        with Pod(killable, sharded, generation=2, processes=1, timeout=3) as pod:
            assert pod.restore() == 10
        assert time.monotonic() - begin < 30

    def test_a_copy_goes_to_the_next_host_that_is_left(self, killable, sharded):
        killable[1].kill()
        with Pod(killable, sharded, processes=1) as pod:
            pod.save(10)
            assert len(pod.lines) == 1
        assert [host for host in (0, 2, 3) if killable[host].names()] == [0, 2]

    def test_too_few_hosts_are_reported(self, sharded):
        with running_stores(2) as stores, Pod(stores, sharded, processes=1) as pod:
            stores[0].kill()
            pod.save(10)
            assert pod.lines[-1] == (
                "process 0 has its part of step 10 of generation 1 in the memory of 1 hosts "
                "instead of 2"
            )
            assert pod.restore() == 10


class TestIncomplete:
    def test_a_missing_part(self, stores, sharded):
        with Pod(stores, sharded) as pod:
            pod.save(10)
            pod.save(20, processes=[0, 1, 3])
            assert pod.restore() == 10
            assert pod.lines == [
                "skipped the checkpoint of step 20 of generation 1 in the memory of hosts: it has "
                "no 2.bin"
            ]
            pod.save(20, processes=[2])
            assert pod.restore() == 20

    def test_a_missing_manifest(self, stores, sharded):
        with Pod(stores, sharded) as pod:
            pod.save(10)
            pod.save(20, processes=[1, 2, 3])
            assert pod.restore() == 10

    def test_another_generation_does_not_complete_it(self, stores, sharded):
        with Pod(stores, sharded) as pod:
            pod.save(10)
            pod.save(20, processes=[0, 1, 3])
        with Pod(stores, sharded, generation=2) as pod:
            pod.save(20, processes=[2])
            assert pod.restore() == 10

    def test_a_later_step_of_an_earlier_generation(self, stores, sharded):
        """If complete it is restored; if not it is dropped."""
        with Pod(stores, sharded) as pod:
            pod.save(20, 25)
        with Pod(stores, sharded, generation=2) as pod:
            pod.save(21)
            assert pod.restore() == 25
        with stores[3].client() as third, stores[0].client() as first:
            third.drop("state/1/25/3")
            first.drop("state/1/25/3")
        with Pod(stores, sharded, generation=3) as pod:
            assert [pod.restore(process) for process in pod.processes] == [21] * 4
        assert saved_steps(stores) == [(21, 2)]

    def test_nothing_is_dropped_without_agreement(self, stores, sharded):
        def disagree(summary):
            assert summary == "10 of generation 1, not 20 of generation 1: it has no 2.bin"
            raise ClusterError("another has 20")

        with Pod(stores, sharded) as pod:
            pod.save(10)
            pod.save(20, processes=[0, 1, 3])
        with Pod(stores, sharded, generation=2) as pod:
            with pytest.raises(ClusterError, match="another has 20"):
                pod.checkpoints[0].restore(
                    pod.state_after(0), full_types=pod.full_types, agree=disagree
                )
            assert saved_steps(stores) == [(10, 1), (20, 1)]

    def test_the_same_step_again_needs_a_new_generation(self, stores, sharded):
        with Pod(stores, sharded) as pod:
            pod.save(10)
            with pytest.raises(
                CheckpointError, match="10 is not after step 10, which generation 1 has"
            ):
                pod.save(10)


class TestFlippedByte:
    @pytest.fixture
    def local_stores(self):
        """Stores in this process, whose memory a test can change."""
        blobs = {host: BlobStore(1 << 30) for host in range(2)}
        with ExitStack() as stack:
            listeners = {
                host: stack.enter_context(
                    Listener(
                        lambda channel, own=own: serve(own, channel),
                        secret=SECRET,
                        max_data=1 << 30,
                    )
                )
                for host, own in blobs.items()
            }
            yield blobs, listeners

    def flip(self, blobs, name):
        data, crc32 = blobs._blobs[name]
        blobs._blobs[name] = bytes([data[0] ^ 1]) + data[1:], crc32

    def test_the_other_copy_is_used(self, local_stores, sharded):
        blobs, stores = local_stores
        with Pod(stores, sharded, processes=2) as pod:
            pod.save(10)
            self.flip(blobs[0], "state/1/10/0.bin")
            assert pod.restore() == 10
            (line,) = pod.lines
            assert "rejects it: state/1/10/0.bin was damaged in memory" in line

    def test_both_copies_are_damaged(self, local_stores, sharded):
        blobs, stores = local_stores
        with Pod(stores, sharded, processes=2) as pod:
            pod.save(10, 20)
            for host in range(2):
                self.flip(blobs[host], "state/1/20/1.bin")
            assert pod.restore() == 10
            assert pod.lines[-1].endswith("of hosts: no host returns its 1.bin")

    def test_a_byte_flipped_before_it_was_put(self, local_stores, sharded):
        """The store's checksum is right, and that of the piece is not."""
        _, stores = local_stores
        with Pod(stores, sharded, processes=2) as pod:
            pod.save(10, 20)
            for host in range(2):
                with PeerStore(stores[host].address, SECRET, 10) as store:
                    data = store.get("state/1/20/1.bin")
                    store.put("state/1/20/1.bin", bytes([data[0] ^ 1]) + data[1:])
            assert pod.restore() == 10
            assert pod.lines[-1].endswith("in 1.bin is damaged")


def test_old_checkpoints_are_dropped(stores, sharded):
    with Pod(stores, sharded, keep=2) as pod:
        pod.save(10, 20, 30)
        assert saved_steps(stores) == [(20, 1), (30, 1)]
        pod.save(40, processes=[0, 1])
        assert saved_steps(stores) == [(20, 1), (30, 1), (40, 1)]  # 40 is not complete
    with Pod(stores, sharded, keep=1, generation=2, processes=3) as pod:
        pod.save(50)
    assert saved_steps(stores) == [(50, 2)]  # those of lost processes too


def test_a_full_store_is_reported(sharded):
    with running_stores(1, capacity=1000) as stores, Pod(stores, sharded, processes=1) as pod:
        pod.save(10)
        assert "state/1/10/0.bin has" in pod.lines[0]
        assert "of 1000 are free" in pod.lines[0]
        assert pod.lines[1].endswith("in the memory of 0 hosts instead of 1")
        assert pod.restore() is None


def test_a_state_that_is_not_finite_is_saved_as_it_is(stores):
    """Whether it may be is for the loop to say: a state may hold an infinite best loss."""
    addresses = {host: store.address for host, store in stores.items()}
    with PeerCheckpoint(addresses, host=0, secret=SECRET, process=0) as checkpoint:
        checkpoint.save(8, {"w": jnp.array([1.0, jnp.nan])})
        step, state = checkpoint.restore({"w": jnp.zeros(2)})
    assert step == 8
    np.testing.assert_array_equal(state["w"], [1.0, np.nan])


def test_a_save_does_not_wait_for_the_stores(stores, monkeypatch):
    may_go, real = threading.Event(), PeerStore.put
    monkeypatch.setattr(PeerStore, "put", lambda *blob: (may_go.wait(30), real(*blob))[1])
    addresses = {host: store.address for host, store in stores.items()}
    with PeerCheckpoint(addresses, host=0, secret=SECRET, process=0) as checkpoint:
        now = {"w": jnp.arange(3.0)}
        checkpoint.save(4, now)
        assert saved_steps(stores) == []
        jax.tree.map(lambda x: x.delete(), now)  # as the next step does
        may_go.set()
        step, state = checkpoint.restore({"w": jnp.zeros(3)})
    assert step == 4
    np.testing.assert_array_equal(state["w"], np.arange(3.0))
