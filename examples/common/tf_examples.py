"""Parse and serialize tf.train.Example without TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from ftmesh.errors import RecordError

Feature = list[bytes] | NDArray[np.int64] | NDArray[np.float32]


def parse_example(data: bytes) -> dict[str, Feature]:
    """Parse a serialized tf.train.Example into lists of bytes and arrays of numbers.

    >>> parse_example(make_example({"label": [3], "image": [b"jpeg"]}))
    {'image': [b'jpeg'], 'label': array([3])}
    """
    try:
        example = _Example.FromString(data)
    except DecodeError as error:
        raise RecordError("not a tf.train.Example") from error
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
    """Serialize bytes, integers or floats as a tf.train.Example."""
    example = _Example()
    for name, values in features.items():
        feature, values = example.features.feature[name], list(values)
        if all(isinstance(value, bytes) for value in values):
            feature.bytes_list.value.extend(values)
        elif np.issubdtype(np.asarray(values).dtype, np.integer):
            feature.int64_list.value.extend(values)
        else:
            feature.float_list.value.extend(values)
    data: bytes = example.SerializeToString(deterministic=True)
    return data


def _example_class() -> Any:
    """Build the message class of tf.train.Example, in place of a generated module."""
    file = descriptor_pb2.FileDescriptorProto(
        name="ftmesh/example.proto", package="ftmesh", syntax="proto3"
    )
    kinds = descriptor_pb2.FieldDescriptorProto
    one, many = kinds.LABEL_OPTIONAL, kinds.LABEL_REPEATED

    def message(name: str, *fields: tuple[str, Any, Any], inside: Any = file.message_type) -> Any:
        message = inside.add(name=name)
        for number, (field, label, kind) in enumerate(fields, 1):
            message.field.add(name=field, number=number, label=label)
            if isinstance(kind, str):
                message.field[-1].type_name = f".ftmesh.{kind}"
            else:
                message.field[-1].type = kind
        return message

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
