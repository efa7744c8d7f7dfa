"""Beginning: the state that an epoch of a run starts from, and where it was found.

In place, that is what the devices hold of the last step that counts. Else it is the newest of what
the memory of hosts and the folder of checkpoints have; else what a run begins with.
"""

from __future__ import annotations

from collections.abc import Callable

from ftmesh.errors import CheckpointError
from ftmesh.train.carrying import carried
from ftmesh.train.checkpoints import Checkpoints
from ftmesh.train.trainer import State, Trainer


def begin(
    trainer: Trainer,
    first: Callable[[], State],
    checkpoints: Checkpoints | None,
    *,
    resumes: bool,
) -> tuple[int, State, str]:
    """The steps that are done, the state after them, and where that comes from."""
    cluster = trainer.parallel.cluster
    held = None if cluster.line is None else cluster.line.held
    if held is not None:
        state = carried(held, trainer)
        if state is not None:
            return held.step, state, "devices"
    if resumes and checkpoints is not None:
        found = trainer.restore(checkpoints)
        if found is not None:
            return (*found, "checkpoint")
        if cluster.epoch == 1:
            raise CheckpointError(f"{checkpoints.folder} has no checkpoint to go on from")
    return 0, first(), "start"
