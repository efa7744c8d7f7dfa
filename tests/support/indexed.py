"""TFRecord shards for tests of their index."""

import os
import struct
import time

from examples.common.records import Records, find_shards, write_records
from examples.common.shard_index import frame_head, masked_checksum

RECORDS = [b"a", b"", b"ccc", b"dd", b"e" * 1000]


def age(*paths):
    """Set the times of files to an hour ago."""
    for path in paths:
        then = time.time_ns() - 3600 * 10**9
        os.utime(path, ns=(then, then))


def framed(records):
    """Return the bytes of a TFRecord file."""
    return b"".join(
        frame_head(len(data)) + data + struct.pack("<I", masked_checksum(data)) for data in records
    )


def write_shards(folder, *shards, split="train"):
    """Write shards with these records; return their paths."""
    for number, records in enumerate(shards):
        path = folder / f"{split}-{number:05}-of-{len(shards):05}"
        write_records(path, records)
        age(path)
    return find_shards(folder, f"{split}-*")


def write_three_shards(folder):
    """Write shards of 3, 0 and 2 records: those of `RECORDS`."""
    return write_shards(folder, RECORDS[:3], [], RECORDS[3:])


def read_all(paths, **options):
    records = Records(paths, **options)
    return [records[i] for i in range(len(records))]
