"""Carrying: the last state that counts, from the devices of one epoch to those of the next.

Parameters are whole at every device, so a process has them as long as it has a device. Statistics
are a device's own. An optimizer's state may be shared out: then every process gives the keeper of
its host what its devices own, and what they have copied from those that are lost, and takes from
all keepers what its devices are to own from now on.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from examples.common.data_parallel import Parallel
from examples.common.device_arrays import SPLIT
from examples.common.trainer import State, Trainer
from ftmesh.checkpoint.manifest import Index
from ftmesh.checkpoint.reader import Saved
from ftmesh.checkpoint.restore import restored
from ftmesh.checkpoint.snapshot import Copier, Copies
from ftmesh.checkpoint.writer import INDEX, file_names, load, part_of
from ftmesh.distributed.process_group import Cluster
from ftmesh.elastic.peer_stores import Holders, Keepers
from ftmesh.errors import ClusterError, DamagedCheckpointError
from ftmesh.topology.devices import process_of

LIMIT = 30.0  # seconds for all to give their part
INTERVAL = 0.05


def carried(held: Any, trainer: Trainer, keepers: Keepers) -> State | None:
    """The state that was `held`, on the devices of another trainer; None where some of it is lost.

    All processes come to the same answer.
    """
    before, now = held.trainer.parallel, trainer.parallel
    had = {process_of(device) for device in before.live_devices}
    have = {process_of(device) for device in now.live_devices or ()}
    if not have <= had or not _is_all_here(held.trainer, _here(now.cluster)):
        return None

    def local(tree: Any) -> Any:
        return now.put(jax.tree.map(lambda leaf: np.asarray(before.local(leaf)), tree))

    params, stats = local(held.state.params), _rows(held.state.stats, now)
    if held.trainer.layouts or trainer.layouts:
        give_shards(held, now.cluster, keepers)
        optimizer = _taken(held, trainer, keepers)
    else:
        optimizer = local(held.state.optimizer)
    return State(params, stats, optimizer, trainer.copies(optimizer))


def _is_all_here(trainer: Trainer, here: set[int]) -> bool:
    """Whether the processes that are left have all of an optimizer's state between them."""
    devices = trainer.parallel.live_devices or ()
    hosts = [process_of(device) for device in devices]
    if not trainer.layouts or here >= set(hosts):
        return True
    partners = trainer.parallel.partners
    return partners is not None and all(
        host in here or hosts[partners[rank]] in here for rank, host in enumerate(hosts)
    )


def give_shards(held: Any, cluster: Cluster, keepers: Keepers) -> None:
    """Give the keepers what the devices of this process have of an optimizer's state.

    Of the lost, too: what is copied from them. One that is to stand by gives its part all the same.
    """
    before, here = held.trainer.parallel, _here(cluster)
    if not _is_all_here(held.trainer, here):
        return
    copies = None
    if before.partners is not None and held.trainer.layouts:
        copies = Copies(held.state.copies, before.partners)
    copier = Copier(
        cluster.process,
        devices=[device for device in before.live_devices if process_of(device) in here],
        layouts=held.trainer.layouts,
        copies=copies,
    )
    snapshot = copier.snapshot(held.step, State((), (), held.state.optimizer))
    if cluster.process in snapshot.index.processes:
        part = part_of(snapshot.index, cluster.process, snapshot.pieces)
        prefix = _prefix(cluster, held)
        if not keepers.give({prefix + name: b"".join(content) for name, content in part}, 1):
            raise ClusterError("no keeper takes what the devices of this process hold")


def _taken(held: Any, trainer: Trainer, keepers: Keepers) -> Any:
    """An optimizer's state, in new shares, from what all have given."""
    cluster = trainer.parallel.cluster
    prefix = _prefix(cluster, held)
    until = time.monotonic() + LIMIT
    while True:
        holders = keepers.holders(prefix)
        try:
            saved = Saved(_files(prefix, holders, keepers))
            saved.check()
            break
        except DamagedCheckpointError as error:  # not all have given their part yet
            if time.monotonic() > until:
                raise ClusterError(f"not all shards of the lost were given: {error}") from error
            if cluster.line is not None:
                cluster.line.check()
            time.sleep(INTERVAL)
    like = trainer.saved._replace(params=(), stats=())
    found = restored(saved, like, trainer.layouts)
    cluster.barrier("what they are to hold")
    if cluster.speaks:
        keepers.drop("carried/")  # what was left by an epoch that ended early, too
    return found.optimizer


def _files(prefix: str, holders: Holders, keepers: Keepers) -> dict[str, bytes]:
    """The files of a state, once all of them are there."""

    def got(names: list[str]) -> dict[str, bytes]:
        for name in names:
            if prefix + name not in holders:
                raise DamagedCheckpointError(f"it has no {name}")
        blobs = keepers.get([prefix + name for name in names], holders)
        found = dict(zip(names, blobs, strict=True))
        return {name: blob for name, blob in found.items() if blob is not None}

    first = got([INDEX])
    if not first:
        raise DamagedCheckpointError(f"no host gives its {INDEX}")
    index = Index.from_json(load(first[INDEX], INDEX))
    return first | got([name for process in index.processes for name in file_names(process)])


def _here(cluster: Cluster) -> set[int]:
    """The processes that are left, also those that will stand by."""
    return set(cluster.members) if cluster.line is None else set(cluster.line.news.members)


def _prefix(cluster: Cluster, held: Any) -> str:
    """Of what is held from the same epoch: one that stood by may hold something older."""
    return f"carried/{cluster.epoch}-{held.epoch}/"


def _rows(stats: Any, now: Parallel) -> Any:
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
