"""Commit steps, and find the newest state.

A step is committed when all processes have its results, and the results pass the checks. Until then
the previous state is kept. If a step donates that state, only steps whose state is copied to host
memory are committed. At each step, each host's shards are copied to devices of other hosts, so that
they survive the host.
"""

from __future__ import annotations

import math
import operator
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import NamedSharding

from ftmesh import command_line
from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.checkpoint.manifest import describe_tensors
from ftmesh.checkpoint.restore import (
    devices_of,
    first_difference,
    is_deleted,
    move_state,
    surviving_parts,
)
from ftmesh.checkpoint.snapshot import PartnerCopies, ShardCopier, is_on_one_host
from ftmesh.distributed.consensus import AgreedSteps
from ftmesh.elastic.controller_client import Paused
from ftmesh.elastic.elastic_group import ElasticGroup
from ftmesh.elastic.peer_checkpoint import PeerCheckpoint
from ftmesh.errors import ArgumentError, CheckpointError, TrainingError
from ftmesh.health.doctor import examine
from ftmesh.health.replica_check import check_replicas
from ftmesh.testing import fault_injection
from ftmesh.topology.devices import process_of
from ftmesh.topology.notation import Coord, format_failed
from ftmesh.topology.ranks import Ranks
from ftmesh.topology.topology import Topology

Load = Callable[[int], Any]


COPY_SHARE = 0.01  # of the time steps wait for copies to host memory, unless `copy_every` is given
SENDING_SHARE = 0.1  # of the time such copies are sent to hosts, meanwhile
MIN_COPY_SECONDS = 0.02  # that a copy is taken to last at least
SIGTERM_SECONDS = 1.0  # between two checks whether a process has received SIGTERM
EXAMINE_TIMEOUT = 120.0  # seconds for every chip and link to answer


@dataclass(frozen=True)
class Options:
    """The options of `attempts`."""

    with_idle: bool = False
    copy_every: int | None = None
    check_every: int = 0
    shard_copies: bool = True
    two_states: bool = False
    defer_sigterm: bool = False


class StepCommit:
    """Commits the steps of a generation. Without a controller it only checks them."""

    def __init__(
        self,
        group: ElasticGroup,
        topology: Topology,
        full_types: Any,
        options: Options,
        peers: PeerCheckpoint | None,
        sigterm: threading.Event,
    ) -> None:
        self.held: HeldStep | None = None  # the last committed step
        self._group, self._topology, self._full_types = group, topology, full_types
        self._options, self._peers, self._sigterm = options, peers, sigterm
        self._copier: ShardCopier | None = None
        self._waiting: HeldStep | None = None  # dispatched, and not committed yet
        self._loss: Any = None  # of that step
        self._copies_waiting = self._checks_waiting = False
        self._is_donated = self._exits_next = False

    def begin(self, done: int, state: Any) -> None:
        """Hold the state after `done` steps."""
        group, options = self._group, self._options
        if group.controller is not None:
            if options.shard_copies:
                self._copier = ShardCopier.for_topology(self._topology)
            self.held = self._hold(done, state)
            is_alone = len(group.members) == 1
            if options.shard_copies and not (self._copier or is_alone) and group.is_primary:
                self._warn_without_copies(state)
        self._copy_pace = AgreedSteps(group, "the time of copies", done, options.copy_every)
        self._sigterm_pace = AgreedSteps(group, "whether to terminate", done, None)
        self._last_step = done
        fault_injection.inject("step", done + 1)

    def add(self, step: int, state: Any, loss: Any, *, copy: bool, wait: bool, phase: str) -> bool:
        """As `Attempt.commit`."""
        if step <= self._last_step:
            raise ArgumentError(f"step {step} is not after step {self._last_step}")
        if self._exits_next:
            raise SystemExit(128 + signal.SIGTERM)
        self._last_step = step = operator.index(step)
        fault_injection.inject("collective", step)
        every = self._options.check_every
        if self._group.controller is not None:
            self.settle()
            self._waiting, self._loss = self._hold(step, state), loss
            copies = self._copies_waiting = copy or step >= self._copy_pace.next_step
            self._checks_waiting = bool(every) and (wait or copies or step % every == 0)
            # If steps donate their state, the next one takes the memory that is to be copied.
            if wait or self._options.two_states or (self._is_donated and copies):
                self.settle()
            self._group.report_phase(phase, step)
        elif every and (wait or step % every == 0):
            self._compare(step, state)
        self._exits_next = self._is_terminating(step)
        fault_injection.inject("step", step + 1)
        return self._exits_next

    def settle(self) -> None:
        """Commit the last step, once all processes have its results."""
        controller, waiting, self._waiting = self._group.controller, self._waiting, None
        self._is_donated |= self.held is not None and is_deleted(self.held.state)
        if controller is None or waiting is None:
            return
        if is_deleted(waiting.state):
            self._is_donated = True
            return
        jax.block_until_ready((waiting.state, waiting.copies and waiting.copies.vectors))
        self._check_loss(waiting.step)
        if self._checks_waiting:
            self._compare(waiting.step, waiting.state)
        elif self._options.check_every:
            return  # a state that was not compared must not be kept
        fault_injection.inject("commit", waiting.step)
        answer = controller.commit(waiting.step)
        self.held = waiting
        if answer == "leave":
            self._save_and_leave(waiting)
        if self._copies_waiting and self._peers is not None:
            begin = time.monotonic()
            self._save(self._peers, waiting)
            waits = max(MIN_COPY_SECONDS, time.monotonic() - begin)
            seconds = max(waits / COPY_SHARE, self._peers.seconds / SENDING_SHARE)
            self._copy_pace.choose_next(waiting.step, seconds)

    def _hold(self, step: int, state: Any) -> HeldStep:
        copier = None if self._is_donated else self._copier
        return HeldStep.create(step, state, self._full_types, copier)

    def _save(self, peers: PeerCheckpoint, held: HeldStep) -> None:
        self._group.report_phase("save", held.step)
        held.save(peers, self._topology)

    def _save_and_leave(self, held: HeldStep) -> NoReturn:
        """Save the state for the processes that will be started next."""
        if self._peers is not None:
            self._save(self._peers, held)
            self._peers.finish()
        self._group.barrier("the state is saved")  # or nobody leaves
        raise Paused(held.step)

    def _is_terminating(self, step: int) -> bool:
        """True, in all processes, if one of them has received SIGTERM."""
        if not self._options.defer_sigterm or self._group.is_single_process:
            return self._sigterm.is_set()
        if step < self._sigterm_pace.next_step:
            return False
        return any(self._sigterm_pace.choose_next(step, SIGTERM_SECONDS, self._sigterm.is_set()))

    def _warn_without_copies(self, state: Any) -> None:
        if any(map(is_on_one_host, jax.tree.leaves(state))):
            command_line.say(
                "the shards of a host have no copies on other hosts, which have too few chips for "
                "them: if a host is lost, the run goes back to host memory or to a checkpoint"
            )

    # Silent data corruption -------------------------------------------------------------------

    def _check_loss(self, step: int) -> None:
        """Test all chips and links if the loss is not finite; raise if all are healthy."""
        loss, self._loss = self._loss, None
        value = 0.0 if loss is None else float(np.asarray(_own_value(loss)))
        if math.isfinite(value):
            return
        group, why = self._group, f"the loss of step {step} is {value}"
        group.report_phase("examine")
        findings = examine(self._topology, group=group, timeout=EXAMINE_TIMEOUT)
        if findings.quarantined:
            self._quarantine(findings.quarantined, why, "; ".join(map(str, findings.entries)))
        raise TrainingError(
            f"{why}, and all chips are healthy: try a lower learning rate, a longer warm-up, or an "
            "earlier checkpoint"
        )

    def _compare(self, step: int, state: Any) -> None:
        """Quarantine chips whose copy of a replicated array differs from that of the majority."""
        if not self._topology.devices or self._topology.num_live < 2:
            return
        replicated = [x for x in jax.tree.leaves(state) if _is_replicated(x)]
        unhealthy = check_replicas(replicated, self._topology, group=self._group)
        if len(unhealthy) * 2 >= self._topology.num_live:
            raise TrainingError(
                f"after step {step} no majority of the chips has the same parameters: go back to a "
                "checkpoint; ftmesh doctor may find the cause"
            )
        if unhealthy:
            why = f"its parameters differ from those of the other chips after step {step}"
            self._quarantine(unhealthy, why)

    def _quarantine(self, chips: Iterable[Coord], *reasons: str) -> NoReturn:
        blocks, why = format_failed(chips), "; ".join(reasons)
        if self._group.controller is None:
            raise TrainingError(f"chips {blocks}: {why}; give --failed {blocks}")
        self._group.controller.quarantine(blocks, why)


def _own_value(array: Any) -> Any:
    """Return this process's copy of a replicated value."""
    return array.addressable_shards[0].data if isinstance(array, jax.Array) else array


def _is_replicated(leaf: Any) -> bool:
    sharding = getattr(leaf, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.is_fully_replicated


@dataclass(frozen=True)
class HeldStep:
    """A step, and the state after it, on devices. `full_types` are those of `Checkpoints.save`."""

    step: int
    state: Any
    full_types: Any = None
    copies: PartnerCopies | None = None

    @staticmethod
    def create(step: int, state: Any, full_types: Any, copier: ShardCopier | None) -> HeldStep:
        """Hold the current value of `state`: nnx modules and NumPy arrays change in place."""
        copies = None if copier is None else copier.copy(state)
        own = jax.tree.map(lambda x: x.copy() if type(x) is np.ndarray else x, state)
        return HeldStep(step, own, full_types, copies)

    def save(self, store: Checkpoints | PeerCheckpoint, topology: Topology) -> None:
        """Start to save it from the live devices of `topology`."""
        devices = Ranks(topology).devices or None
        store.save(self.step, self.state, full_types=self.full_types, devices=devices)


# The newest state -------------------------------------------------------------------------------


def newest_state(
    group: ElasticGroup,
    peers: PeerCheckpoint | None,
    last_held: HeldStep | None,
    like: Any,
    full_types: Any,
    init: Callable[[], Any] | None,
    checkpoints: Checkpoints | None,
    latest_step: int | None,
    load: Load | None,
) -> tuple[int, Any, str]:
    """Return how many steps are done, the state after them, and its source: see `Attempt.restore`.

    `latest_step` is that of a checkpoint, which `checkpoints` or `load` restores. What an earlier
    generation has left of a checkpoint that is not complete is deleted.
    """
    held = _common_held(group, last_held)
    found = None if held is None else _from_devices(group, peers, held, like, full_types)
    if found is None:
        found = _from_stores(group, peers, like, full_types, init, checkpoints, latest_step, load)
    if checkpoints is not None:
        checkpoints.wait()
        group.barrier("the last writes of checkpoints")
        if group.is_primary:
            checkpoints.discard_incomplete(found[0])
        group.barrier("the next writes of checkpoints")
    return found


def _from_stores(
    group: ElasticGroup,
    peers: PeerCheckpoint | None,
    like: Any,
    full_types: Any,
    init: Callable[[], Any] | None,
    checkpoints: Checkpoints | None,
    latest_step: int | None,
    load: Load | None,
) -> tuple[int, Any, str]:
    """Return the newer state of host memory and checkpoint, or the first one."""
    newest = {"checkpoint": latest_step}
    if peers is not None and group.generation > 1:
        newest["host memory"] = peers.latest_step
    steps = {k: operator.index(step) for k, step in newest.items() if step is not None}
    order = sorted(steps.items(), key=lambda item: (item[1], item[0]), reverse=True)
    for source, step in group.broadcast(order, "where to look for a state"):
        store = peers if source == "host memory" else checkpoints
        if store is None:
            if load is None:
                raise ArgumentError(f"process {group.primary} has a checkpoint: give load=")
            return step, load(step), source
        restored = store.restore(like, full_types=full_types, agree=partial(_agree, group))
        if restored and restored[0]:
            return *restored, source
    return 0, like if init is None else init(), "start"


def _from_devices(
    group: ElasticGroup, peers: PeerCheckpoint | None, held: HeldStep, like: Any, full_types: Any
) -> tuple[int, Any, str] | None:
    """Return the state that the processes hold; None if a part of it was lost with others."""
    ours, theirs = (like, full_types), (held.state, held.full_types)
    difference = first_difference(describe_tensors(*ours), describe_tensors(*theirs))
    if difference:
        raise CheckpointError(f"the state on the devices is another: {difference}")
    present = {d for d in jax.devices() if process_of(d) in group.members}
    healthy = present & devices_of(like)
    for trusted in (healthy, present):  # what only an unhealthy chip has may still be right
        local, complete = surviving_parts(held.state, group.members, held.copies, trusted)
        if local:
            return held.step, move_state(*theirs, *ours), "devices"
        if complete and peers is not None:
            break
    if peers is None or not complete:
        return None
    _save_parts(group, peers, held, list(trusted))
    restored = peers.restore(like, full_types=full_types, agree=partial(_agree, group))
    if restored is None or restored[0] != held.step:
        raise CheckpointError(f"a part of step {held.step} was lost")
    return *restored, "devices"


def _agree(group: ElasticGroup, found: str) -> None:
    group.agree({"the step to continue from": found})


def _common_held(group: ElasticGroup, held: HeldStep | None) -> HeldStep | None:
    """Return the step that all processes hold on devices, if they do."""
    if not group.is_in_place:
        return None
    if held is not None and is_deleted(held.state):
        held = None
    steps = group.gather(held and held.step, "the steps on devices").values()
    return held if len(set(steps)) == 1 else None


def _save_parts(
    group: ElasticGroup, peers: PeerCheckpoint, held: HeldStep, devices: Sequence[Any]
) -> None:
    """Save the shards that `devices` have, and their copies of lost ones."""
    types = held.full_types
    peers.save(held.step, held.state, full_types=types, devices=devices, copies=held.copies)
    peers.finish()
    group.barrier("the parts of the state")
