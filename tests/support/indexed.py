"""Shards of records, for tests of their index."""

import os
import struct
import time

from examples.common.records import Records, find_shards, write_records
from examples.common.shard_index import frame_head, masked_checksum

EVERY = [b"a", b"", b"ccc", b"dd", b"e" * 1000]


def age(*paths):
    """Have files look as if they were written an hour ago, like most."""
    for path in paths:
        then = time.time_ns() - 3600 * 10**9
        os.utime(path, ns=(then, then))


def framed(records):
    """The bytes of a TFRecord file."""
    return b"".join(
        frame_head(len(data)) + data + struct.pack("<I", masked_checksum(data)) for data in records
    )


def made(folder, *shards, split="train"):
    """Shards with these records, and their paths."""
    for number, records in enumerate(shards):
        path = folder / f"{split}-{number:05}-of-{len(shards):05}"
        write_records(path, records)
        age(path)
    return find_shards(folder, f"{split}-*")


def three(folder):
    """Shards of 3, 0 and 2 records, which are `EVERY` one."""
    return made(folder, EVERY[:3], [], EVERY[3:])


def read(paths, **options):
    records = Records(paths, **options)
    return [records[i] for i in range(len(records))]
