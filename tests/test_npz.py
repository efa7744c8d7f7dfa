"""Unpacking .npz files is bounded by their headers, and objects are never unpickled."""

import io
import json
import os
import pickle
import threading
import tracemalloc
import zipfile

import numpy as np
import pytest

import ftmesh
from ftmesh.algorithms import rings
from ftmesh.errors import ScheduleFileError
from ftmesh.files import NotNpzError, NpzReader


def member(shape, dtype="<i4", data=b"", header=None):
    """Return the bytes of an .npy file with any header and any data."""
    text = header or str({"descr": dtype, "fortran_order": False, "shape": shape})
    text = text.encode() + b"\n"
    return b"\x93NUMPY\x02\x00" + len(text).to_bytes(4, "little") + text + data


def archive(**members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archived:
        for name, content in members.items():
            archived.writestr(f"{name}.npy", content)
    file.seek(0)
    return file


def test_files_of_numpy_are_read():
    arrays = {
        "a": np.arange(6).reshape(2, 3),
        "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "empty": np.zeros((0, 3)),
        "scalar": np.float32(2.5),
        "text": np.array("é"),
    }
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    file.seek(0)
    with NpzReader(file) as reader:
        assert {name: header.shape for name, header in reader.headers.items()} == {
            name: np.shape(array) for name, array in arrays.items()
        }
        for name, array in arrays.items():
            np.testing.assert_array_equal(reader.read(name), array)
            assert reader.read(name).dtype == np.asarray(array).dtype


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (member((2,), data=b"1234"), "differs from its header"),
        (member((2,), data=b"123456789"), "differs from its header"),
        (member((2**31,)), "differs from its header"),
        (member((-1,)), "shape"),
        (member((2,), "|V0"), "dtype"),
        (member((2,), header=" " * 20_000), "a header of 20,001 bytes"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "a header of 4,294,967,295 bytes"),
        (member((2,), header="[]"), "not a dictionary"),
        (b"nothing", "magic"),
    ],
)
def test_members_that_contradict_their_headers(content, message):
    with NpzReader(archive(a=content)) as reader, pytest.raises(ValueError, match=message):
        reader.read("a")


def test_objects_are_never_unpickled():
    with (
        pytest.raises(NotNpzError, match="pickled"),
        NpzReader(archive(a=member((1,), "|O"))) as reader,
    ):
        reader.headers  # noqa: B018
    with pytest.raises(NotNpzError, match="pickled"):
        NpzReader(io.BytesIO(pickle.dumps([1])))


@pytest.fixture
def bomb(tmp_path):
    """A schedule file that would unpack to a thousand times its size."""
    ftmesh.save(rings.build_schedule(ftmesh.Topology.grid("4x4")), tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as file:
        arrays = dict(file)

    def make(name):
        path = tmp_path / f"{name}.npz"
        zeros = bytes(2**22)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archived:
            for key, array in arrays.items():
                with archived.open(f"{key}.npy", "w", force_zip64=True) as target:
                    if key == name:
                        target.write(member((2**24,), "<U1" if name == "meta" else "<i4"))
                        for _ in range(16):
                            target.write(zeros)
                    else:
                        np.lib.format.write_array(target, np.asarray(array))
        return path

    return make


@pytest.mark.parametrize("packing", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_are_not_unpacked(tmp_path, packing):
    with zipfile.ZipFile(tmp_path / "a.npz", "w", packing) as archived:
        archived.writestr("meta.npy", member((3,), "<U1") + bytes(12))
    with pytest.raises(ScheduleFileError, match="has a compression that NumPy does not use"):
        ftmesh.load(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("name", "message"),
    [("owner", "would unpack to 67.1"), ("meta", "would unpack to 67.1"), ("src", "differ in")],
)
def test_a_zip_bomb_is_rejected_by_its_headers(bomb, monkeypatch, name, message):
    monkeypatch.setattr("ftmesh.schedule.files.MAX_BYTES", 2**22)
    path = bomb(name)
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    with pytest.raises(ScheduleFileError, match=message):
        ftmesh.load(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_control_characters_are_not_printed(tmp_path):
    path = tmp_path / "a.npz"
    ftmesh.save(rings.build_schedule(ftmesh.Topology.grid("4x4")), path)
    with np.load(path) as file:
        arrays = dict(file)
    meta = json.loads(str(arrays["meta"]))
    for change in ({"algorithm": "\x1b[2J"}, {"algorithm": "x" * 1000}):
        np.savez(path, **{**arrays, "meta": np.array(json.dumps(meta | change))})
        with pytest.raises(ScheduleFileError, match="not a name of printable") as caught:
            ftmesh.load(path)
        assert str(caught.value).isprintable()
    meta["phases"][0]["name"] = "\x07"
    np.savez(path, **{**arrays, "meta": np.array(json.dumps(meta))})
    with pytest.raises(ScheduleFileError, match="'meta' has phases"):
        ftmesh.load(path)


def test_a_missing_permission_is_not_damage(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    ftmesh.save(rings.build_schedule(ftmesh.Topology.grid("4x4")), path)

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", denied)  # those who run as root may read everything
    with pytest.raises(ScheduleFileError, match="cannot be read: Permission denied"):
        ftmesh.load(path)


def test_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    loaded = []

    def load():
        with pytest.raises(ScheduleFileError, match="is not a file"):
            ftmesh.load(tmp_path / "pipe")
        loaded.append(True)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(10)
    assert loaded
