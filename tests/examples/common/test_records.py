"""TFRecords: writing, random access, and damage."""

import struct
import time

import numpy as np
import pytest

from examples.common.records import Records, find_shards, make_example, parse_example, write_records
from ftmesh.errors import DataError, RecordError


@pytest.fixture
def shards(tmp_path):
    """Three shards of 3, 0 and 2 records."""
    for number, records in enumerate([[b"a", b"", b"ccc"], [], [b"dd", b"e" * 1000]]):
        write_records(tmp_path / f"train-{number:05}-of-00003", records)
    return find_shards(tmp_path, "train-*")


def flip(path, at):
    """Change a byte of a file."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0xFF
    path.write_bytes(bytes(raw))


class TestRecords:
    def test_any_record(self, shards):
        records = Records(shards)
        assert len(records) == 5
        assert [records[i] for i in (4, 0, 2, 1, 3)] == [b"e" * 1000, b"a", b"ccc", b"", b"dd"]
        assert records.first_of_shards() == [0, 3]
        assert records.name(4) == f"{shards[2]}, record 1"

    def test_past_the_end(self, shards):
        with pytest.raises(IndexError, match="record 5 of 5"):
            Records(shards)[5]

    def test_the_bytes_that_tensorflow_writes(self, tmp_path):
        # The checksum of 8 zero bytes is 0x8c28b28a by RFC 3720's polynomial.
        crc = 0x8C28B28A
        masked = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
        write_records(tmp_path / "one", [bytes(8)])
        raw = (tmp_path / "one").read_bytes()
        assert raw[:8] == struct.pack("<Q", 8)
        assert raw[12:20] == bytes(8)
        assert raw[20:] == struct.pack("<I", masked)

    def test_grain_reads_the_same(self, shards):
        import grain

        records = Records(shards)
        assert list(grain.MapDataset.source(records)) == [records[i] for i in range(5)]
        assert list(grain.experimental.TFRecordIterDataset(str(shards[0]))) == [b"a", b"", b"ccc"]

    @pytest.mark.parametrize("at", [12, -4])  # in the data; in its checksum
    def test_a_damaged_record_is_the_only_one_lost(self, shards, at):
        start = shards[2].stat().st_size - 1016
        flip(shards[2], start + at if at > 0 else at)
        records = Records(shards)
        with pytest.raises(RecordError, match=r"train-00002-of-00003, record 1: .* checksum"):
            records[4]
        assert records[3] == b"dd"

    @pytest.mark.parametrize("at", [0, 8])  # the length; its checksum
    def test_a_damaged_length_loses_the_rest_of_the_file(self, shards, at):
        flip(shards[2], 18 + at)
        with pytest.raises(DataError, match="record 1 should begin at byte 18"):
            Records(shards)

    @pytest.mark.parametrize("cut", [1, 500, 1010])
    def test_a_file_cut_short(self, shards, cut):
        shards[2].write_bytes(shards[2].read_bytes()[:-cut])
        with pytest.raises(DataError, match="train-00002-of-00003 is cut short"):
            Records(shards)

    def test_a_file_gone(self, shards):
        shards[1].unlink()
        with pytest.raises(DataError, match=r"cannot read .*train-00001-of-00003: No such file"):
            Records(shards)


class TestShards:
    def test_in_order(self, shards):
        assert [path.name[:11] for path in shards] == ["train-00000", "train-00001", "train-00002"]

    def test_any_names(self, tmp_path):
        for name in ("eval_b", "eval_a", "other"):
            (tmp_path / name).touch()
        assert [path.name for path in find_shards(tmp_path, "eval_*")] == ["eval_a", "eval_b"]

    def test_one_missing(self, tmp_path, shards):
        shards[1].unlink()
        with pytest.raises(DataError, match="lacks 1 of 00003 shards: train-00001-of-00003"):
            find_shards(tmp_path, "train-*")

    def test_a_name_with_a_huge_number_of_shards(self, tmp_path):
        (tmp_path / "train-00000-of-99999999999").touch()
        start = time.process_time()
        with pytest.raises(DataError, match=r"lacks 99999999999 of 99999999999 shards: train-0000"):
            find_shards(tmp_path, "train-*")
        assert time.process_time() - start < 1

    def test_many_missing(self, tmp_path):
        (tmp_path / "train-00007-of-01024").touch()
        with pytest.raises(DataError, match=r"1023 of 01024 shards: train-00000.* and 1020 more"):
            find_shards(tmp_path, "train-*")

    def test_two_sets(self, tmp_path, shards):
        (tmp_path / "train-00000-of-00001").touch()
        with pytest.raises(DataError, match="several sets"):
            find_shards(tmp_path, "train-*")

    def test_none(self, tmp_path):
        with pytest.raises(DataError, match=r"no file in .* matches 'train-\*'"):
            find_shards(tmp_path, "train-*")
        with pytest.raises(DataError, match="there is no folder"):
            find_shards(tmp_path / "nowhere", "train-*")


class TestExamples:
    def test_round_trip(self):
        features = {
            "image/encoded": [b"\xff\xd8jpeg"],
            "image/class/label": [1000],
            "input_ids": np.arange(-3, 512),
            "masked_lm_weights": [1.0, 0.5],
            "words": [b"a", b"b"],
        }
        parsed = parse_example(make_example(features))
        assert parsed.keys() == features.keys()
        for name, values in features.items():
            np.testing.assert_array_equal(parsed[name], values)
        assert parsed["input_ids"].dtype == np.int64
        assert parsed["masked_lm_weights"].dtype == np.float32

    def test_the_bytes_that_tensorflow_writes(self):
        # Field 1 (features), an entry of the map, its key "x", and an Int64List of 3, packed.
        wire = bytes([0x0A, 12, 0x0A, 10, 0x0A, 1, ord("x"), 0x12, 5, 0x1A, 3, 0x0A, 1, 3])
        assert make_example({"x": [3]}) == wire
        assert parse_example(wire)["x"] == [3]

    def test_not_an_example(self):
        with pytest.raises(RecordError, match=r"not a tf\.train\.Example"):
            parse_example(b"\xff\xd8\xff\xe0 a bare JPEG")


def test_a_failed_write_keeps_the_old_shard(tmp_path):
    path = tmp_path / "train-00000-of-00001"
    write_records(path, [b"old"])

    def records():
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_records(path, records())
    assert list(Records([path], keep=False)) == [b"old"]
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
