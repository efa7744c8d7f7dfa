"""Commit steps: a step is committed when all processes have its results.

Until then the state before it is kept. If a step donates that state, only steps whose state has
been copied to host memory are committed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from examples.common.sdc_check import SdcCheck
from examples.common.trainer import State, Trainer
from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.elastic.controller_client import ControllerClient, Paused
from ftmesh.elastic.peer_checkpoint import PeerCheckpoint
from ftmesh.errors import ArgumentError, CheckpointError
from ftmesh.testing import fault_injection
from ftmesh.topology.notation import format_failed


@dataclass(frozen=True)
class HeldState:
    """The last committed state, on the devices of a trainer, for the next generation."""

    step: int
    state: State
    trainer: Trainer
    generation: int


class StepCommit:
    """Commits the steps of a generation. Without a controller it only checks and reports them.

    Args:
        trainer: Whose steps.
        peer_checkpoint: In-memory checkpoints, if there are peer stores.
        checkpoints: Checkpoints on disk, if any.
        copy_every: Copy the state to host memory every N steps; 0 for never.
        check_every: Compare parameters every N steps, and commit only then; 0 for never.
        two_states: Commit a step before the next one starts, so that devices hold two states;
            otherwise it is committed while the next one runs.
        is_saved: Whether a checkpoint follows a step.
    """

    def __init__(
        self,
        trainer: Trainer,
        peer_checkpoint: PeerCheckpoint | None,
        checkpoints: Checkpoints | None,
        *,
        copy_every: int = 0,
        check_every: int = 0,
        two_states: bool = False,
        is_saved: Callable[[int], bool],
    ) -> None:
        self._trainer, self._controller = trainer, trainer.parallel.group.controller
        self._peer_checkpoint, self._checkpoints = peer_checkpoint, checkpoints
        self._copy_every, self._check_every = copy_every, check_every
        self._is_saved = is_saved
        self._sdc_check = SdcCheck(trainer)
        self._keeps_state = trainer.parallel.keeps_state
        self._runs_ahead = self._keeps_state and not two_states
        self._waiting: tuple[int, State, Any] | None = None
        is_repeatable = self._keeps_state or (peer_checkpoint and copy_every)
        if self._controller is not None and not is_repeatable:
            raise ArgumentError(
                "a step with --donate cannot be repeated after a failure: give --copy-every, "
                "to have a state in host memory to go back to"
            )

    def begin(
        self, done: int, state: State, source: str, report: Callable[[int, Any], None]
    ) -> None:
        """Hold the state after step `done`; `report` is called with every step and its loss."""
        self._report = report
        if self._controller is None:
            return
        jax.block_until_ready(state)
        self._trainer.parallel.group.barrier("the state of a generation")  # all hold it, or none
        self._hold(done, state)
        topology = self._trainer.parallel.ranks.topology
        self._controller.report_joined(
            done,
            source=source,
            live=topology.num_live,
            failed=format_failed(topology.failed) if topology.failed else "",
        )

    def add(self, step: int, state: State, loss: Any) -> None:
        """Add a step that has been dispatched; the one before it is committed on return."""
        self.settle()
        self._waiting = step, state, loss
        if self._controller is None or not self._runs_ahead:
            self.settle()

    def settle(self) -> None:
        """Commit the last step, once all processes have its results."""
        if self._waiting is None:
            return
        step, state, loss = self._waiting
        self._waiting = None
        copies = bool(self._copy_every) and step % self._copy_every == 0
        checks = bool(self._check_every) and (
            copies or step % self._check_every == 0 or self._is_saved(step)
        )
        if self._controller is None:
            if checks:
                self._sdc_check.compare(step, state)
        elif (
            checks
            or copies
            or self._is_saved(step)
            or (self._keeps_state and not self._check_every)
        ):
            self._commit(self._controller, step, state, loss, checks=checks, copies=copies)
        self._report(step, loss)

    def _commit(
        self,
        controller: ControllerClient,
        step: int,
        state: State,
        loss: Any,
        *,
        checks: bool,
        copies: bool,
    ) -> None:
        jax.block_until_ready(loss)  # the state is ready then too: one program
        self._sdc_check.check_loss(step, loss)
        if checks:
            self._sdc_check.compare(step, state)
        if not self._keeps_state:
            self._copy(step, state)
            assert self._peer_checkpoint is not None
            if not self._peer_checkpoint.finish():
                raise CheckpointError(
                    "no host has memory for the state, so the step cannot be committed"
                )
        fault_injection.inject("commit", step)
        answer = controller.commit(step)
        self._hold(step, state)
        if answer == "leave":
            self._save_and_leave(step, state)
            raise Paused(step)
        if self._keeps_state and copies:
            self._copy(step, state)

    def _hold(self, step: int, state: State) -> None:
        assert self._controller is not None
        held = HeldState(step, state, self._trainer, self._controller.membership.generation)
        self._controller.held_state = held if self._keeps_state else None

    def _copy(self, step: int, state: State) -> None:
        assert self._controller is not None
        assert self._peer_checkpoint is not None
        self._controller.report_phase("save", step)
        self._trainer.save(self._peer_checkpoint, step, state)

    def _save_and_leave(self, step: int, state: State) -> None:
        """Save the state for the processes that will be started next."""
        assert self._controller is not None
        store = self._peer_checkpoint or self._checkpoints
        if store is not None and store.latest_step != step:
            self._controller.report_phase("save", step)
            self._trainer.save(store, step, state)
            store.finish()
        self._trainer.parallel.group.barrier("the state is saved")  # or nobody leaves
