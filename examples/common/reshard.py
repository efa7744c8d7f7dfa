"""Move the last committed state from the devices of one generation to those of the next.

Parameters are replicated, so every process with a device has them. Statistics belong to a device.
An optimizer's state may be sharded: then every process puts the shards of its devices, and its
copies of lost shards, into the peer store of its host, and reads its new shards from all peer
stores.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from examples.common.data_parallel import DataParallel
from examples.common.device_arrays import SHARDED
from examples.common.trainer import State, Trainer
from ftmesh.checkpoint.files import (
    MANIFEST_FILE,
    CheckpointReader,
    load_json,
    process_file_names,
    process_files,
)
from ftmesh.checkpoint.manifest import Manifest
from ftmesh.checkpoint.restore import restore_state
from ftmesh.checkpoint.snapshot import PartnerCopies, Snapshotter
from ftmesh.elastic.elastic_group import ElasticGroup
from ftmesh.elastic.peer_store import Holders, PeerStores
from ftmesh.errors import ClusterError, DamagedCheckpointError
from ftmesh.topology.devices import process_of

TIMEOUT = 30.0  # seconds until all shards are published
INTERVAL = 0.05


def reshard_state(held: Any, trainer: Trainer, stores: PeerStores) -> State | None:
    """Move a held state to the devices of `trainer`; None, in all processes, if a part is lost."""
    before, now = held.trainer.parallel, trainer.parallel
    old_processes = {process_of(device) for device in before.live_devices}
    new_processes = {process_of(device) for device in now.live_devices or ()}
    is_complete = _is_complete(held.trainer, _remaining(now.group))
    if not new_processes <= old_processes or not is_complete:
        return None

    def local(tree: Any) -> Any:
        return now.put(jax.tree.map(lambda leaf: np.asarray(before.local(leaf)), tree))

    params, stats = local(held.state.params), _move_stats(held.state.stats, now)
    if held.trainer.full_types or trainer.full_types:
        publish_shards(held, now.group, stores)
        optimizer = _collect_shards(held, trainer, stores)
    else:
        optimizer = local(held.state.optimizer)
    return State(params, stats, optimizer, trainer.copies(optimizer))


def _is_complete(trainer: Trainer, remaining: set[int]) -> bool:
    """True if the remaining processes have every shard of the optimizer's state, or a copy."""
    devices = trainer.parallel.live_devices or ()
    hosts = [process_of(device) for device in devices]
    if trainer.full_types is None or remaining >= set(hosts):
        return True
    partners = trainer.parallel.partners
    return partners is not None and all(
        host in remaining or hosts[partners[rank]] in remaining for rank, host in enumerate(hosts)
    )


def publish_shards(held: Any, group: ElasticGroup, stores: PeerStores) -> None:
    """Put this process's shards of the optimizer's state, and its copies, into peer stores.

    A process that will stand by publishes its shards too.
    """
    before, remaining = held.trainer.parallel, _remaining(group)
    if not _is_complete(held.trainer, remaining):
        return
    copies = None
    if before.partners is not None and held.trainer.full_types is not None:
        copies = PartnerCopies(held.state.copies, before.partners)
    snapshotter = Snapshotter(
        group.process,
        devices=[device for device in before.live_devices if process_of(device) in remaining],
        full_types=held.trainer.full_types,
        copies=copies,
    )
    snapshot = snapshotter.snapshot(held.step, State((), (), held.state.optimizer))
    if group.process in snapshot.manifest.processes:
        files = process_files(snapshot.manifest, group.process, snapshot.pieces)
        prefix = _prefix(group, held)
        if not stores.put({prefix + name: b"".join(content) for name, content in files}, 1):
            raise ClusterError("no peer store accepts the shards of this process")


def _collect_shards(held: Any, trainer: Trainer, stores: PeerStores) -> Any:
    """Return the optimizer's state in the new sharding, once all shards are published."""
    group = trainer.parallel.group
    prefix = _prefix(group, held)
    until = time.monotonic() + TIMEOUT
    while True:
        holders = stores.holders(prefix)
        try:
            saved = CheckpointReader(_files(prefix, holders, stores))
            saved.check()
            break
        except DamagedCheckpointError as error:  # not all shards are published yet
            if time.monotonic() > until:
                raise ClusterError(f"shards were missing after {TIMEOUT:g} s: {error}") from error
            if group.controller is not None:
                group.controller.check_generation()
            time.sleep(INTERVAL)
    like = trainer.saved._replace(params=(), stats=())
    state = restore_state(saved, like, trainer.full_types)
    group.barrier("the new shards")
    if group.is_primary:
        stores.drop("carried/")  # also of generations that ended early
    return state.optimizer


def _files(prefix: str, holders: Holders, stores: PeerStores) -> dict[str, bytes]:
    """Return the files of a state; raise DamagedCheckpointError while one is missing."""

    def get(names: list[str]) -> dict[str, bytes]:
        for name in names:
            if prefix + name not in holders:
                raise DamagedCheckpointError(f"it has no {name}")
        blobs = stores.get([prefix + name for name in names], holders)
        return {name: blob for name, blob in zip(names, blobs, strict=True) if blob is not None}

    files = get([MANIFEST_FILE])
    if not files:
        raise DamagedCheckpointError(f"no host returned its {MANIFEST_FILE}")
    manifest = Manifest.from_json(load_json(files[MANIFEST_FILE], MANIFEST_FILE))
    return files | get(
        [name for process in manifest.processes for name in process_file_names(process)]
    )


def _remaining(group: ElasticGroup) -> set[int]:
    """Return the processes that are left, including those that will stand by."""
    return (
        set(group.members) if group.controller is None else set(group.controller.membership.members)
    )


def _prefix(group: ElasticGroup, held: Any) -> str:
    """Name the blobs by the generation of the held state: a standby may hold an older one."""
    return f"carried/{group.generation}-{held.generation}/"


def _move_stats(stats: Any, now: DataParallel) -> Any:
    """Keep each device's row; a device without one gets another row of its process."""
    assert now.mesh is not None
    sharding = NamedSharding(now.mesh, SHARDED)

    def move(leaf: jax.Array) -> jax.Array:
        own = {shard.device: shard.data for shard in leaf.addressable_shards}
        default = next(iter(own.values()))
        shape = (now.num_ranks, *leaf.shape[1:])
        rows = [
            jax.device_put(np.asarray(own.get(device, default)), device)
            for device in sharding.addressable_devices_indices_map(shape)
        ]
        return jax.make_array_from_single_device_arrays(shape, sharding, rows)

    return jax.tree.map(move, stats)
