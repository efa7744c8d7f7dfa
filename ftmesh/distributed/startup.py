"""Startup: this process joins the others of its run.

    with initialize("10.0.0.1:8476", num_processes=4, process_id=2) as group:
        ...

No arguments are needed under an engine that says which process this is (`cluster_env`), nor under
``ftmesh launch``, which sets ``FTMESH_COORDINATOR``, ``FTMESH_NUM_PROCESSES`` and
``FTMESH_PROCESS_ID``. Without any of these the process runs alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator

import jax

from ftmesh import command_line
from ftmesh.distributed.cluster_env import detect
from ftmesh.distributed.handshake import MAKE_SECRET, find_secret
from ftmesh.distributed.kv_store import KvClient
from ftmesh.distributed.peer_monitor import SILENCE_SECONDS, PeerMonitor, forward_to_service
from ftmesh.distributed.process_group import TIMEOUT, ProcessGroup
from ftmesh.distributed.roll_call import call_roll, is_loopback, join_address
from ftmesh.distributed.roll_call import split_address as split_address
from ftmesh.distributed.shutdown import Shutdown
from ftmesh.errors import PEER_LOST, ArgumentError, ClusterError
from ftmesh.execute import _compat

CONTROLLER_ADDRESS = "FTMESH_STEWARD"  # environment variable; set by `ftmesh launch --failures`
MAX_TIMEOUT = 1e6  # seconds
_HEARTBEAT_SECONDS = 100  # of silence after which JAX takes a process for dead


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = TIMEOUT,
    name: str = "ftmesh",
) -> ProcessGroup:
    """Join the other processes. Call it before JAX is used for anything else.

    If ``jax.distributed`` is already initialized, its processes are used.

    Args:
        coordinator_address: ``HOST:PORT`` of process 0.
        num_processes: Number of processes.
        process_id: Index of this process.
        timeout: Seconds for all processes to join, and default timeout of the group's waits.
        name: Prefix of lines on stderr.

    Returns:
        The group. Use it in a ``with`` block: an error in one process ends all, with its reason.

    Raises:
        ArgumentError: Some but not all of the first three are known, or one is out of range.
        ClusterError: Not all processes joined, or JAX is already in use.
    """
    check_timeout(timeout)
    if _compat.coordination_client() is not None:
        process, number = _compat.process_id_and_count()
        return _joined_group(process, number, timeout, process_logger(name, process))
    address, count, index = find_processes(coordinator_address, num_processes, process_id, timeout)
    if os.environ.get(CONTROLLER_ADDRESS) and address is not None:
        raise ClusterError(
            "this process was started by `ftmesh launch --failures`: call "
            "ftmesh.elastic.initialize() instead of ftmesh.distributed.initialize()"
        )
    if address is None or count is None or index is None or count == 1:
        return ProcessGroup(timeout=timeout)
    split_address(address)
    if not 0 <= index < count:
        raise ArgumentError(f"process {index} of {count}: indices go from 0 to {count - 1}")
    if _compat.backends_are_initialized():
        raise ClusterError("JAX was used before initialize, and cannot join other processes now")
    return _join(address, count, index, timeout, process_logger(name, index))


def _join(
    address: str, number: int, process: int, timeout: float, log: Callable[[str], None]
) -> ProcessGroup:
    """Call the roll, then start JAX's service and client at addresses that the roll call used."""
    secret, silence = find_secret(os.environ), _silence_seconds()
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    roll = call_roll(address, process, number, timeout=timeout, secret=secret, bind=bind, log=log)
    if process == 0 and not secret and not is_loopback(roll.host):
        log(f"without a secret, anyone on the network can join: make one by {MAKE_SECRET}")

    def exit_process(_: frozenset[int], line: str) -> None:
        log(line)
        os._exit(PEER_LOST)

    peers = PeerMonitor(process, roll.connections, exit_process, silence=silence).start()
    service = roll.coordinator
    if process != 0:
        service = forward_to_service(split_address(service))
    jax.config.update("jax_enable_preemption_service", False)  # it handles SIGTERM itself
    _compat.bind_cpu_collectives(roll.host)
    with _exit_after(timeout, log):
        jax.distributed.initialize(
            service,
            number,
            process,
            coordinator_bind_address=roll.bind,
            initialization_timeout=max(1, round(timeout)) + 5,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=max(1, round(timeout)),
        )
        jax.devices()  # exchanges the devices of all processes
    return _joined_group(process, number, timeout, log, peers)


def _joined_group(
    process: int,
    num_processes: int,
    timeout: float,
    log: Callable[[str], None],
    peers: PeerMonitor | None = None,
) -> ProcessGroup:
    kv, disconnect = KvClient(_compat.coordination_client()), jax.distributed.shutdown
    shutdown = Shutdown(kv, process, num_processes, log=log, disconnect=disconnect, peers=peers)
    members = tuple(range(num_processes))
    return ProcessGroup(process, num_processes, timeout, members, kv=kv, shutdown=shutdown.start())


def check_timeout(timeout: float) -> None:
    """Raise ArgumentError for a timeout that is not a sensible number of seconds."""
    if not 0 < timeout <= MAX_TIMEOUT:
        raise ArgumentError(f"a timeout of {timeout} s: give more than 0, up to {MAX_TIMEOUT:g}")


def process_logger(name: str, process: int) -> Callable[[str], None]:
    """Return a function that prints lines of a process to stderr."""
    return lambda line: command_line.say(f"{name}: process {process}: {line}")


def find_processes(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    timeout: float,
) -> tuple[str | None, int | None, int | None]:
    """Return the given values, else those of variables, engines or JAX; three None if alone.

    Raises:
        ArgumentError: There are several processes, and not all of the three are known, or a
            variable is not a number.
    """
    given = (
        coordinator_address or os.environ.get("FTMESH_COORDINATOR"),
        _integer(num_processes, "FTMESH_NUM_PROCESSES"),
        _integer(process_id, "FTMESH_PROCESS_ID"),
    )
    if None not in given:
        return given
    address, number, process = given
    nothing = None, None, None
    if number == 1:
        return nothing
    if given == nothing and _is_known_to_jax():
        found = _compat.detect_processes(timeout)
        if None not in found:
            return found
    placement = detect(os.environ)
    if placement is None:
        if given == nothing:
            return nothing
        names = ("coordinator address", "number of processes", "index of this process")
        raise ArgumentError(
            f"the {names[given.index(None)]} is not given, and no engine has set it: give "
            "coordinator address, number of processes and index of this process, or none of them"
        )
    if number is None and placement.count == 1:
        return nothing
    if address is None and placement.first_host is None:
        raise ArgumentError(
            f"{placement.engine} has started process {placement.index} of {placement.count}, and "
            "does not say where process 0 runs: set FTMESH_COORDINATOR to its HOST:PORT in all"
        )
    return (
        address or join_address(str(placement.first_host), placement.port),
        placement.count if number is None else number,
        placement.index if process is None else process,
    )


def _is_known_to_jax() -> bool:
    """True where JAX asks services that know more than variables: of Cloud TPU, of Kubernetes."""
    try:
        placement = detect(os.environ)
    except ArgumentError:
        is_pod = "JOB_COMPLETION_INDEX" in os.environ and "JOBSET_NAME" not in os.environ
        return is_pod and importlib.util.find_spec("kubernetes") is not None
    if placement is None:
        return "KUBERNETES_SERVICE_HOST" not in os.environ
    return placement.engine == "Cloud TPU"


def _silence_seconds() -> float:
    text = os.environ.get("FTMESH_HEARTBEAT_TIMEOUT", str(SILENCE_SECONDS))
    try:
        return command_line.number(2, MAX_TIMEOUT)(text)
    except ArgumentTypeError as error:
        raise ArgumentError(f"FTMESH_HEARTBEAT_TIMEOUT: {error}") from None


def _integer(given: int | None, variable: str) -> int | None:
    if given is not None:
        return given
    text = os.environ.get(variable)
    if text is None:
        return None
    try:
        return command_line.whole_number(0)(text)
    except ArgumentTypeError:
        raise ArgumentError(f"{variable} is {text!r:.40}, not a number") from None


@contextlib.contextmanager
def _exit_after(timeout: float, log: Callable[[str], None]) -> Iterator[None]:
    """Exit if the block takes longer than `timeout`. JAX would, with a stack trace."""

    def exit_process() -> None:
        log(f"not all processes joined within {timeout:g} s of the roll call")
        os._exit(PEER_LOST)

    timer = threading.Timer(timeout, exit_process)
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as error:
        raise ClusterError(f"JAX cannot join the processes: {error}") from error
    finally:
        timer.cancel()
