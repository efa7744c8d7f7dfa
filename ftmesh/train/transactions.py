"""Transactions: a step counts when all processes have its results.

Until then the state before it is kept. Where the step may take over the memory of that state, the
host has a copy of it, made every so many steps, and only these steps count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from ftmesh.cluster.line import Paused
from ftmesh.mesh.notation import format_failed
from ftmesh.testing import faults
from ftmesh.train.trainer import State, Trainer


@dataclass(frozen=True)
class Held:
    """The last state that counts, on the devices of a trainer, from one epoch to the next."""

    step: int
    state: State
    trainer: Trainer


class Transactions:
    """The steps of an epoch, from the state after `done` on, which came from `source`."""

    def __init__(self, trainer: Trainer, done: int, state: State, source: str) -> None:
        self._trainer, self._line = trainer, trainer.parallel.cluster.line
        if self._line is None:
            return
        self._hold(done, state)
        topology = trainer.parallel.ranks.topology
        self._line.joined(
            done,
            source=source,
            live=topology.num_live,
            failed=format_failed(topology.failed) if topology.failed else "",
        )

    def commit(self, step: int, state: State, loss: Any) -> None:
        """Have a step count, once its results are here and everywhere; before, nothing is lost."""
        if self._line is None:
            return
        jax.block_until_ready((state, loss))
        faults.reach("commit", step)
        word = self._line.commit(step)
        self._hold(step, state)
        if word == "leave":
            raise Paused(step)

    def _hold(self, step: int, state: State) -> None:
        assert self._line is not None
        self._line.held = Held(step, state, self._trainer)
