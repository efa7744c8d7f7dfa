"""Newest: the last of several saved states that is sound and of this run's model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from ftmesh.errors import CheckpointError, DamagedCheckpointError
from ftmesh.layout.owned_buckets import Owned
from ftmesh.saved.naming import about
from ftmesh.saved.reading import Saved
from ftmesh.saved.restoring import restored

Step = TypeVar("Step")


def newest_sound(
    steps: Iterable[Step],
    saved_at: Callable[[Step], Saved],
    like: Any,
    *,
    layouts: Sequence[Owned],
    where: object,
    say: Callable[[str], None],
    agree: Callable[[str], None],
) -> tuple[Step, Any] | None:
    """The first of `steps` of which `saved_at` is sound, and its state, that lies as `like` does.

    What is damaged is passed over, and `say` told so. All processes `agree` on what was found, and
    what not. None where nothing is sound; what is of another model is refused.
    """
    passed_over = ""
    for step in steps:
        try:
            with saved_at(step) as saved:
                saved.check()
                difference = first_difference(about(like, layouts), saved.index.about)
                if difference:
                    raise CheckpointError(
                        f"the checkpoint of step {step} in {where} is of another model "
                        f"or optimizer: {difference}"
                    )
                state = restored(saved, like, layouts)
        except DamagedCheckpointError as error:
            say(f"passed over the checkpoint of step {step} in {where}: {error}")
            passed_over += f", not {step}: {error}"
        else:
            agree(f"{step}{passed_over}")
            return step, state
    agree(f"none{passed_over}")
    return None


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
