"""Restores states from checkpoints, onto any devices and for any owners.

The host holds one tensor at a time, or the tensors of one bucket.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ftmesh.checkpoint.files import CheckpointReader
from ftmesh.checkpoint.tensor_names import (
    ShardedPart,
    describe_tensors,
    is_key,
    is_sharded,
    is_slot,
    path_name,
)
from ftmesh.errors import CheckpointError, DamagedCheckpointError
from ftmesh.layout.element_order import to_tile_order
from ftmesh.layout.owned_buckets import OwnedBucket, OwnedLayout, Slot

Window = tuple[slice, ...]  # of an array
Step = TypeVar("Step")


def restore_newest(
    steps: Iterable[Step],
    open_step: Callable[[Step], CheckpointReader],
    like: Any,
    *,
    layouts: Sequence[OwnedLayout],
    location: object,
    log: Callable[[str], None],
    agree: Callable[[str], None],
) -> tuple[Step, Any] | None:
    """Restore the first of `steps` that is complete and undamaged, or return None.

    `location` is where the checkpoints are, for messages. The other arguments and errors are those
    of `Checkpoints` and `Checkpoints.restore`.
    """
    skipped = ""
    for step in steps:
        try:
            with open_step(step) as saved:
                saved.check()
                expected = describe_tensors(like, layouts)
                difference = first_difference(expected, saved.manifest.describe_tensors())
                if difference:
                    raise CheckpointError(
                        f"the checkpoint of step {step} in {location} is of another model "
                        f"or optimizer: {difference}"
                    )
                state = restore_state(saved, like, layouts)
        except DamagedCheckpointError as error:
            log(f"skipped the checkpoint of step {step} in {location}: {error}")
            skipped += f", not {step}: {error}"
        else:
            agree(f"{step}{skipped}")
            return step, state
    agree(f"none{skipped}")
    return None


def first_difference(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """Return how two descriptions of tensors differ first, as text, or None."""
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if name not in theirs:
            return f"it has no {name}"
        if name not in ours:
            return f"it has {name}, and the run has not"
        if ours[name] != theirs[name]:
            return f"its {name} is {theirs[name]}, and the run's is {ours[name]}"
    return None


def restore_state(saved: CheckpointReader, like: Any, layouts: Sequence[OwnedLayout] = ()) -> Any:
    """Return the state in a checkpoint, laid out on devices as `like` is.

    Both must have tensors of the same names and types: compare `describe_tensors` first.
    """

    def restore(path: Any, leaf: Any) -> Any:
        if is_sharded(leaf):
            return _restore_sharded(saved, ShardedPart.find(path, leaf, layouts))
        return _restore_leaf(saved, path_name(path), leaf)

    return jax.tree_util.tree_map_with_path(restore, like, is_leaf=is_sharded)


def _restore_sharded(saved: CheckpointReader, target: ShardedPart) -> Any:
    names: dict[tuple[int, int], str] = {}
    inner: list[Any] = []
    for name, leaf in target.leaves:
        if isinstance(leaf, Slot):
            names[leaf.row, leaf.leaf] = name
            inner.append(leaf)
        else:
            inner.append(_restore_leaf(saved, name, leaf))
    rows = []
    for row, arrays in enumerate(target.state.rows):
        restored: list[Any] = list(arrays)
        for i, (bucket, array) in enumerate(zip(target.layout.buckets, arrays, strict=True)):
            if array is not None:
                members = [names.get((row, leaf)) for leaf in bucket.members]
                chunks = _read_chunks(saved, bucket, members, array.dtype)
                restored[i] = _place_like(array, partial(_owned_rows, bucket, chunks))
        rows.append(tuple(restored))
    tree = jax.tree.structure(target.state.inner, is_leaf=is_slot)
    return replace(target.state, inner=tree.unflatten(inner), rows=tuple(rows))


def _read_chunks(
    saved: CheckpointReader, bucket: OwnedBucket, names: Sequence[str | None], dtype: Any
) -> NDArray[Any]:
    packing = bucket.packing
    vector = np.zeros(math.prod(packing.shape), dtype)
    for name, start in zip(names, packing.starts, strict=False):
        if name is not None:
            for part in to_tile_order(saved.tensor(name)):
                vector[start : start + part.size] = part
                start += part.size
    return vector.reshape(packing.shape)


def _owned_rows(bucket: OwnedBucket, chunks: NDArray[Any], window: Window) -> NDArray[Any]:
    """Return the rows of the ranks in `window`, padded with zeros at ranks that own fewer."""
    start, stop, _ = window[0].indices(bucket.num_rows * len(bucket.owned))
    owned = bucket.owned[start // bucket.num_rows : stop // bucket.num_rows].reshape(-1)
    rows = np.zeros((len(owned), *chunks.shape[1:]), chunks.dtype)
    is_real = owned < len(chunks)
    rows[is_real] = chunks[owned[is_real]]
    return rows.reshape(-1, chunks.shape[-1])


def _restore_leaf(saved: CheckpointReader, name: str, like: Any) -> Any:
    value = saved.tensor(name)
    if not is_key(like):
        return _place_like(like, lambda window: np.asarray(value[window]))
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(jnp.asarray(value), impl=impls[0])


def _place_like(like: Any, read: Callable[[Window], NDArray[Any]]) -> Any:
    """Return an array with the sharding of `like`; NumPy's for a NumPy array or a number."""
    everything = tuple(slice(None) for _ in np.shape(like))
    if not isinstance(like, (jax.Array, jax.ShapeDtypeStruct)):
        return read(everything)
    sharding = getattr(like, "sharding", None)
    if sharding is None or not getattr(like, "committed", True):
        return jnp.asarray(read(everything))
    return jax.make_array_from_callback(np.shape(like), sharding, read)
