"""The index of records: built once, stored, shared, and updated when files change."""

import errno
import os
import pickle
import random
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import pytest

from examples.common.record_index import index_file
from examples.common.records import OpenFile, Records, find_shards, write_records
from examples.common.shard_index import BLOCK, ShardIndex, frame_head
from ftmesh.errors import DataError
from tests.support.indexed import RECORDS, framed, read_all, write_shards, write_three_shards


@pytest.fixture
def shards(tmp_path):
    return write_three_shards(tmp_path)


@pytest.fixture
def scans(monkeypatch):
    """The names of the files that are scanned."""
    names, scan = [], ShardIndex.scan

    def scanned(path, *args):
        names.append(path.name)
        return scan(path, *args)

    monkeypatch.setattr(ShardIndex, "scan", staticmethod(scanned))
    return names


class TestIndexFile:
    def test_is_next_to_the_files_and_saves_scans(self, shards, scans):
        assert read_all(shards) == RECORDS
        assert sorted(scans) == [path.name for path in shards]
        assert (shards[0].parent / ".train.ftmesh-index").is_file()
        scans.clear()
        assert read_all(shards) == RECORDS
        assert scans == []

    def test_loading_opens_no_other_file(self, shards, monkeypatch):
        read_all(shards)
        opened, really_open = [], Path.open

        def spy(path, *args, **kwargs):
            opened.append(path.name)
            return really_open(path, *args, **kwargs)

        monkeypatch.setattr(Path, "open", spy)
        assert len(Records(shards)) == 5
        assert opened == [".train.ftmesh-index"]

    def test_four_bytes_per_record(self, tmp_path):
        paths = write_shards(tmp_path, [bytes(i % 50) for i in range(20_000)])
        records = Records(paths)
        assert (tmp_path / ".train.ftmesh-index").stat().st_size < 4.05 * 20_000
        for i in (0, 1, BLOCK - 1, BLOCK, 19_999):
            assert records[i] == bytes(i % 50)

    def test_the_index_of_a_file_just_written_is_not_trusted(self, tmp_path, scans):
        for record in (b"ab", b"cd", b"ef"):
            (tmp_path / "one").write_bytes(frame_head(2) + record + bytes(4))
            Records([tmp_path / "one"])
        assert scans == ["one"] * 3

    def test_not_written_with_keep_false(self, shards):
        assert read_all(shards, keep=False) == RECORDS
        assert set(shards[0].parent.iterdir()) == set(shards)

    def test_is_not_taken_for_a_shard(self, tmp_path, shards):
        read_all(shards)
        assert find_shards(tmp_path, "*") == shards


class TestNames:
    @pytest.mark.parametrize(
        ("names", "name"),
        [
            (["train-00000-of-00002", "train-00001-of-00002"], ".train.ftmesh-index"),
            (["train-00009-of-00011.gz"], ".train.ftmesh-index"),
            (["part-00000", "part-00001"], ".part.ftmesh-index"),
            (["eval_10k"], ".eval_10k.ftmesh-index"),
            (["eval_10", "eval_12"], ".eval.ftmesh-index"),
            (["a.tfrecord", "b.tfrecord"], ".ftmesh-index"),
        ],
    )
    def test_common_prefix(self, names, name):
        assert index_file(Path("data"), names) == Path("data") / name

    def test_two_splits_in_a_folder(self, tmp_path, shards, scans):
        others = write_shards(tmp_path, [b"other"], split="validation")
        for _ in range(2):
            assert read_all(others) == [b"other"]
            assert read_all(shards) == RECORDS
        assert len(scans) == 4

    def test_parts_of_a_set_share_its_index(self, shards, scans):
        for part in (shards[:2], shards[2:], shards, shards[:1]):
            Records(part)
        assert sorted(scans) == [path.name for path in shards]

    def test_two_folders(self, tmp_path, scans):
        paths = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            paths += write_shards(tmp_path / name, [name.encode()])
        assert [read_all(paths), read_all(paths[::-1])] == [[b"a", b"b"], [b"b", b"a"]]
        assert len(scans) == 2


class TestChanges:
    def replaced(self, path, records):
        """Write a file without touching the index, with the same times."""
        before = path.stat()
        path.write_bytes(framed(records))
        while path.stat().st_ctime_ns == before.st_ctime_ns or path.stat().st_mtime_ns != (
            before.st_mtime_ns
        ):
            os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))

    @pytest.mark.parametrize(
        "records",
        [
            [b"e" * 1000, b"dd"],  # as many bytes
            [b"f"],
            [b"f"] * 5000,
        ],
    )
    def test_only_what_changed_is_scanned_again(self, shards, records, scans):
        read_all(shards)
        scans.clear()
        self.replaced(shards[2], records)
        for _ in range(2):
            assert read_all(shards) == [*RECORDS[:3], *records]
        assert scans == [shards[2].name]

    def test_touched(self, shards, scans):
        read_all(shards)
        scans.clear()
        os.utime(shards[0], ns=(10**18, 10**18))
        for _ in range(2):
            assert read_all(shards) == RECORDS
        assert scans == [shards[0].name]

    def test_added_and_removed(self, tmp_path, scans):
        paths = write_shards(tmp_path, [b"1"], [b"2"], [b"3"])
        assert read_all(paths[:2]) == [b"1", b"2"]
        assert read_all(paths) == [b"1", b"2", b"3"]
        assert len(scans) == 3
        paths[0].unlink()
        assert read_all(paths[1:]) == [b"2", b"3"]
        assert len(scans) == 3
        with pytest.raises(DataError, match="cannot read"):
            Records(paths)

    def test_write_records_removes_the_old_index(self, tmp_path, shards):
        others = write_shards(tmp_path, [b"other"], split="validation")
        read_all(shards), read_all(others)
        write_records(shards[2], [b"new"])
        assert not (tmp_path / ".train.ftmesh-index").exists()
        assert (tmp_path / ".validation.ftmesh-index").exists()
        assert read_all(shards) == [*RECORDS[:3], b"new"]

    def test_while_it_is_read(self, shards, caplog):
        records = Records(shards)
        assert records[3] == b"dd"
        shards[2].write_bytes(framed([b"e" * 1000, b"dd"]))  # as many bytes, and as many records
        assert [records[3], records[4]] == [b"e" * 1000, b"dd"]
        assert "train-00002-of-00003 does not match its index; scanning it again" in caplog.text
        shards[2].write_bytes(framed([b"e" * 1018]))
        with pytest.raises(DataError, match="has changed, from 2 records to 1: start again"):
            records[4]


class TestFailedWrites:
    def test_a_folder_of_the_same_name(self, shards, caplog):
        (shards[0].parent / ".train.ftmesh-index").mkdir()
        for _ in range(2):
            assert read_all(shards) == RECORDS
        assert f"could not write the index {shards[0].parent}/.train.ftmesh-index" in caplog.text
        assert os.strerror(errno.EISDIR) in caplog.text

    def test_no_room(self, tmp_path, caplog):
        paths = write_shards(tmp_path, [b""] * 5000)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        try:
            records = Records(paths)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        (line,) = caplog.messages
        assert line.startswith("could not write the index")
        assert line.endswith(os.strerror(errno.EFBIG))
        assert [records[i] for i in (0, 4999)] == [b"", b""]
        assert list(tmp_path.iterdir()) == paths  # nothing is left of it

    def test_abandoned_temporary_files_are_removed(self, tmp_path, shards):
        left = tmp_path / "..train.ftmesh-index.host-1-1.begun"
        recent = tmp_path / "..train.ftmesh-index.host-2-1.begun"
        for path in (left, recent):
            path.touch()
        os.utime(left, (1, 1))
        read_all(shards)
        assert not left.exists()
        assert recent.exists()


def test_concurrent_builds(tmp_path):
    paths = write_shards(
        tmp_path, *([b"%d" % (100 * shard + i) for i in range(50)] for shard in range(8))
    )
    expected = [b"%d" % (100 * shard + i) for shard in range(8) for i in range(50)]
    start = threading.Barrier(6)

    def build(_):
        start.wait()
        return read_all(paths)

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(build, range(6))) == [expected] * 6
    assert read_all(paths) == expected
    assert set(tmp_path.iterdir()) == {*paths, tmp_path / ".train.ftmesh-index"}


class TestReading:
    def test_a_copy_in_another_process(self, shards):
        records = pickle.loads(pickle.dumps(Records(shards)))
        assert [records[i] for i in range(5)] == RECORDS
        assert all(shard.is_mapped for shard in records._shards)

    def test_a_copy_without_an_index_file_has_the_index(self, shards, scans):
        whole = Records(shards, keep=False)
        scans.clear()
        records = pickle.loads(pickle.dumps(whole))
        assert [records[i] for i in range(5)] == RECORDS
        assert scans == []

    def test_a_copy_is_small(self, tmp_path):
        paths = write_shards(tmp_path, [b"x"] * 50_000)
        assert len(pickle.dumps(Records(paths))) < 1000

    def test_a_copy_of_other_files(self, shards):
        copy = pickle.dumps(Records(shards))
        write_records(shards[2], [b"new"])
        with pytest.raises(DataError, match="have changed: start again"):
            pickle.loads(copy)

    def test_by_many_threads_with_few_files_open(self, tmp_path):
        paths = write_shards(
            tmp_path, *([b"%d-%d" % (shard, i) for i in range(20)] for shard in range(9))
        )
        records = Records(paths)
        records._files = lru_cache(2)(OpenFile)
        before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
        indices = random.Random(0).choices(range(len(records)), k=4000)
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(records.__getitem__, indices))
        assert found == [b"%d-%d" % divmod(i, 20) for i in indices]
        if before:
            assert len(os.listdir("/proc/self/fd")) <= before + 2

    def test_a_sample_of_the_shards(self, tmp_path):
        records = Records(write_shards(tmp_path, *([b"1", b"2"] for _ in range(100)), []))
        assert records.first_of_shards(4) == [0, 66, 132, 198]
        assert len(records.first_of_shards()) == 64
        assert len(records.first_of_shards(1000)) == 100


def test_progress_bar_on_a_terminal(shards, capsys, monkeypatch):
    Records(shards, keep=False, show=True)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, then
    Records(shards, keep=False)
    assert capsys.readouterr() == ("", "")
    Records(shards, keep=False, show=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "indexing 3 files" in err
