"""A damaged checkpoint is never read: faults in every kind of file."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from ftmesh.checkpoint.manifest import Buffer, Manifest, Piece, Tensor
from ftmesh.checkpoint.storage import CheckpointReader, dump_json, load_json, write_part
from ftmesh.errors import CheckpointError, DamagedCheckpointError

F32 = np.dtype(np.float32)
MANIFEST = Manifest(
    step=30,
    processes=(2, 5),
    tensors=(
        Tensor("w", F32, (3, 2)),
        Tensor("mu/w", F32, (3, 2), 0, 0),
        Tensor("mu/b", F32, (5,), 0, 8),
    ),
    buffers=(Buffer(F32, 1, 4, (1, 0, 1, 3)),),
)
PIECES = {
    2: [
        (Piece("buffer", 0, 1), np.arange(8, dtype=np.float32)),
        (Piece("tensor", 0), np.ones((3, 2), np.float32)),
    ],
    5: [
        (Piece("buffer", 0, 0), 10 + np.arange(4, dtype=np.float32)),
        (Piece("buffer", 0, 3), 20 + np.arange(4, dtype=np.float32)),
    ],
}


# The same tensors, each cut into four parts: of two elements, and of four.
CUT = Manifest(
    step=30,
    processes=(2, 5),
    tensors=(
        Tensor("w", F32, (3, 2)),
        Tensor("mu/w", F32, (3, 2), 0, 4, 2),
        Tensor("mu/b", F32, (5,), 0, 0, 4),
    ),
    buffers=(Buffer(F32, 1, 6, (0, 1, 2, 3)),),
)
CUT_PIECES = {
    2: [
        (Piece("buffer", 0, 0), np.arange(6, dtype=np.float32)),
        (Piece("buffer", 0, 2), 20 + np.arange(6, dtype=np.float32)),
        (Piece("tensor", 0), np.ones((3, 2), np.float32)),
    ],
    5: [
        (Piece("buffer", 0, 1), 10 + np.arange(6, dtype=np.float32)),
        (Piece("buffer", 0, 3), 30 + np.arange(6, dtype=np.float32)),
    ],
}


def write(folder, manifest=MANIFEST, pieces=PIECES):
    for process in manifest.processes:
        write_part(folder, manifest, process, pieces[process])
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "30")


def problem(folder):
    """Return the message of the error."""
    with pytest.raises(DamagedCheckpointError) as caught, CheckpointReader(folder) as saved:
        saved.check()
    return str(caught.value)


def rewrite(path, change):
    """Change the content of a JSON file, and its checksum with it."""
    content = load_json(path.read_bytes(), path.name)
    change(content)
    path.write_text(dump_json(content))


def test_an_undamaged_checkpoint_is_read(folder):
    with CheckpointReader(folder) as saved:
        saved.check()
        assert saved.tensor("w").tolist() == [[1, 1]] * 3
        assert saved.tensor("mu/w").tolist() == [[0, 1], [2, 3], [10, 11]]
        assert saved.tensor("mu/b").tolist() == [4, 5, 6, 7, 20]
    assert {path.name for path in folder.iterdir()} == {
        "index.json", "2.bin", "2.json", "5.bin", "5.json",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["index.json", "2.json", "5.json", "2.bin", "5.bin"])
def test_a_flipped_bit_anywhere(folder, name):
    path = folder / name
    content = path.read_bytes()
    for i in range(len(content)):
        bad = bytearray(content)
        bad[i] ^= 1 << (i % 8)
        path.write_bytes(bad)
        assert name in problem(folder)
    path.write_bytes(content)
    with CheckpointReader(folder) as saved:
        saved.check()


@pytest.mark.parametrize("name", ["index.json", "2.json", "5.json", "2.bin", "5.bin"])
@pytest.mark.parametrize("how", ["cut", "empty", "longer", "missing"])
def test_a_file_of_the_wrong_length_or_missing(folder, name, how):
    path, content = folder / name, (folder / name).read_bytes()
    path.write_bytes({"cut": content[:-1], "longer": content + b"\0"}.get(how, b""))
    if how == "missing":
        path.unlink()
    assert problem(folder).startswith(f"its {name} " if how != "missing" else f"it has no {name}")


def test_an_empty_folder(tmp_path):
    (tmp_path / "9").mkdir()
    assert problem(tmp_path / "9") == "it has no index.json"


def test_a_file_that_is_cut_while_it_is_read(folder):
    with CheckpointReader(folder) as saved:
        (folder / "5.bin").write_bytes(b"1234")
        with pytest.raises(DamagedCheckpointError, match=r"its 5\.bin is cut short"):
            saved.tensor("mu/b")


def test_two_swapped_pieces(folder):
    """The file is as long as before, and both are undamaged."""
    raw = (folder / "5.bin").read_bytes()
    (folder / "5.bin").write_bytes(raw[16:] + raw[:16])
    assert problem(folder) == "rank 0's part of buffer 0 in 5.bin is damaged"


def first_piece(change):
    return lambda content: change(content["pieces"][0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["pieces"].append(c["pieces"][0]), "is in it twice, or not in the index"),
        (first_piece(lambda p: p.update(rank=3)), "is in it twice, or not in the index"),
        (first_piece(lambda p: p.update(rank=2)), "is in it twice, or not in the index"),
        (first_piece(lambda p: p.update(bytes=12)), "has 12 bytes at offset 0, and should have 16"),
        (first_piece(lambda p: p.update(offset=4)), "has 16 bytes at offset 4, and should have 16"),
        (first_piece(lambda p: p.update(offset=-4)), "has 16 bytes at offset -4"),
        (first_piece(lambda p: p.update(rank=[])), "its 5.json is malformed"),
        (first_piece(lambda p: p.pop("rank")), "its 5.json is malformed"),
        (first_piece(lambda p: p.pop("crc32")), "its 5.json is malformed"),
        (lambda c: c["pieces"].pop(), "its 5.bin has 16 bytes after its last piece"),
        (lambda c: c.update(pieces=7), "its 5.json is malformed"),
        (lambda c: c.update(step=31), "its 5.json belongs to another index"),
        (lambda c: c.update(bytes=33), "its 5.bin has 32 bytes, and should have 33"),
    ],
)
def test_a_wrong_list_of_pieces(folder, change, message):
    rewrite(folder / "5.json", change)
    assert message in problem(folder)


def test_a_piece_that_no_process_has_written(tmp_path):
    write(tmp_path, pieces={**PIECES, 5: PIECES[5][:1]})
    assert problem(tmp_path) == "no process has written rank 3's part of buffer 0"


def test_a_piece_that_two_processes_have_written(tmp_path):
    write(tmp_path, pieces={**PIECES, 5: [*PIECES[5], PIECES[2][0]]})
    assert "rank 1's part of buffer 0 is in it twice" in problem(tmp_path)


def test_a_file_of_another_mesh(folder):
    """A file that another run left, of the same length and step."""
    other = replace(MANIFEST, buffers=(replace(MANIFEST.buffers[0], owner=(1, 3, 1, 0)),))
    write_part(folder, other, 5, PIECES[5])
    assert problem(folder) == "its 5.json belongs to another index"


def tensor(number, **changes):
    return lambda content: content["tensors"][number].update(changes)


def buffer(**changes):
    return lambda content: content["buffers"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (tensor(1, start=4), "mu/b overlaps the tensor before it"),
        (tensor(2, start=12), "mu/b ends beyond its buffer"),
        (tensor(2, start=-1), "-1 is not a count"),
        (tensor(2, shape=[1.5]), "1.5 is not a count"),
        (tensor(2, buffer=1), "IndexError"),
        (tensor(2, dtype="float16"), "mu/b is float16, in a buffer of float32"),
        (tensor(0, dtype="object"), "'object' is not a dtype"),
        (tensor(0, dtype="O"), "'O' is not a dtype"),
        (tensor(0, dtype="<f4"), "'<f4' is not a dtype"),
        (tensor(0, name=3), "3 is not a name"),
        (tensor(0, name="mu/w"), "two tensors have the same name"),
        (buffer(rows=0), "an empty buffer"),
        (buffer(chunks=5), "5 chunks and 4 owners"),
        (buffer(owners=1), "IndexError"),
        (lambda c: c.update(owners=[[1, 0, 1, True]]), "True is not a count"),
        (lambda c: c.update(processes=[]), "its processes are []"),
        (lambda c: c.update(processes=[2, 2]), "its processes are [2, 2]"),
        (lambda c: c.update(processes=["../../2", 5]), "'../../2' is not a count"),
        (lambda c: c.pop("tensors"), "KeyError"),
        (lambda c: c.update(tensors=["w"]), "its index is malformed"),
    ],
)
def test_a_wrong_manifest(folder, change, message):
    check_wrong(folder, change, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (tensor(1, start=3), "mu/w overlaps the tensor before it"),
        (tensor(1, width=5), "mu/w ends beyond its buffer"),
        (tensor(1, width=1), "mu/w has more elements than its buffer has of it"),
        (tensor(1, width=-1), "-1 is not a count"),
        (tensor(2, shape=[17]), "mu/b has more elements than its buffer has of it"),
    ],
)
def test_a_wrong_manifest_of_cut_tensors(tmp_path, change, message):
    check_wrong(write(tmp_path / "30", CUT, CUT_PIECES), change, message)


def check_wrong(folder, change, message):
    rewrite(folder / "index.json", change)
    text = problem(folder)
    assert text.startswith(("its index is malformed: ", "its index is inconsistent: "))
    assert message in text.replace('"', "'")


def test_cut_tensors_are_read_from_all_ranks(tmp_path):
    with CheckpointReader(write(tmp_path / "30", CUT, CUT_PIECES)) as saved:
        saved.check()
        assert saved.tensor("mu/w").tolist() == [[4, 5], [14, 15], [24, 25]]
        assert saved.tensor("mu/b").tolist() == [0, 1, 2, 3, 10]


def test_names_of_tensors_are_not_paths(tmp_path):
    """Files are named after processes."""
    name = "../../../w"
    tensors = (replace(MANIFEST.tensors[0], name=name), *MANIFEST.tensors[1:])
    write(tmp_path / "in" / "30", replace(MANIFEST, tensors=tensors))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert len(list((tmp_path / "in" / "30").iterdir())) == 5
    with CheckpointReader(tmp_path / "in" / "30") as saved:
        assert saved.tensor(name).tolist() == [[1, 1]] * 3


@pytest.mark.parametrize("name", ["index.json", "5.json"])
def test_another_format_is_an_error_and_not_damage(folder, name):
    rewrite(folder / name, lambda content: content.update(format="ftmesh.checkpoint/4"))
    with pytest.raises(CheckpointError, match=r"30 is of format 'ftmesh\.checkpoint/4'") as caught:
        CheckpointReader(folder)
    assert not isinstance(caught.value, DamagedCheckpointError)


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, '{"crc32":0}', "\xff", "NaN"])
def test_a_manifest_of_another_kind(folder, text):
    (folder / "index.json").write_text(text, "latin-1")
    assert problem(folder) == "its index.json is damaged"


def test_a_failed_read_is_an_error_and_not_damage(folder):
    """A disk that fails says nothing about the checkpoint."""
    (folder / "2.json").unlink()
    (folder / "2.json").symlink_to("2.json")
    with pytest.raises(CheckpointError, match=r"cannot read .*30: Too many levels") as caught:
        CheckpointReader(folder)
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_json_round_trip(tmp_path):
    content = {"name": 'a "b" \n é', "numbers": [1, 2.5, True, None], "inner": {"z": 0, "a": {}}}
    (tmp_path / "x.json").write_text(dump_json(content))
    assert load_json((tmp_path / "x.json").read_bytes(), "x.json") == content
    assert json.loads((tmp_path / "x.json").read_text())["name"] == content["name"]
    shutil.copy(tmp_path / "x.json", tmp_path / "y.json")
    assert load_json((tmp_path / "y.json").read_bytes(), "y.json") == content
