"""Beginning: the state that an epoch of a run starts from, and where it was found.

In place, that is what the devices hold of the last step that counts. Else it is the newest of what
the memory of hosts and the folder of checkpoints have; else what a run begins with.
"""

from __future__ import annotations

from collections.abc import Callable

from examples.common.reshard import carried
from examples.common.trainer import State, Trainer
from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.elastic.peer_checkpoint import Memory
from ftmesh.errors import CheckpointNotFoundError

Found = tuple[int, State, str]


def begin(
    trainer: Trainer,
    first: Callable[[], State],
    memory: Memory | None,
    checkpoints: Checkpoints | None,
    *,
    resumes: bool,
) -> Found:
    """The steps that are done, the state after them, and where that comes from."""
    cluster = trainer.parallel.cluster
    held = None if cluster.line is None else cluster.line.held
    if held is not None and memory is not None:
        state = carried(held, trainer, memory.keepers)
        if state is not None:
            _forget(checkpoints, held.step)
            return held.step, state, "devices"
    if resumes:
        found = _newest(trainer, memory, checkpoints)
        if found is not None:
            _forget(checkpoints, found[0])
            return found
        if cluster.epoch == 1 and checkpoints is not None:
            raise CheckpointNotFoundError(f"{checkpoints.folder} has no checkpoint to go on from")
    return 0, first(), "start"


def _forget(checkpoints: Checkpoints | None, done: int) -> None:
    """What an earlier epoch has begun to write of later steps is not to be mixed with new parts."""
    if checkpoints is not None:
        checkpoints.forget(after=done)


def _newest(
    trainer: Trainer, memory: Memory | None, checkpoints: Checkpoints | None
) -> Found | None:
    """Of what is kept anywhere; one process says where to look first."""
    kept = {"host memory": memory, "checkpoint": checkpoints}
    steps = {where: (each and each.latest_step) or 0 for where, each in kept.items()}
    order = sorted(kept, key=lambda where: -steps[where])
    for where in trainer.parallel.cluster.broadcast(order, "where to look for a state"):
        each = kept[where]
        found = None if each is None else trainer.restore(each)
        if found is not None:
            return (*found, where)
    return None
