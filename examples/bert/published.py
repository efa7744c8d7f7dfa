"""The names under which the arrays of BERT were published, and how to come from and to them.

    params = read_published("bert.npz", like=init(model, seed=0))

An array has the name and the layout it has in TensorFlow's checkpoints, such as
``bert/encoder/layer_0/attention/self/query/kernel``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from ftmesh.checkpoint.restore import first_difference
from ftmesh.errors import DataError, DataNotFoundError
from ftmesh.npz import NpzReader

_LAYER = {
    "query": "attention/self/query",
    "key": "attention/self/key",
    "value": "attention/self/value",
    "project": "attention/output/dense",
    "attention_norm": "attention/output/LayerNorm",
    "widen": "intermediate/dense",
    "narrow": "output/dense",
    "norm": "output/LayerNorm",
}
_REST = {
    "embeddings/words": "bert/embeddings/word_embeddings",
    "embeddings/positions": "bert/embeddings/position_embeddings",
    "embeddings/segments": "bert/embeddings/token_type_embeddings",
    "embeddings/norm": "bert/embeddings/LayerNorm",
    "pooler": "bert/pooler/dense",
    "transform": "cls/predictions/transform/dense",
    "transform_norm": "cls/predictions/transform/LayerNorm",
    "word_bias": "cls/predictions/output_bias",
    "next_sentence/kernel": "cls/seq_relationship/output_weights",
    "next_sentence/bias": "cls/seq_relationship/output_bias",
}
_TRANSPOSED = "cls/seq_relationship/output_weights"


def published_name(name: str) -> str:
    """The published name of one of our tensors.

    >>> published_name("layer_3/attention_norm/scale")
    'bert/encoder/layer_3/attention/output/LayerNorm/gamma'
    """
    if name in _REST:
        return _REST[name]
    place, _, kind = name.rpartition("/")
    if match := re.fullmatch(r"(layer_\d+)/(\w+)", place):
        place = f"bert/encoder/{match[1]}/{_LAYER[match[2]]}"
    else:
        place = _REST[place]
    if place.endswith("LayerNorm"):
        kind = {"scale": "gamma", "bias": "beta"}[kind]
    return f"{place}/{kind}"


def to_published(params: Any) -> dict[str, Any]:
    """Parameters as a flat dictionary under the published names."""
    arrays = {published_name(name): leaf for name, leaf in flatten_dict(params, sep="/").items()}
    return {name: x.T if name == _TRANSPOSED else x for name, x in arrays.items()}


def from_published(arrays: Mapping[str, Any], like: Any) -> Any:
    """The parameters, of the shapes that `like` has, from arrays under the published names.

    Arrays that the model has no use for, such as the state of an optimizer, are left.
    """
    wanted = check_shapes({name: np.shape(array) for name, array in arrays.items()}, like)
    found = {name: np.asarray(arrays[name]) for name in wanted}
    leaves = {}
    for name, leaf in flatten_dict(like, sep="/").items():
        array = found[published_name(name)]
        array = array.T if published_name(name) == _TRANSPOSED else array
        leaves[name] = array.astype(leaf.dtype)
    return unflatten_dict(leaves, sep="/")


def check_shapes(found: Mapping[str, tuple[int, ...]], like: Any) -> dict[str, Any]:
    """Refuse arrays of other shapes than the model's; the types of those that it wants."""
    wanted: dict[str, Any] = jax.eval_shape(to_published, like)
    ours = {name: str([*each.shape]) for name, each in wanted.items()}
    theirs = {name: str([*found[name]]) for name in wanted if name in found}
    difference = first_difference(ours, theirs)
    if difference:
        raise DataError(f"these arrays are not of this model: {difference}")
    return wanted


def read_published(path: str | Path, like: Any) -> Any:
    """The parameters in an .npz file of arrays under the published names.

    Shapes are compared before anything is unpacked.
    """
    try:
        with open(path, "rb") as file, NpzReader(file) as arrays:
            shapes = {name: header.shape for name, header in arrays.headers.items()}
            wanted = check_shapes(shapes, like)
            return from_published({name: arrays.read(name) for name in wanted}, like)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except FileNotFoundError as error:
        raise DataNotFoundError(
            f"{path} cannot be read as an .npz file of arrays: {error.strerror}"
        ) from error
    except Exception as error:  # zip, zlib and NumPy raise many kinds over damaged bytes
        raise DataError(f"{path} cannot be read as an .npz file of arrays: {error}") from error
