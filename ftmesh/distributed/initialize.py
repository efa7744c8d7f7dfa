"""Joining: this process becomes one of several, as it is told or as JAX finds out.

    with join("10.0.0.1:8476", num_processes=4, process=2) as cluster:
        ...

Nothing need be given on Cloud TPU, Slurm and GKE, where JAX knows, nor under ``ftmesh launch``,
which sets ``FTMESH_COORDINATOR``, ``FTMESH_NUM_PROCESSES`` and ``FTMESH_PROCESS_ID``. Where nothing
is given and nothing known, the process is alone.

Roll call: before anything is started, every process says that it is there.

Process 0 listens at the coordinator's address, where JAX's coordination service will be in a
moment. That one names nobody when a process stays away, and ends all the others with a stack trace;
here each of them learns who is missing, or that two processes have one number.
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
from functools import partial
from pathlib import Path
from typing import Any

import jax

from ftmesh import command_line
from ftmesh.distributed.kv_client import Board
from ftmesh.distributed.process_group import LIMIT, Cluster
from ftmesh.distributed.shutdown import Ending
from ftmesh.distributed.wording import in_seconds, processes
from ftmesh.elastic.controller_client import Line
from ftmesh.elastic.controller_kv import LineBoard, OwnEnding, write_stacks_to
from ftmesh.errors import ArgumentError, ClusterError
from ftmesh.execute import _compat

LONGEST = 1e6  # seconds of a limit
HEARTBEAT = 100  # seconds without a sign of life after which JAX takes a process for dead


def join(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process: int | None = None,
    *,
    limit: float = LIMIT,
    name: str = "ftmesh",
) -> Cluster:
    """Join the other processes, before JAX is used for anything else.

    `coordinator` is the address ``HOST:PORT`` of process 0. To join and to agree takes `limit`
    seconds at most, unless told otherwise. Lines on stderr begin with `name`. Processes that have
    called ``jax.distributed.initialize`` already are taken as they are.
    """
    if not 0 < limit <= LONGEST:
        raise ArgumentError(f"a limit of {limit} seconds: give more than 0, up to {LONGEST:g}")
    if _compat.coordination_client() is not None:
        return _joined(*_compat.known_processes(), limit, name)
    steward = os.environ.get("FTMESH_STEWARD")
    coordinator, num_processes, process = _found(coordinator, num_processes, process, limit)
    if steward and coordinator is not None and num_processes is not None and process is not None:
        return _joined_on_line(steward, coordinator, num_processes, process, limit, name)
    if coordinator is None or num_processes is None or process is None or num_processes == 1:
        return Cluster(limit=limit)
    _check(coordinator, num_processes, process)
    if _compat.has_devices():
        raise ClusterError("JAX has been used before join, and cannot join others any more")
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM for itself
    host, port = split_address(coordinator)
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", f"[::]:{port}")
    if _is_loopback(host):
        bind = f"{host}:{port}" if ":" not in host else f"[{host}]:{port}"
        _compat.cpu_collectives_at(host)
    call_roll(coordinator, process, num_processes, bind=bind, limit=limit)
    with _at_most(limit, partial(_say, name, process)):
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process,
            coordinator_bind_address=bind,
            initialization_timeout=max(1, round(limit)) + 5,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=max(1, round(limit)),
        )
        jax.devices()  # every process learns of all devices, and waits for all processes
    return _joined(process, num_processes, limit, name)


def _joined_on_line(
    steward: str, coordinator: str, num_processes: int, process: int, limit: float, name: str
) -> Cluster:
    """The cluster of a process that a steward knows, and that others may outlive."""
    host, start = (int(os.environ[name]) for name in ("FTMESH_HOST", "FTMESH_EPOCH"))
    write_stacks_to(Path(os.environ["FTMESH_RUN_DIR"]), f"{start}-{host}")
    say = partial(_say, name, process)
    ending = OwnEnding(process, say=say, shutdown=jax.distributed.shutdown)
    line = Line.to(
        steward,
        os.environ["FTMESH_SECRET"],
        process,
        start,
        num_processes,
        limit=limit,
        end=ending.over,
    )
    ending.on(line).start()
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM for itself
    _compat.cpu_collectives_at(split_address(coordinator)[0])
    try:
        _compat.join_service(coordinator, num_processes, process, limit)
        jax.devices()
    except RuntimeError as error:
        ending.fail(ClusterError(f"JAX cannot join the processes: {error}"))
    everyone = tuple(range(num_processes))
    board = LineBoard(line)
    return Cluster(process, num_processes, limit, everyone, 0, None, board, ending, line)


def _joined(process: int, num_processes: int, limit: float, name: str) -> Cluster:
    """The cluster of a process that has joined the others."""
    board, say = Board(_compat.coordination_client()), partial(_say, name, process)
    ending = Ending(board, process, num_processes, say=say, shutdown=jax.distributed.shutdown)
    everyone = tuple(range(num_processes))
    return Cluster(process, num_processes, limit, everyone, 0, None, board, ending.start())


def _say(name: str, process: int, line: str) -> None:
    command_line.say(f"{name}: process {process}: {line}")


def _found(
    coordinator: str | None, num_processes: int | None, process: int | None, limit: float
) -> tuple[str | None, int | None, int | None]:
    """What is given, or set in the environment, or known to JAX of the place it runs in."""
    given = {
        "coordinator": coordinator or os.environ.get("FTMESH_COORDINATOR"),
        "number of processes": _number(num_processes, "FTMESH_NUM_PROCESSES"),
        "number of this process": _number(process, "FTMESH_PROCESS_ID"),
    }
    missing = [what for what, value in given.items() if value is None]
    if len(missing) == len(given):
        return _compat.found_processes(limit)
    if missing:
        raise ArgumentError(
            f"the {missing[0]} is not given: to join other processes give coordinator, number of "
            "processes and number of this process, or none of them"
        )
    found, number, own = given.values()
    return str(found), int(number or 0), int(own or 0)


def _number(given: int | None, variable: str) -> int | None:
    if given is not None:
        return given
    text = os.environ.get(variable)
    if text is None:
        return None
    try:
        return command_line.whole_number(0)(text)
    except ArgumentTypeError:
        raise ArgumentError(f"{variable} is {text!r:.40}, and not a number") from None


def _check(coordinator: str, num_processes: int, process: int) -> None:
    split_address(coordinator)
    if not 0 <= process < num_processes:
        raise ArgumentError(
            f"process {process} of {num_processes}: processes are numbered from 0 to "
            f"{num_processes - 1}"
        )


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


@contextlib.contextmanager
def _at_most(limit: float, say: Callable[[str], None]) -> Iterator[None]:
    """End this process where what is inside takes longer: JAX would, with a stack trace."""

    def end() -> None:
        say(f"not all processes joined within {in_seconds(limit)} of the roll call")
        os._exit(2)

    timer = threading.Timer(limit, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as error:
        raise ClusterError(f"JAX cannot join the processes: {error}") from error
    finally:
        timer.cancel()


_LONGEST = 4096  # bytes of a line; more is not one of ours
_PATIENCE = 2.0  # seconds for one who has come to say its number
_AGAIN = 0.1  # seconds between two tries to reach process 0


def call_roll(address: str, process: int, num_processes: int, *, bind: str, limit: float) -> None:
    """Return when all processes are there; an error in each of them where they are not."""
    deadline = time.monotonic() + limit
    if process == 0:
        wrong = _listen(bind, num_processes, deadline, limit)
    else:
        wrong = _answer(address, process, num_processes, deadline, limit)
    if wrong is not None:
        raise ClusterError(wrong)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of an address as ``10.0.0.1:8476`` or ``[::1]:8476``.

    >>> split_address("[::]:80")
    ('::', 80)
    """
    host, _, port = address.rpartition(":")
    is_host = bool(host) and (":" not in host or (host[0], host[-1]) == ("[", "]"))
    is_port = re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65536
    if not is_host or not is_port:
        raise ArgumentError(f"{address!r:.60} is no address of a coordinator: give HOST:PORT")
    return host.strip("[]"), int(port)


# Process 0 ------------------------------------------------------------------------------------


def _listen(bind: str, num_processes: int, deadline: float, limit: float) -> str | None:
    """What is wrong, told to all who came."""
    here: set[int] = set()
    wrong = None
    with _server(bind) as server, contextlib.ExitStack() as open_ones:
        came: list[socket.socket] = []
        while wrong is None and len(here) < num_processes - 1:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection = open_ones.enter_context(server.accept()[0])
            except TimeoutError:
                missing = set(range(1, num_processes)) - here
                wrong = f"{processes(missing)} did not come within {in_seconds(limit)}"
                break
            hello = _heard(connection)
            if hello is None:
                connection.close()  # one of us that was slow comes again
                continue
            came.append(connection)
            wrong = _enter(here, *hello, num_processes)
        answer = json.dumps({"wrong": wrong}).encode() + b"\n"
        for connection in came:
            with contextlib.suppress(OSError):  # it is gone, and the next wait will tell
                connection.sendall(answer)
    return wrong


def _server(bind: str) -> socket.socket:
    host, port = split_address(bind)
    both = host == "::" and socket.has_dualstack_ipv6()
    if host == "::" and not both:
        host = ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise ClusterError(
            f"process 0 cannot listen at {bind}: {error.strerror}; give another port"
        ) from error


def _heard(connection: socket.socket) -> tuple[int, int] | None:
    """The number of one who has come, and of how many it was told; None of a stranger."""
    connection.settimeout(_PATIENCE)
    hello = _line(connection)
    found = hello.get("process"), hello.get("num_processes")
    return found if all(type(number) is int for number in found) else None  # type: ignore[return-value]


def _enter(here: set[int], process: int, number: int, num_processes: int) -> str | None:
    """Note who has come; what is wrong about it, if anything is."""
    if number != num_processes:
        return (
            f"process {process} was told of {number} processes, and process 0 of {num_processes}: "
            "give all of them the same number"
        )
    if process in here or process == 0:
        return f"two processes have the number {process}: give each its own, from 0 on"
    here.add(process)
    return None


# The others -----------------------------------------------------------------------------------


def _answer(
    address: str, process: int, num_processes: int, deadline: float, limit: float
) -> str | None:
    """What process 0 says is wrong, or that it is not there."""
    hello = json.dumps({"process": process, "num_processes": num_processes}).encode() + b"\n"
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError, UnicodeError):
            with socket.create_connection(split_address(address), timeout=left) as connection:
                connection.sendall(hello)
                connection.settimeout(left + 2 * _PATIENCE)  # process 0 knows who is missing
                answer = _line(connection)
            if "wrong" in answer:
                return None if answer["wrong"] is None else str(answer["wrong"])
        time.sleep(_AGAIN)  # process 0 is not there yet, or someone else is
    return (
        f"nobody answered at {address} within {in_seconds(limit)}, where process 0 should be: see "
        "whether it runs, and whether the address is right"
    )


def _line(connection: socket.socket) -> dict[str, Any]:
    """What the other side says; nothing where that is not one of ours."""
    try:
        with connection.makefile("rb") as file:
            found = json.loads(file.readline(_LONGEST))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
