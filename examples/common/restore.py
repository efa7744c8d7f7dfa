"""The state that a run, or a new generation of it, starts from.

In place, that is the last committed state, still on the devices. Otherwise it is the newest of the
in-memory checkpoints and the checkpoints on disk; otherwise the initial state.
"""

from __future__ import annotations

from collections.abc import Callable

from examples.common.reshard import reshard_state
from examples.common.trainer import State, Trainer
from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.elastic.peer_checkpoint import PeerCheckpoint
from ftmesh.errors import CheckpointNotFoundError

Restored = tuple[int, State, str]  # number of steps done, state after them, source


def restore_or_init(
    trainer: Trainer,
    first: Callable[[], State],
    peer_checkpoint: PeerCheckpoint | None,
    checkpoints: Checkpoints | None,
    *,
    resumes: bool,
) -> Restored:
    """Return the number of steps done, the state after them, and its source.

    Raises:
        CheckpointNotFoundError: If a run is to resume and there is no checkpoint.
    """
    group = trainer.parallel.group
    held = None if group.controller is None else group.controller.held_state
    if held is not None and peer_checkpoint is not None:
        state = reshard_state(held, trainer, peer_checkpoint.stores)
        if state is not None:
            _forget(checkpoints, held.step)
            return held.step, state, "devices"
    if resumes:
        restored = _restore_newest(trainer, peer_checkpoint, checkpoints)
        if restored is not None:
            _forget(checkpoints, restored[0])
            return restored
        if group.generation == 1 and checkpoints is not None:
            raise CheckpointNotFoundError(f"{checkpoints.folder} has no checkpoint to resume from")
    return 0, first(), "start"


def _forget(checkpoints: Checkpoints | None, done: int) -> None:
    """Drop unfinished checkpoints of later steps, which must not mix with new ones."""
    if checkpoints is not None:
        checkpoints.discard_after(done)


def _restore_newest(
    trainer: Trainer, peer_checkpoint: PeerCheckpoint | None, checkpoints: Checkpoints | None
) -> Restored | None:
    """Restore the newest state; the primary process decides which store is tried first."""
    stores = {"host memory": peer_checkpoint, "checkpoint": checkpoints}
    steps = {source: (store and store.latest_step) or 0 for source, store in stores.items()}
    order = sorted(stores, key=lambda source: -steps[source])
    for source in trainer.parallel.group.broadcast(order, "where to look for a state"):
        store = stores[source]
        restored = None if store is None else trainer.restore(store)
        if restored is not None:
            return (*restored, source)
    return None
