"""Checkpoints: written beside the training, whole or not at all, the last few kept.

    checkpoints = Checkpoints("run1/checkpoints", keep=3)
    first_step, state = checkpoints.restore(state) if resume else (0, state)
    ...
    checkpoints.save(step, state)
    checkpoints.close()

A checkpoint holds whole arrays, not shards, so that a run may go on with more chips or fewer. With
it lies a description of the arrays; one that does not fit what the run has is refused before
anything is read or written. A state with numbers that are not finite is never written.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from ftmesh.errors import CheckpointError, TrainingError

_STATE, _ABOUT = "state", "about"


class Checkpoints:
    """The checkpoints of one run, in one folder.

    A folder that has some already is refused unless `resume` is set: nothing is ever overwritten.
    """

    def __init__(self, folder: str | Path, *, keep: int = 3, resume: bool = False) -> None:
        self.folder = Path(folder).resolve()
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True),
            item_names=(_STATE, _ABOUT),
        )
        if self.latest_step is not None and not resume:
            self._manager.close()
            raise CheckpointError(
                f"{folder} has checkpoints, the last of step {self.latest_step}: go on from them "
                "with --resume, or give another folder"
            )

    @property
    def latest_step(self) -> int | None:
        """The step of the last whole checkpoint, if there is one."""
        step: int | None = self._manager.latest_step()
        return step

    def save(self, step: int, state: Any) -> None:
        """Begin to write `state`, a pytree of arrays, as it is after `step`.

        Waits for the state, not for the disk. A state that no run could go on from is refused.
        """
        if not is_finite(state):
            raise TrainingError(
                f"the state after step {step} has numbers that are not finite, and is not saved: "
                "the run has stopped there; try a lower learning rate or a longer warm-up, or go "
                "back to a checkpoint before it"
            )
        self._manager.save(
            step,
            args=ocp.args.Composite(
                **{_STATE: ocp.args.StandardSave(state), _ABOUT: ocp.args.JsonSave(about(state))}
            ),
        )

    def restore(self, like: Any) -> tuple[int, Any]:
        """The last checkpoint: its step, and its arrays, placed on devices as those of `like` are.

        Where there is none, step 0 and `like` itself.
        """
        step = self.latest_step
        if step is None:
            return 0, like
        found = self._manager.restore(
            step, args=ocp.args.Composite(**{_ABOUT: ocp.args.JsonRestore()})
        )[_ABOUT]
        difference = first_difference(about(like), found)
        if difference:
            raise CheckpointError(
                f"the checkpoint of step {step} in {self.folder} is of another model or optimizer: "
                f"{difference}"
            )
        placed = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        restored = self._manager.restore(
            step, args=ocp.args.Composite(**{_STATE: ocp.args.StandardRestore(placed)})
        )
        return step, restored[_STATE]

    def close(self) -> None:
        """Wait until everything is written."""
        self._manager.wait_until_finished()
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def is_finite(state: Any) -> bool:
    """Whether every number of a pytree of arrays is finite.

    A single number may be infinite: optimizers keep such, as the best loss before the first.
    """
    return bool(_all_finite(jax.tree.leaves(state)))


def _are_finite(leaves: list[jax.Array]) -> jax.Array:
    good = [jnp.isfinite(x).all() if x.size > 1 else ~jnp.isnan(x).any() for x in leaves]
    return jnp.all(jnp.array(good, bool))


_all_finite = jax.jit(_are_finite)


def about(state: Any) -> dict[str, str]:
    """The arrays of a pytree in words, by where they are in it."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree.leaves_with_path(state)
    }


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


# Orbax tells of every file that it writes; what matters to a run is said by the run.
logging.getLogger("absl").setLevel(logging.WARNING)
