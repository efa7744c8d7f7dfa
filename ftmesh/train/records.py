"""TFRecord files, without TensorFlow: any record of a set of shards, checked, and what is in it.

A file is a row of records, each in a frame:

    length, 8 bytes | checksum of the length, 4 | the record | checksum of the record, 4

`Records` hops from length to length once to learn where every record begins. From then on it reads
any of them, in any order, so a batch can be a function of the step alone. It is a source for
`grain.MapDataset.source`.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from ftmesh.errors import DataError, RecordError

Feature = list[bytes] | NDArray[np.int64] | NDArray[np.float32]

_SHARD = re.compile(r"(.*-)\d+-of-(\d+)(.*)")  # train-00001-of-00004
_HEAD, _TAIL = struct.Struct("<QI"), struct.Struct("<I")
_FRAME_BYTES = _HEAD.size + _TAIL.size


class Records:
    """The records of some files as one sequence. A damaged record is a `RecordError`, each time."""

    def __init__(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        self.paths = [Path(path) for path in paths]
        with ThreadPoolExecutor(32) as threads:  # each waits for the disk, not for the others
            self._ends = list(threads.map(_record_ends, self.paths))
        self._first = np.cumsum([0, *map(len, self._ends)])

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: int) -> bytes:
        shard, record = self.place(index)
        ends = self._ends[shard]
        start = int(ends[record - 1]) if record else 0
        size = int(ends[record]) - start
        with self.paths[shard].open("rb", buffering=0) as file:
            file.seek(start)
            frame = file.read(size)
        data = frame[_HEAD.size : -_TAIL.size]
        if len(frame) != size or _TAIL.unpack(frame[-_TAIL.size :]) != (_checksum(data),):
            raise RecordError(f"{self.name(index)}: the data does not match its checksum")
        return data

    def example(self, index: int) -> dict[str, Feature]:
        """The features of a record that is a tf.train.Example; see `parse_example`."""
        data = self[index]
        try:
            return parse_example(data)
        except RecordError as error:
            raise RecordError(f"{self.name(index)}: {error}") from error

    def place(self, index: int) -> tuple[int, int]:
        """Which shard a record is in, and which of its records it is."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        shard = int(np.searchsorted(self._first, index, side="right")) - 1
        return shard, int(index - self._first[shard])

    def name(self, index: int) -> str:
        """How to tell a person which record this is."""
        shard, record = self.place(index)
        return f"{self.paths[shard]}, record {record}"

    def shards(self) -> list[tuple[Path, range]]:
        """The files, and the records that each has."""
        firsts = self._first.tolist()
        return [
            (path, range(first, last))
            for path, first, last in zip(self.paths, firsts, firsts[1:], strict=False)
        ]

    def firsts(self) -> list[int]:
        """The first record of each shard that has any: a sample to check before a long run."""
        return [records[0] for _, records in self.shards() if records]


def find_shards(folder: str | os.PathLike[str], pattern: str) -> list[Path]:
    """The files of `folder` that match `pattern`, such as "train-*", or an error if one is missing.

    Where names end as in "train-00001-of-00004", all of the four must be there.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    paths = sorted(path for path in folder.glob(pattern) if path.is_file())
    if not paths:
        raise DataError(f"no file in {folder} matches {pattern!r}")
    names = {path.name for path in paths}
    sets = {match.groups() for name in names if (match := _SHARD.fullmatch(name))}
    if len(sets) > 1:
        found = ", ".join(sorted(f"{before}*-of-{total}{after}" for before, total, after in sets))
        raise DataError(f"{folder} has shards of several sets, which are not to be mixed: {found}")
    for before, total, after in sets:
        every = [f"{before}{i:0{len(total)}}-of-{total}{after}" for i in range(int(total))]
        missing = [name for name in every if name not in names]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise DataError(
                f"{folder} lacks {len(missing)} of {total} shards: {', '.join(missing[:3])}{more}"
            )
    return paths


def write_records(path: str | os.PathLike[str], records: Iterable[bytes]) -> None:
    """Write a TFRecord file."""
    with Path(path).open("wb") as file:
        for data in records:
            length = struct.pack("<Q", len(data))
            file.write(_HEAD.pack(len(data), _checksum(length)))
            file.write(data)
            file.write(_TAIL.pack(_checksum(data)))


def parse_example(data: bytes) -> dict[str, Feature]:
    """The features of a serialised tf.train.Example: lists of bytes, and arrays of numbers.

    >>> parse_example(make_example({"label": [3], "image": [b"jpeg"]}))
    {'image': [b'jpeg'], 'label': array([3])}
    """
    try:
        example = _Example.FromString(data)
    except DecodeError as error:
        raise RecordError("this is no tf.train.Example") from error
    features: dict[str, Feature] = {}
    for name, feature in sorted(example.features.feature.items()):
        if feature.HasField("int64_list"):
            features[name] = np.array(feature.int64_list.value, np.int64)
        elif feature.HasField("float_list"):
            features[name] = np.array(feature.float_list.value, np.float32)
        else:
            features[name] = list(feature.bytes_list.value)
    return features


def make_example(features: Mapping[str, Iterable[Any]]) -> bytes:
    """A serialised tf.train.Example of bytes, integers or floats."""
    example = _Example()
    for name, values in features.items():
        feature, values = example.features.feature[name], list(values)
        if all(isinstance(value, bytes) for value in values):
            feature.bytes_list.value.extend(values)
        elif np.issubdtype(np.asarray(values).dtype, np.integer):
            feature.int64_list.value.extend(values)
        else:
            feature.float_list.value.extend(values)
    serialised: bytes = example.SerializeToString(deterministic=True)
    return serialised


def _checksum(data: bytes) -> int:
    """The "masked" crc32c of TFRecords: rotated, and a constant added."""
    crc = int(google_crc32c.value(data))
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _record_ends(path: Path) -> NDArray[np.int64]:
    """Where each record of a file ends, by hopping from length to length."""
    ends: list[int] = []
    at = 0
    try:
        size = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            while at < size:
                file.seek(at)
                head = file.read(_HEAD.size)
                if len(head) < _HEAD.size:
                    break
                length, crc = _HEAD.unpack(head)
                if crc != _checksum(head[:8]):
                    raise DataError(
                        f"{path}: no record begins at byte {at}, where record {len(ends)} should: "
                        "the file is damaged, or compressed, or no TFRecord file"
                    )
                at += length + _FRAME_BYTES
                ends.append(at)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if at != size:
        raise DataError(f"{path} is cut short: it has {size} bytes, and its last record more")
    return np.array(ends, np.int64)


def _example_class() -> Any:
    """tf.train.Example, described here in the place of a generated file."""
    file = descriptor_pb2.FileDescriptorProto(
        name="ftmesh/example.proto", package="ftmesh", syntax="proto3"
    )
    kinds = descriptor_pb2.FieldDescriptorProto
    one, many = kinds.LABEL_OPTIONAL, kinds.LABEL_REPEATED

    def message(name: str, *fields: tuple[str, Any, Any], inside: Any = file.message_type) -> Any:
        made = inside.add(name=name)
        for number, (field, label, kind) in enumerate(fields, 1):
            made.field.add(name=field, number=number, label=label)
            if isinstance(kind, str):
                made.field[-1].type_name = f".ftmesh.{kind}"
            else:
                made.field[-1].type = kind
        return made

    message("BytesList", ("value", many, kinds.TYPE_BYTES))
    message("FloatList", ("value", many, kinds.TYPE_FLOAT))
    message("Int64List", ("value", many, kinds.TYPE_INT64))
    lists = [("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List")]
    message("Feature", *((name, one, kind) for name, kind in lists))
    features = message("Features", ("feature", many, "Features.FeatureEntry"))
    key, value = ("key", one, kinds.TYPE_STRING), ("value", one, "Feature")
    entry = message("FeatureEntry", key, value, inside=features.nested_type)
    entry.options.map_entry = True
    message("Example", ("features", one, "Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("ftmesh.Example"))


_Example = _example_class()
