"""Carrying: the last state that counts, from the devices of one epoch to those of the next.

Parameters are whole at every device, so a process has them as long as it has a device. Statistics
are a device's own. An optimizer's state may be shared out; what the lost have owned of it is with
their partners, where there are copies.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from ftmesh.mesh.devices import process_of
from ftmesh.train.parallel import SPLIT, Parallel
from ftmesh.train.trainer import State, Trainer


def carried(held: Any, trainer: Trainer) -> State | None:
    """The state that was `held`, on the devices of another trainer; None where some of it is lost.

    All processes come to the same answer.
    """
    before, now = held.trainer.parallel, trainer.parallel
    had = {process_of(device) for device in before.live_devices or ()}
    have = {process_of(device) for device in now.live_devices or ()}
    if not have <= had or held.trainer.layouts or trainer.layouts:
        return None

    def local(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: np.asarray(before.local(leaf)), tree)

    return State(
        params=now.put(local(held.state.params)),
        stats=_rows(held.state.stats, before, now),
        optimizer=now.put(local(held.state.optimizer)),
    )


def _rows(stats: Any, before: Parallel, now: Parallel) -> Any:
    """Each device keeps its own row; one that had none gets that of another of its process."""
    assert now.mesh is not None
    sharding = NamedSharding(now.mesh, SPLIT)

    def moved(leaf: jax.Array) -> jax.Array:
        own = {shard.device: shard.data for shard in leaf.addressable_shards}
        any_one = next(iter(own.values()))
        shape = (now.num_ranks, *leaf.shape[1:])
        rows = [
            jax.device_put(np.asarray(own.get(device, any_one)), device)
            for device in sharding.addressable_devices_indices_map(shape)
        ]
        return jax.make_array_from_single_device_arrays(shape, sharding, rows)

    return jax.tree.map(moved, stats)
