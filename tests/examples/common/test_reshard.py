"""A sharded state moves between 16, 14, 12 and 8 chips and 1 to 8 processes, bit for bit."""

import os

import jax
import pytest

from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.elastic.peer_checkpoint import PeerCheckpoint
from tests.support.peer_stores import SECRET, running_stores
from tests.support.shards import random_state, sharded_setup, tensor_bytes

pytestmark = pytest.mark.usefixtures("quick_compiler")

HOSTS = 4  # with peer stores
MESHES = {16: "", 14: "2x1@2,3", 12: "2x2@2,2", 8: "4x2@0,2"}
# Live chips and processes: every value comes after larger and after smaller ones.
LAYOUTS = ((16, 4), (14, 2), (12, 8), (8, 1), (12, 4), (14, 8), (16, 1), (8, 2), (16, 8), (16, 4))


@pytest.fixture(scope="module")
def meshes(quick_compiler):
    return {live: sharded_setup(failed) for live, failed in MESHES.items()}


@pytest.fixture(scope="module")
def first(meshes):
    state = random_state(meshes[16])
    return state, tensor_bytes(meshes[16], state)


@pytest.fixture(scope="module")
def addresses():
    with running_stores(HOSTS) as stores:
        yield {host: store.address for host, store in stores.items()}


@pytest.fixture
def in_memory(addresses):
    def store(process, generation, process_of):
        return PeerCheckpoint(
            addresses,
            host=process % HOSTS,
            secret=SECRET,
            process=process,
            generation=generation,
            process_of=process_of,
            say=pytest.fail,
        )

    return store


@pytest.fixture
def in_files(tmp_path):
    def store(process, generation, process_of):
        return Checkpoints(
            tmp_path, resume=True, process=process, process_of=process_of, log=pytest.fail
        )

    return store


def full(on):
    return {"optimizer": on.full_types}


def save(store, on, state, step, processes):
    """Save the part of each process, process 0 last."""
    rank_of = {device: rank for rank, device in enumerate(on.devices)}
    per_process = -(-len(rank_of) // processes)

    def process_of(device):
        return rank_of[device] // per_process

    for process in reversed(range(process_of(on.devices[-1]) + 1)):
        with store(process, step, process_of) as checkpoints:
            checkpoints.save(step, {"optimizer": state}, full_types=full(on), devices=on.devices)


def restore(store, on, step):
    with store(0, step + 1, lambda device: 0) as checkpoints:
        restored_step, state = checkpoints.restore({"optimizer": on.like}, full_types=full(on))
    assert restored_step == step
    return state["optimizer"]


@pytest.mark.parametrize("where", ["in_memory", "in_files"])
def test_every_move_and_back(where, meshes, first, request):
    store = request.getfixturevalue(where)
    state, expected = first
    moves = list(zip(LAYOUTS, [*LAYOUTS[1:], LAYOUTS[0]], strict=True))
    for step, ((live, processes), (then, _)) in enumerate(moves, start=1):
        save(store, meshes[live], state, step, processes)
        state = restore(store, meshes[then], step)
        for leaf, like in zip(*map(jax.tree.leaves, (state, meshes[then].like)), strict=True):
            assert leaf.sharding == like.sharding
        assert tensor_bytes(meshes[then], state) == expected


@pytest.mark.parametrize("is_as_long", [False, True])
def test_a_torn_part_is_not_read(meshes, first, in_files, tmp_path, is_as_long):
    """The newer of two checkpoints has half a file, or zeros in half of it: the older is read."""
    on, lines = meshes[12], []
    state = first[0]
    save(in_files, meshes[16], state, 1, 4)
    save(in_files, meshes[16], state, 2, 4)
    part = tmp_path / "2" / "3.bin"
    size = part.stat().st_size
    os.truncate(part, size // 2)
    if is_as_long:
        os.truncate(part, size)  # with zeros, as after a power cut
    with Checkpoints(tmp_path, resume=True, process=0, log=lines.append) as checkpoints:
        step, restored = checkpoints.restore({"optimizer": on.like}, full_types=full(on))
    assert step == 1
    assert tensor_bytes(on, restored["optimizer"]) == first[1]
    assert [line.split(": ")[0] for line in lines] == [
        f"skipped the checkpoint of step 2 in {tmp_path}"
    ]
