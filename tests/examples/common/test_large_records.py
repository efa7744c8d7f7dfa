"""The index of large records, and of files beyond 4 GiB."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from examples.common.records import Records
from examples.common.shard_index import BLOCK, ShardIndex, frame_head
from tests.support.indexed import age


def bytes_read():
    """Bytes read by this process so far; 0 where the system does not tell."""
    counts = Path("/proc/self/io")
    return int(counts.read_text().split()[1]) if counts.exists() else 0


class TestLarge:
    """Sparse files, whose large records are not read."""

    def sparse(self, path, lengths):
        with path.open("wb") as file:
            for length in lengths:
                file.write(frame_head(length))
                file.seek(length, os.SEEK_CUR)
                file.write(struct.pack("<I", 0))
        age(path)

    @pytest.mark.parametrize(
        ("lengths", "width"),
        [
            ([5 << 30, 7, 6 << 30, 9], 8),
            ([7] * (BLOCK - 1) + [5 << 30] + [9] * 2 * BLOCK, 4),  # a base beyond 4 GiB
            ([3 << 30, 2 << 30, 1], 8),
            ([1 << 31, 9], 4),
        ],
    )
    def test_beyond_four_gibibytes(self, tmp_path, lengths, width):
        path = tmp_path / "train-00000-of-00001"
        self.sparse(path, lengths)
        ends = np.cumsum([length + 16 for length in lengths]).tolist()
        records = Records([path])
        for _ in range(2):
            (shard,) = records._shards
            assert shard.starts.itemsize == width
            spans = [shard.span(i) for i in range(len(shard))]
            assert spans == list(zip([0, *ends[:-1]], ends, strict=True))
            records = Records([path])
            assert records._shards[0].is_mapped

    def test_large_records_are_skipped(self, tmp_path):
        path = tmp_path / "train-00000-of-00001"
        self.sparse(path, [100_000] * 100 + [50] * 10_000 + [3_000_000] * 5)
        passed = []
        before = bytes_read()
        index = ShardIndex.scan(path, passed.append)
        assert bytes_read() - before < 8_000_000  # a million of small ones, and some windows
        assert len(index) == 10_105
        assert sum(passed) == path.stat().st_size == 25_661_680
        assert index.span(10_104) == (22_661_664, 25_661_680)
