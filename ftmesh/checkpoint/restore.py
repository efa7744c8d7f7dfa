"""Restores states from checkpoints, onto any devices. The host holds one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ftmesh.checkpoint.manifest import describe_tensors, is_key, named_leaves
from ftmesh.checkpoint.snapshot import PartnerCopies, block_holders
from ftmesh.checkpoint.storage import CheckpointReader
from ftmesh.errors import CheckpointError, DamagedCheckpointError
from ftmesh.files import check_local
from ftmesh.layout.flat_shards import flatten_tensor, unflatten_tensor
from ftmesh.topology.devices import process_of

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
    return _restore_leaves(saved.tensor, like, full_types)


def _restore_leaves(tensor: Callable[[str], Any], like: Any, full_types: Any) -> Any:
    leaves = []
    for target in named_leaves(like, full_types):
        value = tensor(target.name)
        if target.is_flat:
            value = flatten_tensor(value, np.shape(target.leaf))
        leaves.append(place(value, target.leaf))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def place(value: Any, like: Any) -> Any:
    """Return `value`, an array of the host, as `like` is: on its devices, or a Python number.

    For random keys `value` has their bits. Every process has the whole value, and nothing is sent.
    """
    if isinstance(like, bool | int | float | complex):
        return type(like)(value.item())
    if not isinstance(like, (jax.Array, jax.ShapeDtypeStruct)):
        return value
    sharding = getattr(like, "sharding", None)
    is_placed = sharding is not None and getattr(like, "committed", True)
    if is_key(like):
        impls: list[Any] = []
        jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), like)
        keys = jax.random.wrap_key_data(jnp.asarray(value), impl=impls[0])
        return _place_keys(keys, sharding) if is_placed else keys
    if not is_placed:
        return jnp.asarray(value)
    return jax.make_array_from_callback(
        np.shape(like), sharding, lambda window: np.asarray(value[window])
    )


def _place_keys(keys: jax.Array, sharding: Any) -> jax.Array:
    windows = sharding.addressable_devices_indices_map(keys.shape).items()
    parts = [jax.device_put(keys[window], device) for device, window in windows]
    return jax.make_array_from_single_device_arrays(keys.shape, sharding, parts)


# From devices to others -------------------------------------------------------------------------


def is_deleted(state: Any) -> bool:
    """True if an array of the state was donated to a program."""
    return any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(state))


def devices_of(state: Any) -> set[Any]:
    """Return the devices on which a state of arrays or types is placed."""
    placed = (x for x in jax.tree.leaves(state) if getattr(x, "committed", True))
    shardings = (getattr(leaf, "sharding", None) for leaf in placed)
    return set[Any]().union(*(sharding.device_set for sharding in shardings if sharding))


def surviving_parts(
    state: Any,
    processes: Iterable[int],
    copies: PartnerCopies | None = None,
    devices: Container[Any] | None = None,
) -> tuple[bool, bool]:
    """Return whether each of these processes has all of a state, and whether all together do.

    `copies` of blocks count for the second. If `devices` are given, what others have does not.
    """
    left, each, together = set(processes), True, True
    for leaf in named_leaves(state):
        array = leaf.leaf
        if not isinstance(array, jax.Array) or array.is_fully_addressable:
            continue
        has_copies = copies is not None and leaf.name in copies.places
        partners = copies.partners if copies is not None and has_copies else {}
        for holding, with_copies in _processes_by_block(array, partners, devices):
            each &= left <= holding
            together &= not left.isdisjoint(with_copies)
    return each, together


def _processes_by_block(
    array: jax.Array, partners: Mapping[Any, Any], that_count: Container[Any] | None = None
) -> Iterator[tuple[set[int], set[int]]]:
    """Yield, for each block, which processes have it, and which have it or a copy."""
    for devices in block_holders(array.sharding, array.shape):
        copies = [partners[device] for device in devices if device in partners]
        holding, with_copies = (
            {process_of(device) for device in own if that_count is None or device in that_count}
            for own in (devices, [*devices, *copies])
        )
        yield holding, with_copies


def move_state(state: Any, full_types: Any, like: Any, like_full_types: Any) -> Any:
    """Return a state on the devices of `like`, from those of this process, which have all of it.

    What devices of `like` have is taken from them: the others may be unhealthy.
    """
    old = {leaf.name: leaf for leaf in named_leaves(state, full_types)}
    devices = devices_of(like)

    def tensor(name: str) -> NDArray[Any]:
        value = _to_host(old[name].leaf, devices)
        return unflatten_tensor(value, old[name].shape) if old[name].is_flat else value

    return _restore_leaves(tensor, like, like_full_types)


def _to_host(leaf: Any, preferred: Container[Any]) -> NDArray[Any]:
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    ordered = sorted(leaf.addressable_shards, key=lambda shard: shard.device in preferred)
    shards = {str(shard.index): shard for shard in ordered}.values()  # the last of each
    blocks = [(s.index, jax.random.key_data(s.data) if is_key(leaf) else s.data) for s in shards]
    first = blocks[0][1]
    whole = np.empty((*leaf.shape, *first.shape[leaf.ndim :]), first.dtype)
    for window, block in blocks:
        whole[window] = block
    return whole


def read_tensors(folder: str | Path) -> dict[str, Any]:
    """Return the tensors in the folder of one step, without a run to restore them to.

    They are NumPy arrays in the shapes of the parameters, sharded optimizer or not, in nested
    dictionaries: ``optimizer/0/mu/w`` is at ``["optimizer"]["0"]["mu"]["w"]``. So any other tool
    can save them.

    Raises:
        DamagedCheckpointError: The checkpoint is incomplete or damaged.
    """
    check_local(folder)
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
