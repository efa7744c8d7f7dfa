"""Recovery for any training loop: the loss of a host repeats a block of code, in place.

    for attempt in elastic.attempts():
        with attempt as run:
            mesh = run.mesh()
            state = ...  # a pytree of arrays on that mesh
            step, state = run.restore(state)
            for step in range(step, num_steps):
                state, loss = train_step(state, batch(step))
                run.commit(step + 1, state)

The ``with`` block suppresses the loss of a worker, and the ``for`` loop runs it again with the
remaining chips. After a restart of all processes it runs once, and `restore` returns the state that
the earlier processes saved. Without ``ftmesh launch --failures`` or ``ftmesh run`` no error is
suppressed, and a commit does nothing.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import jax
from jax.sharding import Mesh

from ftmesh import command_line
from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.distributed.consensus import agreed_plan, agreed_topology
from ftmesh.distributed.process_group import TIMEOUT
from ftmesh.distributed.shutdown import deferred_sigterm
from ftmesh.elastic import precompile
from ftmesh.elastic.controller_client import RESTART_STATUS, Paused
from ftmesh.elastic.elastic_group import LEAVE_TIMEOUT, ElasticGroup, join, recover
from ftmesh.elastic.peer_checkpoint import PeerCheckpoint
from ftmesh.elastic.step_commit import HeldStep, Load, Options, StepCommit, newest_state
from ftmesh.errors import ArgumentError
from ftmesh.planning.plan import Plan
from ftmesh.planning.profiles import LinkArgument
from ftmesh.testing import fault_injection
from ftmesh.topology.notation import format_failed
from ftmesh.topology.ranks import jax_mesh
from ftmesh.topology.topology import Topology


def attempts(
    group: ElasticGroup | None = None,
    *,
    topology: Callable[[ElasticGroup], Topology] | None = None,
    with_idle: bool = False,
    copy_every: int | None = None,
    check_every: int = 0,
    shard_copies: bool = True,
    two_states: bool = False,
    defer_sigterm: bool = False,
    timeout: float = TIMEOUT,
) -> Iterator[Attempt]:
    """Join the other processes, and yield an attempt to train to the end, again after each loss.

    Call it before JAX is used for anything else, unless ``jax.distributed`` is initialized. All
    arguments must be the same in all processes.

    Args:
        group: What `ftmesh.elastic.initialize` returns; by default it is called here.
        topology: Returns the mesh of the remaining processes; by default
            ``Topology.from_devices(jax.devices())``. Lost chips are removed from it.
        with_idle: Keep the devices of failed chips in the program, for platforms that need whole
            slices. Hosts cannot be lost then.
        copy_every: Copy the state to host memory every `copy_every` steps, for losses that the
            state on the devices does not survive. By default as often as takes 1 % of the time.
        check_every: Compare replicated arrays across all chips every `check_every` steps, and
            commit steps only then. A chip that differs is quarantined. By default never.
        shard_copies: Keep copies of each host's shards on devices of other hosts.
        two_states: Wait for each step in its own commit, so that devices hold two states instead
            of three.
        defer_sigterm: Do not exit at once after SIGTERM: the next commit returns True, so that the
            loop can save, and the one after it exits with status 143.
        timeout: Seconds to wait for other processes.

    Yields:
        An attempt, to be used as ``with attempt as run:``. Put everything that needs the other
        processes in that block: at its end they disconnect from each other.

    Raises:
        ArgumentError: `copy_every` is less than 1, or an attempt was not entered by ``with``.
        ClusterError: Not all processes joined, or JAX was used before this call.
    """
    if copy_every is not None and copy_every < 1:
        raise ArgumentError(f"copy_every is {copy_every}: give 1 or more, or None to choose")
    options = Options(with_idle, copy_every, check_every, shard_copies, two_states, defer_sigterm)
    group = join(timeout) if group is None else group
    held = None
    while True:
        try:
            mesh, group = _live_mesh(group, topology, with_idle=with_idle)
            if not group.is_member:  # no chip of this process is live
                if group.controller is not None:
                    group.controller.stand_by()
                group.__exit__(None, None, None)
                return
        except BaseException as error:
            group = _recover_or_leave(group, error)
            continue
        attempt = Attempt(group, mesh, held, options)
        yield attempt
        if attempt.is_done:
            return
        if attempt.next_group is None:
            raise ArgumentError("enter each attempt: `with attempt as run:`")
        group, held = attempt.next_group, attempt.held


def _live_mesh(
    group: ElasticGroup, topology: Callable[[ElasticGroup], Topology] | None, *, with_idle: bool
) -> tuple[Topology, ElasticGroup]:
    """Return the mesh of a generation, the same in all processes, and the group that has chips."""
    group.report_phase("agree")
    if group.controller is not None and with_idle:
        raise ArgumentError(
            "failed chips cannot stay in the program (with_idle, --idle) in a run that survives "
            "the loss of hosts: their devices would be gone"
        )
    given = None if topology is None else topology(group)
    mesh = group.live_topology(agreed_topology(group, given))
    group = group.for_topology(mesh, with_idle=with_idle)
    group.report_phase("compile")
    return mesh, group


def _recover_or_leave(group: ElasticGroup, error: BaseException) -> ElasticGroup:
    """Return the group of the next generation, or end this process as `error` says."""
    try:
        return recover(group, error)
    except BaseException as raised:
        group.__exit__(type(raised), raised, raised.__traceback__)
        raise


class Attempt:
    """One attempt to train to the end on the live chips. `attempts` yields it.

    Attributes:
        topology: The mesh, without lost and quarantined chips.
        group: The processes that take part; for `agree`, `broadcast` and `gather`.
        is_primary: True in the one process that prints and writes for all.
        is_done, next_group, held: How the attempt ended, and the input of the next one.
    """

    def __init__(
        self, group: ElasticGroup, topology: Topology, held: HeldStep | None, options: Options
    ) -> None:
        self.group, self.topology, self.held = group, topology, held
        self.is_primary, self.is_done = group.is_primary, False
        self.next_group: ElasticGroup | None = None
        self.source = ""  # of the state that `restore` has returned
        self._options, self._full_types = options, None
        self._stack = contextlib.ExitStack()
        self._peers: PeerCheckpoint | None = None
        self._commits: StepCommit | None = None
        self._prepare: Callable[[], object] = lambda: None  # for the loss of each host
        self._sigterm = threading.Event()

    def __enter__(self) -> Self:
        if jax.local_devices()[0] not in self.topology.devices:
            self._stack.enter_context(jax.default_device(self.group.default_device))
        if self._options.defer_sigterm:
            self._stack.enter_context(deferred_sigterm(self.group.shutdown, self._sigterm.set))
        if self.group.controller is not None:
            self._peers = PeerCheckpoint.from_environment(
                self.group.process, self.group.generation, command_line.say
            )
        if self._peers is not None:
            self._stack.enter_context(self._peers)
            self.group.before_exit(self._peers.finish)
        return self

    def mesh(
        self, axis_names: str | Sequence[str] = "data", shape: Sequence[int] | None = None
    ) -> Mesh:
        """Return a mesh of the live devices along a ring of neighbours.

        Args:
            axis_names: One axis, or several with a `shape`.
            shape: The size of each axis; one may be -1, as for ``reshape``.
        """
        names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        devices = jax_mesh(self.topology, "data", with_idle=self._options.with_idle).devices
        sizes = tuple(shape or (-1,))
        if len(sizes) != len(names) or devices.size % abs(math.prod(sizes)):
            raise ArgumentError(
                f"{devices.size} live devices do not fill a mesh of shape {sizes} with axes {names}"
            )
        return Mesh(devices.reshape(sizes), names)

    def plan(
        self,
        algorithm: str = "auto",
        *,
        payload_bytes: int = 100_000_000,
        wire_dtype: Any = "float32",
        link: LinkArgument = None,
        reduce_scatter: bool = False,
        executor: str = "auto",
        planner: Callable[..., Plan] = precompile.cached_plan,
    ) -> Plan:
        """Return a plan for the live chips, the same in all processes.

        Arguments are those of `ftmesh.distributed.agreed_plan`. Whether idle chips get results is
        an option of `attempts`.
        """
        plan = agreed_plan(
            self.group,
            self.topology,
            algorithm,
            payload_bytes=payload_bytes,
            wire_dtype=wire_dtype,
            link=link,
            with_idle=self._options.with_idle,
            reduce_scatter=reduce_scatter,
            executor=executor,
            planner=planner,
        )
        self.group.report_phase("compile")
        return plan

    def compile(
        self,
        step: Any,
        inputs: Sequence[Any],
        *,
        rebuild: precompile.Rebuild | None = None,
        ahead: bool = False,
    ) -> Any:
        """Return the program of a step, checked to be the same in all processes.

        Args:
            step: A jitted function.
            inputs: The types of its arguments, with shardings.
            rebuild: Returns `step` and `inputs` for a smaller mesh and its group of processes.
                Called in the background for the loss of each host, to make the plans ahead of time.
            ahead: Also compile these steps.
        """
        group, topology = self.group, self.topology
        program = precompile.agreed_program(group, step, inputs, topology)
        if rebuild is not None and (ahead or group.process in group.members[:2]):  # primaries
            self._prepare = lambda: precompile.rebuild_for_host_loss(
                topology, replace(group, kv=None), rebuild, ahead=ahead
            )
        return program

    def restore(
        self,
        state: Any,
        *,
        init: Callable[[], Any] | None = None,
        full_types: Any = None,
        checkpoints: Checkpoints | None = None,
        latest_step: int | None = None,
        load: Load | None = None,
    ) -> tuple[int, Any]:
        """Return how many steps are done, and the state after them.

        The newest of these is returned: the last committed state, if it is still on the devices;
        the last copy in host memory; your own checkpoint; and `state` itself, after 0 steps.

        Args:
            state: The initial state: a pytree of arrays, random keys and numbers. The result has
                its tree, types and shardings.
            init: Returns the initial state, if `state` has only its types, with shardings.
            full_types: As for `ftmesh.checkpoint.Checkpoints.save`, for a sharded optimizer.
            checkpoints: Where `save` writes your checkpoints.
            latest_step: The step of your newest checkpoint in another format; None without one.
                The primary's value counts.
            load: Called in all processes with that step if there is no newer state; returns the
                state. Needs `latest_step`.

        Raises:
            CheckpointError: The saved state has other arrays than `state`.
        """
        if checkpoints is not None:
            latest_step = checkpoints.latest_step
        elif latest_step is not None and load is None:
            raise ArgumentError(f"the latest step is {latest_step}: give load= to load it")
        group, controller = self.group, self.group.controller
        self._full_types = full_types
        group.report_phase("restore")
        if group.generation > 1:
            fault_injection.inject("recovery")
        done, state, self.source = newest_state(
            group,
            self._peers,
            self.held,
            state,
            full_types,
            init,
            checkpoints,
            latest_step,
            load,
        )
        self.held = None
        if controller is not None:
            jax.block_until_ready(state)
            group.barrier("the state of a generation")  # all hold it, or none
            live, chips = self.topology.num_live, self.topology.failed
            failed = format_failed(chips) if chips else ""
            controller.report_joined(done, source=self.source, live=live, failed=failed)
            group.report_phase("compile", done)  # by the first step
            self._prepare()
        self._commits = StepCommit(
            group, self.topology, full_types, self._options, self._peers, self._sigterm
        )
        self._commits.begin(done, state)
        return done, state

    def commit(
        self,
        step: int,
        state: Any,
        *,
        loss: Any = None,
        copy: bool = False,
        wait: bool = False,
        phase: str = "evaluate",
    ) -> bool:
        """Commit `state`, which the last of `step` dispatched steps returns.

        Waits until all processes have the results of the previous commit, while this step runs. If
        the next step donates the state, a step is committed only when it is copied to host memory.

        Args:
            step: How many steps are done, more than at the last commit.
            state: The state after them, of the same tree and types as that of `restore`.
            loss: The step's loss. If it is not finite, all chips and links are tested, and the step
                is repeated without the unhealthy ones; if all are healthy, the run ends.
            copy: Copy the state to host memory in any case.
            wait: Wait for the results of this step too, for example before your own checkpoint.
            phase: What the loop does next; each phase has a timeout: see `elastic.heartbeats`.

        Returns:
            True if the loop should save now, because a process received SIGTERM.
        """
        if self._commits is None:
            raise ArgumentError("call restore before commit: it returns the first step")
        return self._commits.add(step, state, loss, copy=copy, wait=wait, phase=phase)

    def save(self, checkpoints: Checkpoints, step: int, state: Any) -> None:
        """Start to write a checkpoint, from which `restore` continues on any mesh.

        One that an earlier generation has completed, before this one repeated the step, is kept.
        """
        self.group.report_phase("save", step)
        if self.group.generation > 1 and checkpoints.is_complete(step):
            return
        HeldStep(step, state, self._full_types).save(checkpoints, self.topology)

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        given = error
        with self._stack:
            if error is None:
                try:
                    if self._commits is not None:
                        self._commits.settle()
                    if self.group.controller is not None:
                        self.group.report_phase("agree")
                        self.group.barrier("the end of the run", timeout=LEAVE_TIMEOUT)
                except Exception as late:
                    error = late
            if isinstance(error, Exception) and not isinstance(error, Paused):
                self.held = None if self._commits is None else self._commits.held
                return self._recover(error, is_given=error is given)
        self.is_done = True
        is_paused = isinstance(error, Paused)
        self.group.__exit__(None, None if is_paused else error, None)
        if is_paused:
            raise SystemExit(RESTART_STATUS)
        return False

    def _recover(self, error: Exception, *, is_given: bool) -> bool:
        """Enter the next generation; return False or raise, after an error of the loop itself."""
        try:
            self.next_group = recover(self.group, error)
            return True
        except Exception as raised:
            if raised is not error:
                raise
        if self.group.is_in_place and self._commits is None and self.group.controller is not None:
            self.group.controller.request_restart(f"cannot start on the remaining chips: {error}")
        self.is_done = True
        self.group.__exit__(type(error), error, error.__traceback__)
        if is_given:
            return False
        raise error
