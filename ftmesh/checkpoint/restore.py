"""Restores states from checkpoints, onto any devices. The host holds one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ftmesh.checkpoint.files import CheckpointReader
from ftmesh.checkpoint.tensor_names import NamedLeaf, describe_tensors, is_key, named_leaves
from ftmesh.errors import CheckpointError, DamagedCheckpointError
from ftmesh.layout.flat_shards import flatten_tensor

Step = TypeVar("Step")


def restore_newest(
    steps: Iterable[Step],
    open_step: Callable[[Step], CheckpointReader],
    like: Any,
    *,
    full_types: Any,
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
                expected = describe_tensors(like, full_types)
                difference = first_difference(expected, saved.manifest.describe_tensors())
                if difference:
                    raise CheckpointError(
                        f"the checkpoint of step {step} in {location} is of another model "
                        f"or optimizer: {difference}"
                    )
                state = restore_state(saved, like, full_types)
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


def restore_state(saved: CheckpointReader, like: Any, full_types: Any = None) -> Any:
    """Return the state in a checkpoint, laid out on devices as `like` is.

    Both must have tensors of the same names and types: compare `describe_tensors` first.
    """
    leaves = [_restore_leaf(saved, leaf) for leaf in named_leaves(like, full_types)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _restore_leaf(saved: CheckpointReader, target: NamedLeaf) -> Any:
    value, like = saved.tensor(target.name), target.leaf
    if is_key(like):
        impls: list[Any] = []
        jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), like)
        return jax.random.wrap_key_data(jnp.asarray(value), impl=impls[0])
    if target.is_flat:
        value = flatten_tensor(value, np.shape(like))
    if not isinstance(like, (jax.Array, jax.ShapeDtypeStruct)):
        return value
    sharding = getattr(like, "sharding", None)
    if sharding is None or not getattr(like, "committed", True):
        return jnp.asarray(value)
    return jax.make_array_from_callback(
        np.shape(like), sharding, lambda window: np.asarray(value[window])
    )


def read_tensors(folder: str | Path) -> dict[str, Any]:
    """Return the tensors in the folder of one step, without a run to restore them to.

    They are NumPy arrays in the shapes of the parameters, sharded optimizer or not, in nested
    dictionaries: ``optimizer/0/mu/w`` is at ``["optimizer"]["0"]["mu"]["w"]``. So any other tool
    can save them.

    Raises:
        DamagedCheckpointError: The checkpoint is incomplete or damaged.
    """
    tree: dict[str, Any] = {}
    with CheckpointReader(Path(folder)) as saved:
        saved.check()
        for tensor in saved.manifest.tensors:
            *path, last = tensor.name.split("/")
            inner = tree
            for part in path:
                inner = inner.setdefault(part, {})
            inner[last] = saved.tensor(tensor.name)
    return tree
