"""A damaged or wrong index of records is detected."""

import json
import logging
import struct

import numpy as np
import pytest

from examples.common import record_index
from examples.common.record_index import load_index
from examples.common.records import Records
from examples.common.shard_index import FileStamp, ShardIndex, checksum
from tests.support.indexed import RECORDS, read_all, write_shards, write_three_shards


@pytest.fixture
def shards(tmp_path):
    return write_three_shards(tmp_path)


class TestDamage:
    """Whatever the index file holds, the right records are read, with a warning."""

    def change(self, shards, change):
        """Write an index file, and change its bytes."""
        read_all(shards)
        file = shards[0].parent / ".train.ftmesh-index"
        file.write_bytes(change(file.read_bytes()))

    def assert_noticed(self, shards, caplog):
        caplog.clear()
        assert read_all(shards) == RECORDS
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        (line,) = caplog.messages
        assert "\n" not in line
        caplog.clear()
        return line

    def test_a_flipped_bit_anywhere(self, shards, caplog):
        read_all(shards)
        file = shards[0].parent / ".train.ftmesh-index"
        sound = file.read_bytes()
        padding = range(len(sound) - 12, len(sound) - 8)  # behind three records, before two
        for at in range(0, len(sound), 3):
            file.write_bytes(bytes([*sound[:at], sound[at] ^ 1 << at % 8, *sound[at + 1 :]]))
            if at in padding:
                assert read_all(shards) == RECORDS
            else:
                self.assert_noticed(shards, caplog)

    def test_the_start_of_the_next_record(self, tmp_path, caplog):
        paths = write_shards(tmp_path, [b"%03d" % i for i in range(100)])
        expected = read_all(paths)
        file = tmp_path / ".train.ftmesh-index"
        starts = np.arange(100, dtype="<u4") * 19
        behind = np.minimum(starts + 19, starts[-1])  # there are records, all but the last
        raw = file.read_bytes()
        assert raw.count(starts.tobytes()) == 1
        file.write_bytes(raw.replace(starts.tobytes(), behind.tobytes()))
        records = Records(paths)
        assert [records[i] for i in range(100)] == expected
        assert "does not match its index" in caplog.text

    @pytest.mark.parametrize("size", [0, 1, 24, 47, 48, 100, -1])
    def test_cut_short(self, shards, size, caplog):
        self.change(shards, lambda raw: raw[:size])
        assert "is damaged; scanning the files again" in self.assert_noticed(shards, caplog)

    def test_longer(self, shards, caplog):
        self.change(shards, lambda raw: raw + bytes(8))
        assert "is damaged" in self.assert_noticed(shards, caplog)

    def test_another_format(self, shards, caplog):
        self.change(shards, lambda raw: raw.replace(b"records/1", b"records/0"))
        line = self.assert_noticed(shards, caplog)
        assert "is not of the format ftmesh.records/1" in line

    @pytest.mark.parametrize(
        "names",
        [
            b"[" * 100_000,
            b"[]",
            b'"names"',
            b"{} trailing",
            b"\xff\xfe",
            json.dumps({"train-00000-of-00003": 3}).encode(),
            json.dumps({"train-00000-of-00003": {"size": 3}}).encode(),
            json.dumps(
                {
                    "train-00000-of-00003": dict.fromkeys(
                        ("size", "mtime_ns", "ctime_ns", "records", "width"), 1e999
                    )
                }
            ).encode(),
            *(
                json.dumps(
                    {"a": {"size": 1, "mtime_ns": 1, "ctime_ns": 1, "records": n, "width": w}}
                ).encode()
                for n, w in [(-1, 4), (2**62, 4), (2**70, 8), (0, 0), (0, -8), (1, 4)]
            ),
        ],
    )
    def test_wrong_contents_with_a_right_checksum(self, shards, names, caplog):
        known = struct.pack("<IQQ", 0, len(names), 0) + names
        raw = record_index._FORMAT.ljust(24, b"\0") + struct.pack("<I", checksum(known)) + known
        self.change(shards, lambda _: raw)
        assert "is damaged" in self.assert_noticed(shards, caplog)

    @pytest.mark.parametrize("size", [2**40, 2**63])
    def test_sizes_beyond_the_file(self, shards, size, caplog):
        self.change(shards, lambda raw: raw[:32] + struct.pack("<QQ", size, size) + raw[48:])
        assert "is damaged" in self.assert_noticed(shards, caplog)

    @pytest.mark.parametrize(
        "begins",
        [
            [17, 0, 33],  # two records the other way round
            [0, 17, 34],
            [0, 33, 33],
            [0, 2**40, 33],
            [-1, 17, 33],
            [5, 17, 33],
        ],
    )
    def test_a_consistent_index_that_is_wrong(self, shards, begins, caplog):
        read_all(shards)
        file = shards[0].parent / ".train.ftmesh-index"
        lying = ShardIndex.from_starts(FileStamp.from_path(shards[0]), np.array(begins, np.int64))
        record_index.write_index(file, {**load_index(file), shards[0].name: lying})
        line = self.assert_noticed(shards, caplog)
        assert "train-00000-of-00003 does not match its index; scanning it again" in line
