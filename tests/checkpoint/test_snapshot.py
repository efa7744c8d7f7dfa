"""States are saved and restored between any meshes, bit for bit."""

import json
import math
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ftmesh
from ftmesh.checkpoint.manifest import Manifest, describe_tensors
from ftmesh.checkpoint.restore import restore_state
from ftmesh.checkpoint.snapshot import Snapshotter
from ftmesh.checkpoint.storage import CheckpointReader, write_part
from ftmesh.errors import ArgumentError, DamagedCheckpointError
from ftmesh.testing import cpu_grid
from tests.support.known_state import (
    PLACEMENTS,
    assert_same_bits,
    initial_state,
    make_params,
    two_group_storing_optimizer,
)

pytestmark = pytest.mark.usefixtures("quick_compiler")

PARAMS = make_params()


def write(
    folder, state, *, full_types=None, devices=None, process_of=lambda device: 0, processes=(0,)
):
    for process in processes:
        snapshot = Snapshotter(process, process_of, devices, full_types).snapshot(3, state)
        if process in snapshot.manifest.processes:
            write_part(folder, snapshot.manifest, process, snapshot.pieces)
    return snapshot.manifest


def read(folder, like, full_types=None):
    with CheckpointReader(folder) as saved:
        saved.check()
        assert saved.manifest.describe_tensors() == describe_tensors(like, full_types)
        return restore_state(saved, like, full_types)


@pytest.fixture(scope="module")
def states(quick_compiler):
    """The state for the same parameters in every placement."""
    return {
        name: initial_state(name, PARAMS, two_group_storing_optimizer(PARAMS))
        for name in PLACEMENTS
    }


@pytest.mark.parametrize("source", PLACEMENTS)
def test_every_placement_restores_the_state_of_every_other(states, tmp_path, source):
    state, full_types, devices = states[source]
    write(tmp_path, state, full_types=full_types, devices=devices)
    names = list(PLACEMENTS)
    nearby = names[names.index(source) - 2 :][:2] or names[:2]
    for target in {*nearby, "replicated", source}:
        expected, full_types, _ = states[target]
        restored = read(tmp_path, expected, full_types)
        assert_same_bits(restored, expected)
        for leaf, other in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
            assert leaf.sharding == other.sharding


def test_names_are_the_paths_in_the_state_of_optax(states):
    replicated, sharded = states["replicated"], states["more chips"]
    names = describe_tensors(sharded.state, sharded.full_types)
    assert names == describe_tensors(replicated.state)
    assert names["inner_states/odd/inner_state/half/small k"] == "bfloat16[11]"
    assert names["inner_states/odd/inner_state/same/conv k"] == "float32[3, 3, 8, 128]"
    assert names["inner_states/even/inner_state/same/wave"] == "complex64[4]"


def test_each_process_writes_what_its_devices_have(states, tmp_path):
    """Processes 3 and 4 have every second chip; 8 has none that counts."""
    state, full_types, devices = states["row_pair on devices"]
    rank_of = {device: rank for rank, device in enumerate(devices)}
    manifest = write(
        tmp_path, state, full_types=full_types, devices=devices,
        process_of=lambda device: 3 + rank_of[device] % 2, processes=range(9),
    )  # fmt: skip
    assert manifest.processes == (3, 4)
    names = {"index.json", "3.bin", "3.json", "4.bin", "4.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    entries = json.loads((tmp_path / "4.json").read_text())["pieces"]
    assert not any("tensor" in entry for entry in entries)
    assert {entry["rank"] for entry in entries} == {1, 3, 5, 7, 9, 11}
    assert_same_bits(read(tmp_path, states["replicated"].state), states["replicated"].state)
    assert_same_bits(read(tmp_path, state, full_types), state)


def test_values_of_idle_devices_are_not_written(tmp_path):
    """The idle device comes first on the axis and has another value."""
    devices = jax.devices()[:4]
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    parts = [jax.device_put(jnp.full(3, float(i > 0)), device) for i, device in enumerate(devices)]
    replicated = jax.NamedSharding(mesh, jax.sharding.PartitionSpec())
    array = jax.make_array_from_single_device_arrays((3,), replicated, parts)
    write(tmp_path, {"w": array}, devices=devices[1:])
    assert read(tmp_path, {"w": jnp.zeros(3)})["w"].tolist() == [1, 1, 1]


AXES = {
    "last": (None, "x"),
    "both": ("x", "y"),
    "swapped": ("y", "x"),
    "together": (None, ("y", "x")),
    "first": (("x", "y"), None),
    "middle": (None, "y", None),
    "replicated": (),
}


def named_state(devices, shape, fill=lambda size: np.zeros(size)):
    """Arrays cut in every way over two axes of a mesh, and a vector."""
    mesh = jax.sharding.Mesh(np.array(devices).reshape(shape), ("x", "y"))
    state = {}
    for name, spec in AXES.items():
        size = (24, 24, 5)[: max(2, len(spec))]
        sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        state[name] = jax.device_put(np.float32(fill(size)), sharding)
    return state


def test_arrays_cut_along_any_dimensions_by_four_processes(tmp_path):
    """Blocks are written once, by a process that has them, and restored on other meshes."""
    rng = np.random.default_rng(0)
    state = named_state(jax.devices()[:8], (2, 4), lambda size: rng.normal(size=size))
    process_of = {device: number // 2 for number, device in enumerate(jax.devices()[:8])}.get
    write(tmp_path, state, process_of=process_of, processes=range(4))
    assert json.loads((tmp_path / "index.json").read_text())["format"] == "ftmesh.checkpoint/3"
    files = sorted(tmp_path.glob("*.bin"))
    assert [file.name for file in files] == ["0.bin", "1.bin", "2.bin", "3.bin"]
    total = sum(array.nbytes for array in state.values())
    assert sum(file.stat().st_size for file in files) == total
    for devices, shape in ((slice(1, 7), (3, 2)), (slice(0, 1), (1, 1)), (slice(4, 16), (3, 4))):
        like = named_state(jax.devices()[devices], shape)
        restored = read(tmp_path, like)
        assert_same_bits(restored, state)
        for name, array in restored.items():
            assert array.sharding == like[name].sharding


def test_a_grid_that_does_not_fit_is_damage(tmp_path):
    state = {"w": named_state(jax.devices()[:8], (2, 4))["both"]}
    manifest = Snapshotter(0).snapshot(3, state).manifest.to_json()
    for grid in ([4, 2, 1], [8], [3, 4], [1, 1]):
        manifest["tensors"][0]["grid"] = grid
        with pytest.raises(DamagedCheckpointError, match="w is not cut into"):
            Manifest.from_json(manifest)


def test_checkpoints_can_be_read_with_numpy_alone(states, tmp_path):
    state, full_types, devices = states["row_pair on devices"]
    write(tmp_path, state, full_types=full_types, devices=devices)

    manifest = json.loads((tmp_path / "index.json").read_text())
    assert manifest["format"] == "ftmesh.checkpoint/2"
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
        ranks = range(manifest["buffers"][entry["buffer"]]["chunks"])
        parts = [np.frombuffer(pieces[None, entry["buffer"], rank], dtype) for rank in ranks]
        start, width = entry["start"], entry["width"]
        vector = np.concatenate([part[start : start + width] for part in parts])
        return vector[: math.prod(shape)].reshape(shape)

    tensors = {}
    for number, entry in enumerate(manifest["tensors"]):
        if "/same/" in entry["name"]:
            tensors[entry["name"].rpartition("/")[2]] = tensor(number)
    assert_same_bits(tensors, PARAMS)


@pytest.mark.parametrize("name", ["twelve", "fifteen", "replicated"])
def test_a_checkpoint_of_format_1(name):
    """It was written on 4x4 less 2x2@2,2 with row_pair, by two processes."""
    rng = np.random.default_rng(0)
    shapes = {"kernel": (13, 7), "tiles": (17, 128), "bias": (30,), "scalar": ()}
    params = {key: np.asarray(rng.normal(size=n), np.float32) for key, n in shapes.items()}
    grads, adam = jax.tree.map(lambda x: np.float32(x * 2 + 1), params), optax.adam(0.1)
    _, expected = adam.update(grads, adam.init(params), params)
    failed = {"twelve": "2x2@0,0", "fifteen": "1x1@1,1"}.get(name)
    like, full_types = adam.init(params), None
    if failed:
        optimizer = ftmesh.plan(cpu_grid("4x4", failed=failed)).shard(adam)
        like, full_types = optimizer.init(params), {"optimizer": optimizer.full_types(params)}
    folder = Path(__file__).parent.parent / "data" / "checkpoint_1" / "30"
    state = read(folder, {"params": params, "optimizer": like}, full_types)
    assert_same_bits(state["params"], params)
    if failed:
        state["optimizer"] = optimizer.gather_state(state["optimizer"], params)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), state["optimizer"], expected)


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


def test_without_full_types_shapes_are_those_of_the_arrays(states, tmp_path):
    """Such a state is restored on as many chips, and rejected on another number."""
    state = states["row_pair on devices"].state
    write(tmp_path, state)
    assert_same_bits(read(tmp_path, state), state)
    names = describe_tensors(state)
    assert names["inner_states/odd/inner_state/same/kernel"] == "float32[96]"
    assert names != describe_tensors(states["replicated"].state)


def test_wrong_full_types(states, tmp_path):
    state, full_types, _ = states["row_pair on devices"]
    with pytest.raises(ArgumentError, match=r"full_types have optimizer/.*, and the state has not"):
        write(tmp_path, state, full_types={"optimizer": full_types})
    large = {"w": jax.ShapeDtypeStruct((10, 10), np.float32)}
    some = {"w": jax.tree.leaves(state)[3]}
    assert some["w"].size < 100
    with pytest.raises(ArgumentError, match=r"full_types say that its shape is \(10, 10\)"):
        write(tmp_path, some, full_types=large)


def test_two_tensors_of_one_name_are_an_error(tmp_path):
    with pytest.raises(ArgumentError, match="two tensors of the state are called a/b"):
        write(tmp_path, {"a/b": jnp.zeros(1), "a": {"b": jnp.zeros(1)}})
