"""Convert parameters from and to the names and layouts of the published BERT checkpoints.

    params = read_published("bert.npz", like=init(model, seed=0))

The names are TensorFlow's, such as ``bert/encoder/layer_0/attention/self/query/kernel``.
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
from ftmesh.files import NpzReader

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
    """Return the published name of one of our tensors.

    >>> published_name("layer_3/attention_norm/scale")
    'bert/encoder/layer_3/attention/output/LayerNorm/gamma'
    """
    if name in _REST:
        return _REST[name]
    module, _, kind = name.rpartition("/")
    if match := re.fullmatch(r"(layer_\d+)/(\w+)", module):
        module = f"bert/encoder/{match[1]}/{_LAYER[match[2]]}"
    else:
        module = _REST[module]
    if module.endswith("LayerNorm"):
        kind = {"scale": "gamma", "bias": "beta"}[kind]
    return f"{module}/{kind}"


def to_published(params: Any) -> dict[str, Any]:
    """Return parameters as a flat dictionary under the published names."""
    arrays = {published_name(name): leaf for name, leaf in flatten_dict(params, sep="/").items()}
    return {name: x.T if name == _TRANSPOSED else x for name, x in arrays.items()}


def from_published(arrays: Mapping[str, Any], like: Any) -> Any:
    """Return parameters shaped like `like` from arrays under the published names.

    Arrays that the model does not use, such as an optimizer's state, are ignored.
    """
    check_shapes({name: np.shape(array) for name, array in arrays.items()}, like)
    leaves = {}
    for name, leaf in flatten_dict(like, sep="/").items():
        array = np.asarray(arrays[published_name(name)])
        array = array.T if published_name(name) == _TRANSPOSED else array
        leaves[name] = array.astype(leaf.dtype)
    return unflatten_dict(leaves, sep="/")


def check_shapes(shapes: Mapping[str, tuple[int, ...]], like: Any) -> dict[str, Any]:
    """Raise DataError unless `shapes` has the model's arrays; return their types."""
    wanted: dict[str, Any] = jax.eval_shape(to_published, like)
    ours = {name: str([*leaf.shape]) for name, leaf in wanted.items()}
    theirs = {name: str([*shapes[name]]) for name in wanted if name in shapes}
    difference = first_difference(ours, theirs)
    if difference:
        raise DataError(f"the arrays do not fit this model: {difference}")
    return wanted


def read_published(path: str | Path, like: Any) -> Any:
    """Read parameters from an .npz file of arrays under the published names.

    Shapes are checked before anything is unpacked.
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
    except Exception as error:  # zip, zlib and NumPy raise many kinds on damaged bytes
        raise DataError(f"{path} cannot be read as an .npz file of arrays: {error}") from error
