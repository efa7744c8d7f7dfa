"""States go through files from any owners to any others, bit for bit."""

import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ftmesh.checkpoint.reader import Saved
from ftmesh.checkpoint.restore import restored
from ftmesh.checkpoint.snapshot import Copier
from ftmesh.checkpoint.tensor_names import about
from ftmesh.checkpoint.writer import write_part
from ftmesh.errors import ArgumentError
from tests.support.known_state import SETTINGS, assert_same_bits, held, parameters, remember_apart

pytestmark = pytest.mark.usefixtures("quick_compiler")

PARAMS = parameters()


def write(folder, state, *, layouts=(), devices=None, process_of=lambda device: 0, processes=(0,)):
    for process in processes:
        copier = Copier(process, process_of, devices, layouts)
        snapshot = copier.snapshot(3, state)
        if process in snapshot.index.processes:
            write_part(folder, snapshot.index, process, snapshot.pieces)
    return snapshot.index


def read(folder, like, layouts=()):
    with Saved(folder) as saved:
        saved.check()
        assert saved.index.about == about(like, layouts)
        return restored(saved, like, layouts)


@pytest.fixture(scope="module")
def all_held(quick_compiler):
    """The state that each optimizer makes of the same parameters by itself."""
    return {name: held(name, PARAMS, remember_apart(PARAMS)) for name in SETTINGS}


@pytest.mark.parametrize("source", SETTINGS)
def test_a_state_is_what_each_optimizer_would_have_made_itself(all_held, tmp_path, source):
    state, layouts, devices = all_held[source]
    write(tmp_path, state, layouts=layouts, devices=devices)
    names = list(SETTINGS)
    nearby = names[names.index(source) - 2 :][:2] or names[:2]
    for target in {*nearby, "whole", source}:
        wanted, layouts, _ = all_held[target]
        found = read(tmp_path, wanted, layouts)
        assert_same_bits(found, wanted)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert one.sharding == other.sharding


def test_names_are_the_ways_in_the_state_of_optax(all_held):
    whole, sharded = all_held["whole"], all_held["more chips"]
    names = about(sharded.state, sharded.layouts)
    assert names == about(whole.state)
    assert names["inner_states/odd/inner_state/half/small k"] == "bfloat16[11]"
    assert names["inner_states/odd/inner_state/same/conv k"] == "float32[3, 3, 8, 128]"
    assert names["inner_states/even/inner_state/same/wave"] == "complex64[4]"


def test_each_process_writes_what_its_devices_own(all_held, tmp_path):
    """Four of the twelve chips own nothing; their process has nothing to write."""
    state, layouts, devices = all_held["row_pair on devices"]
    owners = {rank for rank, chunks in enumerate(layouts[0].buckets[0].owned) if chunks.min() < 16}
    assert len(owners) == 8
    place = {device: rank for rank, device in enumerate(devices)}

    def process_of(device):
        return 3 + place[device] % 2 if place[device] in owners else 9 - (place[device] == 0)

    index = write(
        tmp_path, state, layouts=layouts, devices=devices, process_of=process_of,
        processes=range(12),
    )  # fmt: skip
    assert index.processes == (3, 4)
    names = {"index.json", "3.bin", "3.json", "4.bin", "4.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    last = json.loads((tmp_path / "4.json").read_text())["pieces"]
    assert not any("tensor" in each for each in last)
    assert {each["rank"] % 2 for each in last} == {1}
    assert_same_bits(read(tmp_path, all_held["whole"].state), all_held["whole"].state)
    assert_same_bits(read(tmp_path, state, layouts), state)


def test_what_idle_devices_hold_is_not_written(tmp_path):
    """They come first on the axis here, and hold something else."""
    devices = jax.devices()[:4]
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    parts = [jax.device_put(jnp.full(3, float(i > 0)), device) for i, device in enumerate(devices)]
    whole = jax.NamedSharding(mesh, jax.sharding.PartitionSpec())
    array = jax.make_array_from_single_device_arrays((3,), whole, parts)
    write(tmp_path, {"w": array}, devices=devices[1:])
    assert read(tmp_path, {"w": jnp.zeros(3)})["w"].tolist() == [1, 1, 1]


def test_anyone_can_read_it_with_numpy(all_held, tmp_path):
    state, layouts, devices = all_held["more chips"]
    write(tmp_path, state, layouts=layouts, devices=devices)

    index = json.loads((tmp_path / "index.json").read_text())
    pieces = {}
    for process in index["processes"]:
        raw = (tmp_path / f"{process}.bin").read_bytes()
        for each in json.loads((tmp_path / f"{process}.json").read_text())["pieces"]:
            key = each.get("tensor"), each.get("buffer"), each.get("rank")
            pieces[key] = raw[each["offset"] : each["offset"] + each["bytes"]]

    def tensor(number):
        told = index["tensors"][number]
        shape, dtype = told["shape"], np.dtype(told["dtype"])
        if "buffer" not in told:
            return np.frombuffer(pieces[number, None, None], dtype).reshape(shape)
        buffer = index["buffers"][told["buffer"]]
        chunks = np.zeros((buffer["chunks"], buffer["rows"] * buffer["width"]), dtype)
        owners = np.array(index["owners"][buffer["owners"]])
        for rank in set(owners.tolist()):
            mine = np.frombuffer(pieces[None, told["buffer"], rank], dtype)
            chunks[owners == rank] = mine.reshape(-1, chunks.shape[1])
        vector = chunks.reshape(-1)[told["start"] :][: math.prod(shape)]
        # The last axis whose length is a multiple of 128 goes inside; tiles are 8 x 128.
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

    found = {}
    for number, told in enumerate(index["tensors"]):
        if "/same/" in told["name"]:
            found[told["name"].rpartition("/")[2]] = tensor(number)
    assert_same_bits(found, PARAMS)


def test_numbers_keys_and_arrays_of_the_host(tmp_path):
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
    found = read(tmp_path, like)
    assert found["key"] == state["key"]
    assert (found["keys"] == state["keys"]).all()
    assert float(found["rate"]) == 0.5
    assert found["host"].tolist() == [0, 1, 2]
    assert found["tiny"].tolist() == [0, 1, 2, 3]
    assert found["flag"].tolist() == [True, False]


def test_arrays_that_are_split_by_themselves(tmp_path):
    """One process that has all of an array writes it whole, and it may lie otherwise after."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    split = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    write(tmp_path, {"w": jax.device_put(jnp.arange(8.0), split)})
    assert read(tmp_path, {"w": jnp.zeros(8)})["w"].tolist() == list(range(8))
    like = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=split)}
    assert read(tmp_path, like)["w"].sharding == split


def test_a_snapshot_is_of_its_moment(all_held, tmp_path):
    """The next step takes over the memory of the state."""
    state = {"w": jnp.arange(1000.0)}
    snapshot = Copier(0).snapshot(3, state)
    jax.jit(lambda x: {"w": x["w"] * 0 - 1}, donate_argnums=0)(state)["w"].block_until_ready()
    assert state["w"].is_deleted()
    write_part(tmp_path, snapshot.index, 0, snapshot.pieces)
    assert read(tmp_path, {"w": jnp.zeros(1000)})["w"].tolist() == list(range(1000))


def test_layouts_are_asked_for(all_held, tmp_path):
    state, layouts, _ = all_held["more chips"]
    with pytest.raises(ArgumentError, match=r"give layouts=\[optimizer.layout\(params\)\]"):
        write(tmp_path, {"optimizer": state})
    other = all_held["two to a chip"].layouts
    with pytest.raises(ArgumentError, match="optimizer is sharded for owners of which no layout"):
        write(tmp_path, {"optimizer": state}, layouts=other)
    short = replace(state, rows=tuple(tuple(None for _ in row) for row in state.rows))
    with pytest.raises(ArgumentError, match="has no array for bucket"):
        write(tmp_path, short, layouts=layouts)
    long = jax.tree.map(lambda x: jnp.concatenate([x, x]) if x.ndim == 2 else x, state)
    with pytest.raises(ArgumentError, match="that are sharded along one axis alone"):
        write(tmp_path, long, layouts=layouts)


def test_two_tensors_of_one_name_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="two tensors of the state are called a/b"):
        write(tmp_path, {"a/b": jnp.zeros(1), "a": {"b": jnp.zeros(1)}})
