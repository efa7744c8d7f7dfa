"""Programs: what a run computes on one mesh, compiled when it is first called or ahead of that.

A trainer makes these from its settings and a mesh. The same are trained with, are measured, and are
compiled for devices that are not there:

    programs = make_programs(config, topology)
    state = programs.first(variables)
    state, loss = programs.step(state, batch)

    programs.step.lower(*programs.inputs).compile()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ftmesh.train.batches import Shares
from ftmesh.train.parallel import Parallel


@dataclass(frozen=True, kw_only=True)
class Programs:
    """The programs of a trainer. A state and a batch are pytrees of its own.

    `step` takes over the state that it is given. `inputs` are the types of what it takes, as they
    lie on the devices.
    """

    parallel: Parallel
    shares: Shares
    lr_schedule: Callable[[int], Any]
    first: Callable[[Any], Any]  # what a model starts from -> state
    step: Any  # state, batch -> state, loss
    evaluate: Any  # what it takes of a state, batch -> how many are right, and how many there are
    to_checkpoint: Callable[[Any], Any]  # a state as whole arrays, for any mesh
    from_checkpoint: Callable[[Any], Any]
    inputs: tuple[Any, Any]
