"""States are saved and restored between any owners, bit for bit."""

import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ftmesh.checkpoint.files import CheckpointReader, write_part
from ftmesh.checkpoint.restore import restore_state
from ftmesh.checkpoint.snapshot import Snapshotter
from ftmesh.checkpoint.tensor_names import describe_tensors
from ftmesh.errors import ArgumentError
from tests.support.known_state import (
    PLACEMENTS,
    assert_same_bits,
    initial_state,
    make_params,
    two_group_storing_optimizer,
)

pytestmark = pytest.mark.usefixtures("quick_compiler")

PARAMS = make_params()


def write(folder, state, *, layouts=(), devices=None, process_of=lambda device: 0, processes=(0,)):
    for process in processes:
        snapshot = Snapshotter(process, process_of, devices, layouts).snapshot(3, state)
        if process in snapshot.manifest.processes:
            write_part(folder, snapshot.manifest, process, snapshot.pieces)
    return snapshot.manifest


def read(folder, like, layouts=()):
    with CheckpointReader(folder) as saved:
        saved.check()
        assert saved.manifest.describe_tensors() == describe_tensors(like, layouts)
        return restore_state(saved, like, layouts)


@pytest.fixture(scope="module")
def states(quick_compiler):
    """The state for the same parameters in every placement."""
    return {
        name: initial_state(name, PARAMS, two_group_storing_optimizer(PARAMS))
        for name in PLACEMENTS
    }


@pytest.mark.parametrize("source", PLACEMENTS)
def test_every_placement_restores_the_state_of_every_other(states, tmp_path, source):
    state, layouts, devices = states[source]
    write(tmp_path, state, layouts=layouts, devices=devices)
    names = list(PLACEMENTS)
    nearby = names[names.index(source) - 2 :][:2] or names[:2]
    for target in {*nearby, "replicated", source}:
        expected, layouts, _ = states[target]
        restored = read(tmp_path, expected, layouts)
        assert_same_bits(restored, expected)
        for leaf, other in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
            assert leaf.sharding == other.sharding


def test_names_are_the_paths_in_the_state_of_optax(states):
    replicated, sharded = states["replicated"], states["more chips"]
    names = describe_tensors(sharded.state, sharded.layouts)
    assert names == describe_tensors(replicated.state)
    assert names["inner_states/odd/inner_state/half/small k"] == "bfloat16[11]"
    assert names["inner_states/odd/inner_state/same/conv k"] == "float32[3, 3, 8, 128]"
    assert names["inner_states/even/inner_state/same/wave"] == "complex64[4]"


def test_each_process_writes_what_its_devices_own(states, tmp_path):
    """Four of the twelve chips own nothing, so their process writes nothing."""
    state, layouts, devices = states["row_pair on devices"]
    owners = {rank for rank, chunks in enumerate(layouts[0].buckets[0].owned) if chunks.min() < 16}
    assert len(owners) == 8
    rank_of = {device: rank for rank, device in enumerate(devices)}

    def process_of(device):
        rank = rank_of[device]
        return 3 + rank % 2 if rank in owners else 9 - (rank == 0)

    manifest = write(
        tmp_path, state, layouts=layouts, devices=devices, process_of=process_of,
        processes=range(12),
    )  # fmt: skip
    assert manifest.processes == (3, 4)
    names = {"index.json", "3.bin", "3.json", "4.bin", "4.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    entries = json.loads((tmp_path / "4.json").read_text())["pieces"]
    assert not any("tensor" in entry for entry in entries)
    assert {entry["rank"] % 2 for entry in entries} == {1}
    assert_same_bits(read(tmp_path, states["replicated"].state), states["replicated"].state)
    assert_same_bits(read(tmp_path, state, layouts), state)


def test_values_of_idle_devices_are_not_written(tmp_path):
    """The idle device comes first on the axis and has another value."""
    devices = jax.devices()[:4]
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    parts = [jax.device_put(jnp.full(3, float(i > 0)), device) for i, device in enumerate(devices)]
    replicated = jax.NamedSharding(mesh, jax.sharding.PartitionSpec())
    array = jax.make_array_from_single_device_arrays((3,), replicated, parts)
    write(tmp_path, {"w": array}, devices=devices[1:])
    assert read(tmp_path, {"w": jnp.zeros(3)})["w"].tolist() == [1, 1, 1]


def test_checkpoints_can_be_read_with_numpy_alone(states, tmp_path):
    state, layouts, devices = states["more chips"]
    write(tmp_path, state, layouts=layouts, devices=devices)

    manifest = json.loads((tmp_path / "index.json").read_text())
    pieces = {}
    for process in manifest["processes"]:
        raw = (tmp_path / f"{process}.bin").read_bytes()
        for entry in json.loads((tmp_path / f"{process}.json").read_text())["pieces"]:
            key = entry.get("tensor"), entry.get("buffer"), entry.get("rank")
            pieces[key] = raw[entry["offset"] : entry["offset"] + entry["bytes"]]

    def tensor(number):
        entry = manifest["tensors"][number]
        shape, dtype = entry["shape"], np.dtype(entry["dtype"])
        if "buffer" not in entry:
            return np.frombuffer(pieces[number, None, None], dtype).reshape(shape)
        buffer = manifest["buffers"][entry["buffer"]]
        chunks = np.zeros((buffer["chunks"], buffer["rows"] * buffer["width"]), dtype)
        owners = np.array(manifest["owners"][buffer["owners"]])
        for rank in set(owners.tolist()):
            mine = np.frombuffer(pieces[None, entry["buffer"], rank], dtype)
            chunks[owners == rank] = mine.reshape(-1, chunks.shape[1])
        vector = chunks.reshape(-1)[entry["start"] :][: math.prod(shape)]
        # The last axis whose length is a multiple of 128 is moved innermost; tiles are 8 x 128.
        wide = [axis for axis, length in enumerate(shape) if length % 128 == 0]
        if len(shape) < 2 or not wide:
            return vector.reshape(shape)
        moved = [n for axis, n in enumerate(shape) if axis != wide[-1]] + [shape[wide[-1]]]
        matrix = np.empty((math.prod(moved[:-1]), moved[-1]), dtype)
        rows = 0 if len(moved) > 2 and moved[-2] % 8 else len(matrix) // 8 * 8
        tiles = vector[: rows * moved[-1]].reshape(rows // 8, moved[-1] // 128, 8, 128)
        matrix[:rows] = tiles.swapaxes(1, 2).reshape(rows, moved[-1])
        matrix[rows:] = vector[rows * moved[-1] :].reshape(-1, moved[-1])
        return np.moveaxis(matrix.reshape(moved), -1, wide[-1])

    tensors = {}
    for number, entry in enumerate(manifest["tensors"]):
        if "/same/" in entry["name"]:
            tensors[entry["name"].rpartition("/")[2]] = tensor(number)
    assert_same_bits(tensors, PARAMS)


def test_host_arrays_numbers_and_keys(tmp_path):
    state = {
        "key": jax.random.key(5),
        "keys": jax.random.split(jax.random.key(6, impl="rbg"), 3),
        "rate": 0.5,
        "host": np.arange(3),
        "tiny": jnp.arange(4.0).astype(jnp.float8_e4m3fn),
        "flag": jnp.array([True, False]),
    }
    write(tmp_path, state)
    like = {**state, "key": jax.random.key(0), "host": np.zeros(3, int), "rate": 0.0}
    restored = read(tmp_path, like)
    assert restored["key"] == state["key"]
    assert (restored["keys"] == state["keys"]).all()
    assert float(restored["rate"]) == 0.5
    assert restored["host"].tolist() == [0, 1, 2]
    assert restored["tiny"].tolist() == [0, 1, 2, 3]
    assert restored["flag"].tolist() == [True, False]


def test_plain_sharded_arrays(tmp_path):
    """A process that has all of an array writes it, and it may be restored with any sharding."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    split = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    write(tmp_path, {"w": jax.device_put(jnp.arange(8.0), split)})
    assert read(tmp_path, {"w": jnp.zeros(8)})["w"].tolist() == list(range(8))
    like = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=split)}
    assert read(tmp_path, like)["w"].sharding == split


def test_a_snapshot_survives_donation(tmp_path):
    state = {"w": jnp.arange(1000.0)}
    snapshot = Snapshotter(0).snapshot(3, state)
    jax.jit(lambda x: {"w": x["w"] * 0 - 1}, donate_argnums=0)(state)["w"].block_until_ready()
    assert state["w"].is_deleted()
    write_part(tmp_path, snapshot.manifest, 0, snapshot.pieces)
    assert read(tmp_path, {"w": jnp.zeros(1000)})["w"].tolist() == list(range(1000))


def test_layouts_are_required(states, tmp_path):
    state, layouts, _ = states["more chips"]
    with pytest.raises(ArgumentError, match=r"give layouts=\[optimizer.layout\(params\)\]"):
        write(tmp_path, {"optimizer": state})
    other = states["two to a chip"].layouts
    with pytest.raises(ArgumentError, match="no layout is given for optimizer, which is sharded"):
        write(tmp_path, {"optimizer": state}, layouts=other)
    short = replace(state, rows=tuple(tuple(None for _ in row) for row in state.rows))
    with pytest.raises(ArgumentError, match="has no array for bucket"):
        write(tmp_path, short, layouts=layouts)
    long = jax.tree.map(lambda x: jnp.concatenate([x, x]) if x.ndim == 2 else x, state)
    with pytest.raises(ArgumentError, match="that are sharded along one axis only"):
        write(tmp_path, long, layouts=layouts)


def test_two_tensors_of_one_name_are_an_error(tmp_path):
    with pytest.raises(ArgumentError, match="two tensors of the state are called a/b"):
        write(tmp_path, {"a/b": jnp.zeros(1), "a": {"b": jnp.zeros(1)}})
