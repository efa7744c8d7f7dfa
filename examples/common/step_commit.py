"""Transactions: a step counts when all processes have its results.

Until then the state before it is kept. Where the step takes over the memory of that state, only
those steps count whose state has been copied to the memory of hosts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from examples.common.sdc_check import Suspicion
from examples.common.trainer import State, Trainer
from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.elastic.controller_client import Line, Paused
from ftmesh.elastic.peer_checkpoint import Memory
from ftmesh.errors import ArgumentError, CheckpointError
from ftmesh.testing import fault_injection
from ftmesh.topology.notation import format_failed


@dataclass(frozen=True)
class Held:
    """The last state that counts, on the devices of a trainer, from one epoch to the next."""

    step: int
    state: State
    trainer: Trainer
    epoch: int


class Transactions:
    """The steps of an epoch. Every `copy_every` of them the state is copied to host memory.

    They count one by one; with `check_every`, when parameters have been compared. `is_saved` tells
    after which steps there will be a checkpoint, and `count` is told of every step and its loss. A
    step is committed while the next one runs, unless there is to be memory for two states only.
    """

    def __init__(
        self,
        trainer: Trainer,
        memory: Memory | None,
        checkpoints: Checkpoints | None,
        *,
        copy_every: int = 0,
        check_every: int = 0,
        two_states: bool = False,
        is_saved: Callable[[int], bool],
    ) -> None:
        self._trainer, self._line = trainer, trainer.parallel.cluster.line
        self._memory, self._checkpoints = memory, checkpoints
        self._copy_every, self._check_every = copy_every, check_every
        self._is_saved = is_saved
        self._suspicion = Suspicion(trainer)
        self._keeps = trainer.parallel.keeps_state
        self._runs_ahead = self._keeps and not two_states
        self._waiting: tuple[int, State, Any] | None = None
        if self._line is not None and not self._keeps and not (memory and copy_every):
            raise ArgumentError(
                "a step that takes over the memory of the state before it cannot be repeated: "
                "give --copy-every, to have a state in host memory to go back to"
            )

    def begin(
        self, done: int, state: State, source: str, count: Callable[[int, Any], None]
    ) -> None:
        """The state after step `done` is here, from `source`."""
        self._count = count
        if self._line is None:
            return
        jax.block_until_ready(state)
        self._trainer.parallel.cluster.barrier("what the epoch begins with")  # all hold it, or none
        self._hold(done, state)
        topology = self._trainer.parallel.ranks.topology
        self._line.joined(
            done,
            source=source,
            live=topology.num_live,
            less=format_failed(topology.failed) if topology.failed else "",
        )

    def add(self, step: int, state: State, loss: Any) -> None:
        """A step has been started. The one before it counts when this comes back."""
        self.settle()
        self._waiting = step, state, loss
        if self._line is None or not self._runs_ahead:
            self.settle()

    def settle(self) -> None:
        """Have the last step count, once its results are here and everywhere."""
        if self._waiting is None:
            return
        step, state, loss = self._waiting
        self._waiting = None
        copies = bool(self._copy_every) and step % self._copy_every == 0
        checks = bool(self._check_every) and (
            copies or step % self._check_every == 0 or self._is_saved(step)
        )
        if self._line is None:
            if checks:
                self._suspicion.compare(step, state)
        elif checks or copies or self._is_saved(step) or (self._keeps and not self._check_every):
            self._commit(self._line, step, state, loss, checks=checks, copies=copies)
        self._count(step, loss)

    def _commit(
        self, line: Line, step: int, state: State, loss: Any, *, checks: bool, copies: bool
    ) -> None:
        jax.block_until_ready(loss)  # one program makes all of its results
        self._suspicion.look_at(step, loss)
        if checks:
            self._suspicion.compare(step, state)
        if not self._keeps:
            self._copy(step, state)
            self._finish()
        fault_injection.reach("commit", step)
        word = line.commit(step)
        self._hold(step, state)
        if word == "leave":
            self._put_down(step, state)
            raise Paused(step)
        if self._keeps and copies:
            self._copy(step, state)

    def _hold(self, step: int, state: State) -> None:
        assert self._line is not None
        held = Held(step, state, self._trainer, self._line.news.epoch)
        self._line.held = held if self._keeps else None

    def _copy(self, step: int, state: State) -> None:
        assert self._line is not None
        assert self._memory is not None
        self._line.at("save", step)
        self._trainer.save(self._memory, step, state)

    def _finish(self) -> None:
        assert self._memory is not None
        if not self._memory.finish():
            raise CheckpointError("no host has room for the state, and the step cannot count")

    def _put_down(self, step: int, state: State) -> None:
        """Leave a state for those who come next."""
        assert self._line is not None
        store = self._memory or self._checkpoints
        if store is not None and store.latest_step != step:
            self._line.at("save", step)
            self._trainer.save(store, step, state)
            store.finish()
        self._trainer.parallel.cluster.barrier("the state is put down")  # or nobody leaves
