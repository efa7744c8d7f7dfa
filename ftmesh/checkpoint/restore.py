"""Restoring: a state out of a checkpoint, on whatever devices, for whatever owners.

Tensor by tensor: the host holds one tensor at a time, or those of one bucket.

Newest: the last of several saved states that is sound and of this run's model.
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

from ftmesh.checkpoint.reader import Saved
from ftmesh.checkpoint.tensor_names import Sharded, about, is_key, is_sharded, is_slot, named
from ftmesh.errors import CheckpointError, DamagedCheckpointError
from ftmesh.layout.element_order import flat
from ftmesh.layout.owned_buckets import Owned, OwnedBucket
from ftmesh.optim.state import Slot

Window = tuple[slice, ...]  # of an array


def restored(saved: Saved, like: Any, layouts: Sequence[Owned] = ()) -> Any:
    """A state with the tensors of a checkpoint, that lies as `like`, of arrays or types, does.

    Both have tensors of the same names and types: compare `about` before.
    """

    def of_leaf(path: Any, leaf: Any) -> Any:
        if is_sharded(leaf):
            return _sharded(saved, Sharded.of(path, leaf, layouts))
        return _whole(saved, named(path), leaf)

    return jax.tree_util.tree_map_with_path(of_leaf, like, is_leaf=is_sharded)


def _sharded(saved: Saved, target: Sharded) -> Any:
    names: dict[tuple[int, int], str] = {}
    inner: list[Any] = []
    for name, leaf in target.leaves:
        if isinstance(leaf, Slot):
            names[leaf.row, leaf.leaf] = name
            inner.append(leaf)
        else:
            inner.append(_whole(saved, name, leaf))
    rows = []
    for row, arrays in enumerate(target.state.rows):
        made: list[Any] = []
        for bucket, array in zip(target.layout.buckets, arrays, strict=True):
            if array is None:
                made.append(None)
                continue
            members = [names.get((row, leaf)) for leaf in bucket.members]
            chunks = _packed(saved, bucket, members, array.dtype)
            made.append(_placed(array, partial(_rows, bucket, chunks)))
        rows.append(tuple(made))
    tree = jax.tree.structure(target.state.inner, is_leaf=is_slot)
    return replace(target.state, inner=tree.unflatten(inner), rows=tuple(rows))


def _packed(
    saved: Saved, bucket: OwnedBucket, names: Sequence[str | None], dtype: Any
) -> NDArray[Any]:
    """The chunks of a bucket, with the tensors of these names in it."""
    packing = bucket.packing
    vector = np.zeros(math.prod(packing.shape), dtype)
    for name, start in zip(names, packing.starts, strict=False):
        if name is not None:
            for part in flat(saved.tensor(name)):
                vector[start : start + part.size] = part
                start += part.size
    return vector.reshape(packing.shape)


def _rows(bucket: OwnedBucket, chunks: NDArray[Any], window: Window) -> NDArray[Any]:
    """The rows that some ranks hold of a bucket: their chunks, and zeros where those are fewer."""
    start, stop, _ = window[0].indices(bucket.num_rows * len(bucket.owned))
    owned = bucket.owned[start // bucket.num_rows : stop // bucket.num_rows].reshape(-1)
    held = np.zeros((len(owned), *chunks.shape[1:]), chunks.dtype)
    is_real = owned < len(chunks)
    held[is_real] = chunks[owned[is_real]]
    return held.reshape(-1, chunks.shape[-1])


def _whole(saved: Saved, name: str, like: Any) -> Any:
    value = saved.tensor(name)
    if not is_key(like):
        return _placed(like, lambda window: np.asarray(value[window]))
    made: list[Any] = []
    jax.eval_shape(lambda key: made.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(jnp.asarray(value), impl=made[0])


def _placed(like: Any, part: Callable[[Window], NDArray[Any]]) -> Any:
    """An array on the devices of another; each gets its part. NumPy's stay with NumPy."""
    if not isinstance(like, (jax.Array, jax.ShapeDtypeStruct)):
        return part(tuple(slice(None) for _ in np.shape(like)))
    sharding = getattr(like, "sharding", None)
    if sharding is None or not getattr(like, "committed", True):
        return jnp.asarray(part(tuple(slice(None) for _ in np.shape(like))))
    array: jax.Array = jax.make_array_from_callback(np.shape(like), sharding, part)
    return array


Step = TypeVar("Step")


def newest_sound(
    steps: Iterable[Step],
    saved_at: Callable[[Step], Saved],
    like: Any,
    *,
    layouts: Sequence[Owned],
    where: object,
    say: Callable[[str], None],
    agree: Callable[[str], None],
) -> tuple[Step, Any] | None:
    """The first of `steps` of which `saved_at` is sound, and its state, that lies as `like` does.

    What is damaged is passed over, and `say` told so. All processes `agree` on what was found, and
    what not. None where nothing is sound; what is of another model is refused.
    """
    passed_over = ""
    for step in steps:
        try:
            with saved_at(step) as saved:
                saved.check()
                difference = first_difference(about(like, layouts), saved.index.about)
                if difference:
                    raise CheckpointError(
                        f"the checkpoint of step {step} in {where} is of another model "
                        f"or optimizer: {difference}"
                    )
                state = restored(saved, like, layouts)
        except DamagedCheckpointError as error:
            say(f"passed over the checkpoint of step {step} in {where}: {error}")
            passed_over += f", not {step}: {error}"
        else:
            agree(f"{step}{passed_over}")
            return step, state
    agree(f"none{passed_over}")
    return None


def first_difference(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """Where two descriptions differ, in words; None where they do not."""
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if name not in theirs:
            return f"it has no {name}"
        if name not in ours:
            return f"it has {name}, and the run has not"
        if ours[name] != theirs[name]:
            return f"its {name} is {theirs[name]}, and the run's is {ours[name]}"
    return None
