"""Orbax checkpoints of a state whose weights are sharded over any number of chips."""

from __future__ import annotations

from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from ftmesh.elastic import ElasticGroup
from ftmesh.errors import ArgumentError


def open_manager(
    folder: str, group: ElasticGroup, *, every: int, keep: int
) -> ocp.CheckpointManager:
    """Open the checkpoints in a folder, which may be ``gs://bucket/run``.

    After a failure the remaining processes save without the lost ones.
    """
    together = ocp.options.MultiprocessingOptions()
    if not group.is_single_process:
        together = ocp.options.MultiprocessingOptions(
            primary_host=group.primary,
            active_processes=set(group.members),
            barrier_sync_key_prefix=f"generation-{group.generation}",
        )
    try:
        path = epath.Path(folder)
        if "://" in folder:
            path.exists()  # on every process: it needs the package of that scheme
    except (KeyError, ImportError) as error:
        known = "gs://, s3://, az:// and hf:// with the packages that fsspec has for them"
        raise ArgumentError(
            f"cannot open {folder} ({error}): give a folder, or a URL that etils.epath takes: "
            f"{known}"
        ) from error
    if group.is_primary:
        path.mkdir(parents=True, exist_ok=True)
    group.barrier("the folder of checkpoints")
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=every,
        max_to_keep=keep,
        create=False,
        multiprocessing_options=together,
    )
    return ocp.CheckpointManager(path if "://" in folder else path.resolve(), options=options)


def save_state(manager: ocp.CheckpointManager, step: int, state: Any, *, force: bool) -> None:
    """Start to save a state, if one is due after this step or if forced."""
    if manager.latest_step() == step or not (force or manager.should_save(step)):
        return
    if jax.process_count() > 1 and state["step"].is_fully_addressable:
        state = jax.device_get(state)  # the last process of several: Orbax takes arrays of the host
    manager.save(step, args=ocp.args.PyTreeSave(state), force=force)


def restore_state(manager: ocp.CheckpointManager, types: Any, step: int) -> Any:
    """Return a saved state, with the shardings of `types`.

    Weights that were padded for another number of chips lose that padding, and get their own.
    """
    how = jax.tree.map(
        lambda leaf: ocp.ArrayRestoreArgs(
            sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=False
        ),
        types,
    )
    return manager.restore(step, args=ocp.args.PyTreeRestore(types, restore_args=how))
