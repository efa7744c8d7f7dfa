"""A checkpoint that is not as it was written is never read: faults in every kind of file."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from ftmesh.checkpoint.manifest import Buffer, Index, Piece, Tensor
from ftmesh.checkpoint.reader import Saved
from ftmesh.checkpoint.writer import dump, load, write_part
from ftmesh.errors import CheckpointError, DamagedCheckpointError
from ftmesh.files import write_whole

F32 = np.dtype(np.float32)
INDEX = Index(
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


def write(folder, index=INDEX, pieces=PIECES):
    for process in index.processes:
        write_part(folder, index, process, pieces[process])
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "30")


def problem(folder):
    """What is wrong, in words."""
    with pytest.raises(DamagedCheckpointError) as caught, Saved(folder) as saved:
        saved.check()
    return str(caught.value)


def rewrite(path, change):
    """Change what a JSON file says, and its checksum with it."""
    content = load(path.read_bytes(), path.name)
    change(content)
    path.write_text(dump(content))


def test_what_is_sound_is_read(folder):
    with Saved(folder) as saved:
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
    sound = path.read_bytes()
    for at in range(len(sound)):
        bad = bytearray(sound)
        bad[at] ^= 1 << (at % 8)
        path.write_bytes(bad)
        assert name in problem(folder)
    path.write_bytes(sound)
    with Saved(folder) as saved:
        saved.check()


@pytest.mark.parametrize("name", ["index.json", "2.json", "5.json", "2.bin", "5.bin"])
@pytest.mark.parametrize("how", ["cut", "empty", "longer", "missing"])
def test_a_file_of_another_length_or_none(folder, name, how):
    path, sound = folder / name, (folder / name).read_bytes()
    path.write_bytes({"cut": sound[:-1], "longer": sound + b"\0"}.get(how, b""))
    if how == "missing":
        path.unlink()
    assert problem(folder).startswith(f"its {name} " if how != "missing" else f"it has no {name}")


def test_an_empty_folder(tmp_path):
    (tmp_path / "9").mkdir()
    assert problem(tmp_path / "9") == "it has no index.json"


def test_a_file_that_is_cut_while_it_is_read(folder):
    with Saved(folder) as saved:
        (folder / "5.bin").write_bytes(b"1234")
        with pytest.raises(DamagedCheckpointError, match=r"its 5\.bin is cut short"):
            saved.tensor("mu/b")


def test_two_pieces_that_change_places(folder):
    """As long as before, each of them sound."""
    raw = (folder / "5.bin").read_bytes()
    (folder / "5.bin").write_bytes(raw[16:] + raw[:16])
    assert problem(folder) == "what rank 0 has written of buffer 0 in 5.bin is damaged"


def first_piece(change):
    return lambda content: change(content["pieces"][0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c["pieces"].append(c["pieces"][0]), "is in it twice, or not in the index"),
        (first_piece(lambda p: p.update(rank=3)), "is in it twice, or not in the index"),
        (first_piece(lambda p: p.update(rank=2)), "is in it twice, or not in the index"),
        (first_piece(lambda p: p.update(bytes=12)), "has 12 bytes from 0 on, and should have 16"),
        (first_piece(lambda p: p.update(offset=4)), "has 16 bytes from 4 on, and should have 16"),
        (first_piece(lambda p: p.update(offset=-4)), "has 16 bytes from -4 on"),
        (first_piece(lambda p: p.update(rank=[])), "its 5.json makes no sense"),
        (first_piece(lambda p: p.pop("rank")), "its 5.json makes no sense"),
        (first_piece(lambda p: p.pop("crc32")), "its 5.json makes no sense"),
        (lambda c: c["pieces"].pop(), "its 5.bin has 16 bytes that are no piece's"),
        (lambda c: c.update(pieces=7), "its 5.json makes no sense"),
        (lambda c: c.update(step=31), "its 5.json belongs to another index"),
        (lambda c: c.update(bytes=33), "its 5.bin has 32 bytes, and should have 33"),
    ],
)
def test_a_list_of_pieces_that_is_wrong(folder, change, says):
    rewrite(folder / "5.json", change)
    assert says in problem(folder)


def test_a_piece_that_nobody_has_written(tmp_path):
    write(tmp_path, pieces={**PIECES, 5: PIECES[5][:1]})
    assert problem(tmp_path) == "nobody has written {'of': 'buffer', 'number': 0, 'rank': 3}"


def test_a_piece_that_two_have_written(tmp_path):
    write(tmp_path, pieces={**PIECES, 5: [*PIECES[5], PIECES[2][0]]})
    assert "'rank': 1} is in it twice" in problem(tmp_path)


def test_a_part_that_belongs_to_another_mesh(folder):
    """As long, of the same step, and of another run: a file that was left there."""
    other = replace(INDEX, buffers=(replace(INDEX.buffers[0], owner=(1, 3, 1, 0)),))
    write_part(folder, other, 5, PIECES[5])
    assert problem(folder) == "its 5.json belongs to another index"


def tensor(number, **changes):
    return lambda content: content["tensors"][number].update(changes)


def buffer(**changes):
    return lambda content: content["buffers"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (tensor(1, start=4), "mu/b begins before the one before it ends"),
        (tensor(2, start=12), "mu/b ends beyond its buffer"),
        (tensor(2, start=-1), "-1 is not a count"),
        (tensor(2, shape=[1.5]), "1.5 is not a count"),
        (tensor(2, buffer=1), "IndexError"),
        (tensor(2, dtype="float16"), "mu/b is float16, in a buffer of float32"),
        (tensor(0, dtype="object"), "'object' is not a dtype"),
        (tensor(0, dtype="O"), "'O' is not a dtype"),
        (tensor(0, dtype="<f4"), "'<f4' is not a dtype"),
        (tensor(0, name=3), "3 is not a name"),
        (tensor(0, name="mu/w"), "two tensors have one name"),
        (buffer(rows=0), "a buffer of nothing"),
        (buffer(chunks=5), "5 chunks and 4 owners"),
        (buffer(owners=1), "IndexError"),
        (lambda c: c.update(owners=[[1, 0, 1, True]]), "True is not a count"),
        (lambda c: c.update(processes=[]), "its processes are []"),
        (lambda c: c.update(processes=[2, 2]), "its processes are [2, 2]"),
        (lambda c: c.update(processes=["../../2", 5]), "'../../2' is not a count"),
        (lambda c: c.pop("tensors"), "KeyError"),
        (lambda c: c.update(tensors=["w"]), "its index makes no sense"),
    ],
)
def test_an_index_that_is_wrong(folder, change, says):
    rewrite(folder / "index.json", change)
    found = problem(folder)
    assert found.startswith("its index makes no sense: ")
    assert says in found.replace('"', "'")


def test_names_are_no_paths(tmp_path):
    """Whatever tensors are called, files are called by the numbers of processes."""
    name = "../../../w"
    index = replace(INDEX, tensors=(replace(INDEX.tensors[0], name=name), *INDEX.tensors[1:]))
    write(tmp_path / "in" / "30", index)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert len(list((tmp_path / "in" / "30").iterdir())) == 5
    with Saved(tmp_path / "in" / "30") as saved:
        assert saved.tensor(name).tolist() == [[1, 1]] * 3


@pytest.mark.parametrize("name", ["index.json", "5.json"])
def test_one_of_another_version_is_refused_and_not_passed_over(folder, name):
    rewrite(folder / name, lambda content: content.update(format="ftmesh.checkpoint/2"))
    with pytest.raises(CheckpointError, match=r"30 is of format 'ftmesh\.checkpoint/2'") as caught:
        Saved(folder)
    assert not isinstance(caught.value, DamagedCheckpointError)


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, '{"crc32":0}', "\xff", "NaN"])
def test_what_is_not_of_this_kind_at_all(folder, text):
    (folder / "index.json").write_text(text, "latin-1")
    assert problem(folder) == "its index.json is damaged"


def test_what_cannot_be_read_is_not_passed_over(folder):
    """A disk that does not answer says nothing of a checkpoint."""
    (folder / "2.json").unlink()
    (folder / "2.json").symlink_to("2.json")
    with pytest.raises(CheckpointError, match=r"cannot read .*30: Too many levels") as caught:
        Saved(folder)
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    write_whole(path, [b"one ", b"two"])

    def fails():
        yield b"three"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_whole(path, fails())
    assert path.read_bytes() == b"one two"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_json_goes_there_and_back(tmp_path):
    content = {"name": 'a "b" \n é', "numbers": [1, 2.5, True, None], "inner": {"z": 0, "a": {}}}
    (tmp_path / "x.json").write_text(dump(content))
    assert load((tmp_path / "x.json").read_bytes(), "x.json") == content
    assert json.loads((tmp_path / "x.json").read_text())["name"] == content["name"]
    shutil.copy(tmp_path / "x.json", tmp_path / "y.json")
    assert load((tmp_path / "y.json").read_bytes(), "y.json") == content
