"""Start: this process joins the others of its run.

    with initialize("10.0.0.1:8476", num_processes=4, process_id=2) as group:
        ...

No arguments are needed on Cloud TPU, Slurm and GKE, where JAX knows them, nor under ``ftmesh
launch``, which sets ``FTMESH_COORDINATOR``, ``FTMESH_NUM_PROCESSES`` and ``FTMESH_PROCESS_ID``.
Without any of these the process runs alone.

Before JAX's coordination service starts, all processes report to process 0 at the same address
(`call_roll`), and learn who is missing or that two have the same index. JAX's service would end
them with a stack trace, and not say who is missing.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import socket
import threading
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ftmesh import command_line
from ftmesh.distributed.kv_client import KvClient
from ftmesh.distributed.process_group import TIMEOUT, ProcessGroup, format_processes
from ftmesh.distributed.shutdown import Shutdown
from ftmesh.errors import ArgumentError, ClusterError
from ftmesh.execute import _compat

CONTROLLER_ADDRESS = "FTMESH_STEWARD"  # environment variable; set by `ftmesh launch --failures`
MAX_TIMEOUT = 1e6  # seconds
_HEARTBEAT_SECONDS = 100  # of silence after which JAX takes a process for dead
_MAX_LINE_BYTES = 4096  # of the roll call; a longer line is not one of ours
_HELLO_SECONDS = 2.0  # for a process that has connected to send its index
_RETRY_SECONDS = 0.1  # between two attempts to reach process 0


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = TIMEOUT,
    name: str = "ftmesh",
) -> ProcessGroup:
    """Join the other processes. Call it before JAX is used for anything else.

    Processes that have called ``jax.distributed.initialize`` are taken as they are.

    Args:
        coordinator_address: ``HOST:PORT`` of process 0.
        num_processes: How many processes there are.
        process_id: Index of this process.
        timeout: Seconds for all processes to join, and default timeout of the group's waits.
        name: Prefix of lines on stderr.

    Returns:
        The group. Use it in a ``with`` block: an error in one process ends all, with its reason.

    Raises:
        ArgumentError: Some but not all of the three are known, or one is out of range.
        ClusterError: Not all processes joined, or JAX is already in use.
    """
    check_timeout(timeout)
    if _compat.coordination_client() is not None:
        return _joined_group(*_compat.process_id_and_count(), timeout, name)
    address, number, process = find_processes(
        coordinator_address, num_processes, process_id, timeout
    )
    if os.environ.get(CONTROLLER_ADDRESS) and address is not None:
        raise ClusterError(
            "this process was started by `ftmesh launch --failures`: call "
            "ftmesh.elastic.initialize() instead of ftmesh.distributed.initialize()"
        )
    if address is None or number is None or process is None or number == 1:
        return ProcessGroup(timeout=timeout)
    host, port = split_address(address)
    if not 0 <= process < number:
        raise ArgumentError(f"process {process} of {number}: indices go from 0 to {number - 1}")
    if _compat.backends_are_initialized():
        raise ClusterError("JAX was used before initialize, and cannot join other processes now")
    jax.config.update("jax_enable_preemption_service", False)  # it handles SIGTERM itself
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", f"[::]:{port}")
    if _is_loopback(host):
        bind = f"{host}:{port}" if ":" not in host else f"[{host}]:{port}"
        _compat.bind_cpu_collectives(host)
    call_roll(address, process, number, bind=bind, timeout=timeout)
    with _exit_after(timeout, process_logger(name, process)):
        jax.distributed.initialize(
            address,
            number,
            process,
            coordinator_bind_address=bind,
            initialization_timeout=max(1, round(timeout)) + 5,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=max(1, round(timeout)),
        )
        jax.devices()  # exchanges the devices of all processes
    return _joined_group(process, number, timeout, name)


def _joined_group(process: int, num_processes: int, timeout: float, name: str) -> ProcessGroup:
    kv, log = KvClient(_compat.coordination_client()), process_logger(name, process)
    disconnect = jax.distributed.shutdown
    shutdown = Shutdown(kv, process, num_processes, log=log, disconnect=disconnect)
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
    """Return what is given, set in the environment, or known to JAX; (None, None, None) if alone.

    Raises:
        ArgumentError: Only some of the three are known, or a variable is not a number.
    """
    known = {
        "coordinator address": coordinator_address or os.environ.get("FTMESH_COORDINATOR"),
        "number of processes": _integer(num_processes, "FTMESH_NUM_PROCESSES"),
        "index of this process": _integer(process_id, "FTMESH_PROCESS_ID"),
    }
    missing = [what for what, value in known.items() if value is None]
    if len(missing) == len(known):
        return _compat.detect_processes(timeout)
    if missing:
        raise ArgumentError(
            f"the {missing[0]} is not given: give coordinator address, number of processes and "
            "index of this process, or none of them"
        )
    address, number, process = known.values()
    return str(address), int(number or 0), int(process or 0)


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


def split_address(address: str) -> tuple[str, int]:
    """Split an address such as ``10.0.0.1:8476`` or ``[::1]:8476`` into host and port."""
    host, _, port = address.rpartition(":")
    is_host = bool(host) and (":" not in host or (host[0], host[-1]) == ("[", "]"))
    is_port = re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65536
    if not is_host or not is_port:
        raise ArgumentError(f"{address!r:.60} is not a coordinator address: give HOST:PORT")
    return host.strip("[]"), int(port)


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


@contextlib.contextmanager
def _exit_after(timeout: float, log: Callable[[str], None]) -> Iterator[None]:
    """Exit if the block takes longer than `timeout`. JAX would, with a stack trace."""

    def exit_process() -> None:
        log(f"not all processes joined within {timeout:g} s of the roll call")
        os._exit(2)

    timer = threading.Timer(timeout, exit_process)
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as error:
        raise ClusterError(f"JAX cannot join the processes: {error}") from error
    finally:
        timer.cancel()


# Roll call --------------------------------------------------------------------------------------


def call_roll(address: str, process: int, num_processes: int, *, bind: str, timeout: float) -> None:
    """Return once all processes have reached process 0 at `address`; it listens at `bind`.

    Raises:
        ClusterError: In every process, if one is missing or two have the same index.
    """
    deadline = time.monotonic() + timeout
    if process == 0:
        problem = _collect_reports(bind, num_processes, deadline, timeout)
    else:
        problem = _report(address, process, num_processes, deadline, timeout)
    if problem is not None:
        raise ClusterError(problem)


def _collect_reports(bind: str, num_processes: int, deadline: float, timeout: float) -> str | None:
    """In process 0: wait for all others, and send each of them the result."""
    arrived: set[int] = set()
    problem = None
    with _server(bind) as server, contextlib.ExitStack() as stack:
        connections: list[socket.socket] = []
        while problem is None and len(arrived) < num_processes - 1:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection = stack.enter_context(server.accept()[0])
            except TimeoutError:
                missing = set(range(1, num_processes)) - arrived
                problem = f"{format_processes(missing)} did not connect within {timeout:g} s"
                break
            connection.settimeout(_HELLO_SECONDS)
            hello = _read_line(connection)
            process, total = hello.get("process"), hello.get("num_processes")
            if type(process) is not int or type(total) is not int:
                connection.close()  # a stranger, or one of ours that was slow and tries again
                continue
            connections.append(connection)
            problem = _check_report(arrived, process, total, num_processes)
            arrived.add(process)
        answer = json.dumps({"problem": problem}).encode() + b"\n"
        for connection in connections:
            with contextlib.suppress(OSError):  # it is gone; the next wait reports it
                connection.sendall(answer)
    return problem


def _server(bind: str) -> socket.socket:
    host, port = split_address(bind)
    dual_stack = host == "::" and socket.has_dualstack_ipv6()
    if host == "::" and not dual_stack:
        host = ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=dual_stack)
    except OSError as error:
        problem = f"process 0 cannot listen at {bind}: {error.strerror}; give another port"
        raise ClusterError(problem) from error


def _check_report(arrived: set[int], process: int, total: int, num_processes: int) -> str | None:
    if total != num_processes:
        return (
            f"process {process} was given {total} processes and process 0 was given "
            f"{num_processes}: give all of them the same number"
        )
    if process in arrived or process == 0:
        return f"two processes have the index {process}: give each its own, from 0 on"
    return None


def _report(
    address: str, process: int, num_processes: int, deadline: float, timeout: float
) -> str | None:
    """In the others: report to process 0 and return the problem it sends, if any."""
    hello = json.dumps({"process": process, "num_processes": num_processes}).encode() + b"\n"
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError, UnicodeError):
            with socket.create_connection(split_address(address), timeout=left) as connection:
                connection.sendall(hello)
                connection.settimeout(left + 2 * _HELLO_SECONDS)  # process 0 knows who is missing
                answer = _read_line(connection)
            if "problem" in answer:
                return None if answer["problem"] is None else str(answer["problem"])
        time.sleep(_RETRY_SECONDS)  # process 0 is not there yet, or another program is
    return (
        f"no answer at {address} within {timeout:g} s, where process 0 should be: check that it "
        "runs and that the address is right"
    )


def _read_line(connection: socket.socket) -> dict[str, Any]:
    """Return the JSON object that the other side sends; empty if it sends something else."""
    try:
        with connection.makefile("rb") as file:
            message = json.loads(file.readline(_MAX_LINE_BYTES))
    except (OSError, ValueError):
        return {}
    return message if isinstance(message, dict) else {}
