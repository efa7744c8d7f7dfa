"""ElasticGroup: a process group that survives the loss of workers.

Under ``ftmesh launch --failures`` and ``ftmesh run`` a controller starts a new generation when a
worker is lost, and `recover` returns the group of the others. Without a controller an
`ElasticGroup` is a plain `ProcessGroup` in its first generation.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Self

import jax

from ftmesh.distributed.kv_store import KvClient
from ftmesh.distributed.process_group import TIMEOUT, ProcessGroup
from ftmesh.distributed.shutdown import GRACE_SECONDS, Shutdown, run_with_timeout
from ftmesh.distributed.startup import (
    CONTROLLER_ADDRESS,
    check_timeout,
    find_processes,
    process_logger,
    split_address,
)
from ftmesh.distributed.startup import initialize as initialize_group
from ftmesh.elastic.controller_client import RESTART_STATUS, ControllerClient, GenerationChanged
from ftmesh.elastic.rpc import MAX_DATA_BYTES
from ftmesh.errors import CheckpointError, ClusterError, PlanError, TrainingError
from ftmesh.execute import _compat
from ftmesh.testing import fault_injection
from ftmesh.topology.devices import process_of
from ftmesh.topology.notation import parse_blocks
from ftmesh.topology.topology import Topology

REPLY_TIMEOUT = 30.0  # seconds for a reply that needs no other worker
LEAVE_TIMEOUT = 3600.0  # for all workers to be done
DISCONNECT_TIMEOUT = 5.0  # for JAX to disconnect from its service
PART_BYTES = MAX_DATA_BYTES // 4  # of a value in the store: other messages pass in between
_IN_PARTS = b"\0parts "  # and how many; no other value begins so
_STATUS = re.compile(
    "(ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|UNAVAILABLE|UNKNOWN): "
)
RESTART_GRACE_SECONDS = 1.5  # for the callbacks of `before_exit` when all are restarted


@dataclass(frozen=True)
class ElasticGroup(ProcessGroup):
    """A `ProcessGroup` whose workers may be lost."""

    controller: ControllerClient | None = None  # None if nothing may be lost

    @property
    def generation(self) -> int:
        """Number of the current generation, from 1."""
        return 1 if self.controller is None else self.controller.membership.generation

    @property
    def is_in_place(self) -> bool:
        """True if this process has lost others since it was started."""
        return self.controller is not None and self.generation > self.controller.first_generation

    def report_phase(self, phase: str, step: int = 0) -> None:
        """Tell the controller what this worker does from now on, for `step`.

        Phases are "agree" and the keys of `ftmesh.elastic.heartbeats.PHASE_TIMEOUTS`.

        Raises:
            GenerationChanged: A new generation has begun.
        """
        if self.controller is not None:
            self.controller.report_phase(phase, step)

    def in_next_generation(self) -> Self:
        """Return the group of the members that are left."""
        assert self.controller is not None
        members = self.controller.enter_next_generation().members
        kv = ControllerKvClient(self.controller)
        return replace(self, members=members, primary=members[0], live_devices=None, kv=kv)

    def live_topology(self, topology: Topology) -> Topology:
        """Return `topology` without the chips of lost workers and without quarantined chips.

        If the live chips are not connected, returns the largest component.
        """
        if self.controller is None:
            return topology
        membership = self.controller.membership
        lost_devices = (d for d in topology.devices if process_of(d) not in membership.members)
        lost = set(map(topology.coord_of, lost_devices))
        blocks = parse_blocks(membership.quarantined)
        quarantined = {coord for block in blocks for coord in block.coords()}
        left = topology.with_failed(lost | quarantined)
        return left.with_failed(coord for part in left.components()[1:] for coord in part)


SINGLE_PROCESS = ElasticGroup()


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = TIMEOUT,
    name: str = "ftmesh",
) -> ElasticGroup:
    """Join the other processes, and the controller if ``ftmesh launch --failures`` started this.

    The arguments are those of `ftmesh.distributed.initialize`. Pass the group to `attempts`, or use
    it in a ``with`` block.
    """
    fault_injection.inject("start")
    if os.environ.get(CONTROLLER_ADDRESS) and _compat.coordination_client() is None:
        check_timeout(timeout)
        address, number, process = find_processes(
            coordinator_address, num_processes, process_id, timeout
        )
        if address is not None and number is not None and process is not None:
            if _compat.backends_are_initialized():
                raise ClusterError(
                    "JAX was used before this process has joined the others: import what you like, "
                    "but make no array and ask for no device before"
                )
            return _join_controller(address, number, process, timeout, name)
    group = initialize_group(
        coordinator_address, num_processes, process_id, timeout=timeout, name=name
    )
    return ElasticGroup(**vars(group))


def join(timeout: float) -> ElasticGroup:
    """As `initialize`; if ``jax.distributed`` is initialized, use its processes.

    Raises:
        ClusterError: ``jax.distributed`` is initialized in a process that a controller waits for.
    """
    client = _compat.coordination_client()
    if client is None:
        return initialize(timeout=timeout)
    if os.environ.get(CONTROLLER_ADDRESS):
        raise ClusterError(
            "jax.distributed is initialized, and this process was started by `ftmesh run` or "
            "`ftmesh launch --failures`: remove jax.distributed.initialize(), which ftmesh replaces"
        )
    process, number = _compat.process_id_and_count()  # the caller starts and ends them
    return ElasticGroup(process, number, timeout, tuple(range(number)), kv=KvClient(client))


def recover(group: ElasticGroup, error: BaseException) -> ElasticGroup:
    """Return the group to continue with after `error`, once the controller has decided.

    A failed collective is reported to the controller, which decides which worker caused it. If
    there is no plan for the remaining chips, all workers are restarted: lost hosts may return. A
    `TrainingError` ends the run.

    Raises:
        BaseException: `error` itself, if it is this worker's own, or there is no controller.
    """
    controller = group.controller
    if controller is None:
        raise error
    if _is_caused_by(error, lambda error: isinstance(error, GenerationChanged)):
        pass
    elif isinstance(error, PlanError) and group.is_in_place:
        controller.request_restart(f"no plan for the chips that are left: {error}")
    elif isinstance(error, TrainingError):
        controller.request_end(str(error))
    elif isinstance(error, (ClusterError, CheckpointError)) and group.generation > 1:
        controller.request_restart(str(error))
    elif _is_caused_by(error, _is_of_the_runtime):
        with contextlib.suppress(GenerationChanged):
            controller.report_failure(error)
    else:
        raise error
    return group.in_next_generation()


def _is_caused_by(error: BaseException | None, is_cause: Callable[[BaseException], bool]) -> bool:
    while error is not None and not is_cause(error):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error is not None


def _is_of_the_runtime(error: BaseException) -> bool:
    """Whether a computation failed; jaxlib raises ValueError for small ones, which it runs at once.

    Such an error begins with the name of its status, as "UNKNOWN: Gloo all-reduce failed".
    """
    is_value_error = isinstance(error, ValueError) and _STATUS.match(str(error))
    return isinstance(error, jax.errors.JaxRuntimeError) or bool(is_value_error)


class ControllerKvClient(KvClient):
    """Access to the key-value store of a generation, which is in the controller."""

    def __init__(self, controller: ControllerClient) -> None:
        super().__init__(client=None)
        self._controller = controller

    def put(self, key: str, value: bytes) -> bool:
        """As `KvClient.put`; a value that is longer than a message may be is put in parts."""
        if len(value) > PART_BYTES:
            parts = range(0, len(value), PART_BYTES)
            for number, start in enumerate(parts):
                self._call("put", f"{key}-{number}", value[start : start + PART_BYTES])
            value = _IN_PARTS + str(len(parts)).encode()
        return bool(self._call("put", key, value)[0]["is_new"])

    def drop_old(self, key: str, process: int) -> None:
        """As `KvClient.drop_old`; the store does it by itself."""

    def get(self, key: str, timeout: float) -> bytes | None:
        """As `KvClient.get`."""
        reply = self._controller.call_kv("get", key, timeout=timeout)
        return None if reply is None else self._whole(key, reply[1])

    def try_get(self, key: str) -> bytes | None:
        """As `KvClient.try_get`."""
        message, value = self._call("try_get", key)
        return self._whole(key, value) if message["exists"] else None

    def get_by_process(self, key: str) -> dict[int, bytes]:
        """As `KvClient.get_by_process`."""
        message, data = self._call("get_by_process", key)
        entries, start = {}, 0
        for name, size in message["sizes"].items():
            entries[int(name)] = data[start : start + size]
            start += size
        return entries

    def barrier(self, key: str, processes: Iterable[int], timeout: float) -> bool:
        """As `KvClient.barrier`."""
        members = sorted(processes)
        reply = self._controller.call_kv("barrier", key, timeout=timeout, processes=members)
        return reply is not None

    def _whole(self, key: str, value: bytes) -> bytes:
        if not value.startswith(_IN_PARTS):
            return value
        count = int(value.removeprefix(_IN_PARTS))
        return b"".join(self._call("get", f"{key}-{number}")[1] for number in range(count))

    def _call(self, operation: str, key: str, value: bytes = b"") -> tuple[dict[str, Any], bytes]:
        reply = self._controller.call_kv(operation, key, value, timeout=REPLY_TIMEOUT)
        if reply is None:
            raise TimeoutError(f"the controller did not reply within {REPLY_TIMEOUT:g} s")
        return reply


class ElasticShutdown(Shutdown):
    """How a worker exits alone: it tells the controller why, and the others continue."""

    def __init__(self, process: int, log: Callable[[str], None]) -> None:
        super().__init__(None, process, 1, log=log, disconnect=jax.distributed.shutdown)
        self.controller: ControllerClient | None = None  # set once it is connected

    def leave(self) -> None:
        """Wait until all workers are done, then disconnect."""
        assert self.controller is not None
        self.controller.leave(LEAVE_TIMEOUT)
        self._stop_watching()
        run_with_timeout(DISCONNECT_TIMEOUT, self._disconnect)

    def fail(self, error: BaseException) -> NoReturn:
        """As `Shutdown.fail`; exits with status 1 for errors that a restart may cure."""
        if isinstance(error, ClusterError):
            self._claim_exit()
            self._log(str(error))
            self._lead(str(error), 1)
        super().fail(error)

    def end(self, reason: str) -> NoReturn:
        """Exit because the controller ends all workers; called from any thread."""
        self._claim_exit()
        run_with_timeout(RESTART_GRACE_SECONDS, self._run_callbacks)
        self._flush()
        os._exit(RESTART_STATUS)

    def _read_abort(self) -> Any:
        return None

    def _exit(self, status: int, abort: Any) -> NoReturn:
        try:
            if self.controller is not None:
                self.controller.report_exit(abort["reason"])
            run_with_timeout(GRACE_SECONDS, self._run_callbacks)
            self._flush()
        finally:
            os._exit(status)


def _join_controller(
    coordinator_address: str, num_processes: int, process: int, timeout: float, name: str
) -> ElasticGroup:
    address, secret = os.environ[CONTROLLER_ADDRESS], os.environ["FTMESH_SECRET"]
    host, generation = (int(os.environ[key]) for key in ("FTMESH_HOST", "FTMESH_EPOCH"))
    _write_stacks_on_signal(Path(os.environ["FTMESH_RUN_DIR"]), f"{generation}-{host}")
    shutdown = ElasticShutdown(process, process_logger(name, process))
    controller = shutdown.controller = ControllerClient.connect(
        address, secret, process, generation, num_processes, timeout=timeout, on_end=shutdown.end
    )
    shutdown.start()
    jax.config.update("jax_enable_preemption_service", False)  # it handles SIGTERM itself
    own_address = os.environ.get("FTMESH_ADDRESS") or split_address(coordinator_address)[0]
    _compat.bind_cpu_collectives(own_address)
    try:
        _compat.join_coordination_service(coordinator_address, num_processes, process, timeout)
        jax.devices()
    except RuntimeError as error:
        shutdown.fail(ClusterError(f"JAX cannot join the processes: {error}"))
    members, kv = tuple(range(num_processes)), ControllerKvClient(controller)
    return ElasticGroup(
        process, num_processes, timeout, members, kv=kv, shutdown=shutdown, controller=controller
    )


def _write_stacks_on_signal(folder: Path, name: str) -> None:
    """Have SIGUSR1 write the stacks of all threads to a file; to stderr if it cannot be opened."""
    try:
        file = (folder / f"stacks-{name}.txt").open("w")
    except OSError:
        file = sys.stderr  # type: ignore[assignment]
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=False)
