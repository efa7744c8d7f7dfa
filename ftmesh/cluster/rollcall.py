"""Roll call: before anything is started, every process says that it is there.

Process 0 listens at the coordinator's address, where JAX's coordination service will be in a
moment. That one names nobody when a process stays away, and ends all the others with a stack trace;
here each of them learns who is missing, or that two processes have one number.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from typing import Any

from ftmesh.cluster.words import in_seconds, processes
from ftmesh.errors import ArgumentError, ClusterError

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
