"""Roll call: before JAX starts, all processes connect to process 0, or report who is missing.

JAX's coordination service would end them with a stack trace that does not name the missing process.
Each process also gets its own address on the network of the run: the one from which it reaches
process 0. The host's name may resolve to another address, or to loopback.

Process 0 listens only at the coordinator address. If its own host resolves that to loopback, as on
Debian, it listens on all interfaces until the others have connected, and then uses the address that
they used. Callers that do not know the secret are dropped.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import platform
import re
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ftmesh.distributed.handshake import (
    HANDSHAKE_SECONDS,
    MAX_HANDSHAKES,
    Acceptor,
    RejectedError,
    call,
)
from ftmesh.distributed.peer_monitor import format_processes
from ftmesh.errors import ArgumentError, ClusterError, PeerLostError

ANY_HOST = "::"
RESTART_SECONDS = 10.0  # for a process that ended before the last one came
_BACKLOG = 1024  # connections that the system queues
_MAX_LINE_BYTES = 4096  # a longer line is not one of ours
_MAX_NAMED_STRANGERS = 5
_MAX_REJECTIONS = 10  # in a row, of a process that has another secret
_RETRY_SECONDS = 0.1  # between two attempts to reach process 0


@dataclass(frozen=True)
class Attendance:
    """The result of the roll call in one process.

    Attributes:
        host: This host's own address on the network of the run.
        coordinator: ``HOST:PORT`` by which this process reaches process 0.
        bind: Where process 0 listens from now on.
        connections: To all others in process 0, to process 0 in the others, by process.
    """

    host: str
    coordinator: str
    bind: str
    connections: dict[int, socket.socket]


def call_roll(
    address: str,
    process: int,
    num_processes: int,
    *,
    timeout: float,
    secret: str = "",
    bind: str | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Attendance:
    """Return once all processes have connected to process 0 at `address`.

    Args:
        address: ``HOST:PORT`` of process 0.
        process: Index of this process.
        num_processes: Number of processes.
        timeout: Seconds to wait for all of them.
        secret: The secret of the run.
        bind: Where process 0 listens, if not at `address`.
        log: Called in process 0 with lines about rejected connections.

    Raises:
        ClusterError: In every process, if one is missing or two have the same index.
    """
    port = split_address(address)[1]
    if process == 0:
        return _Registrar(num_processes, log).gather(address, bind, port, secret, timeout)
    return _report(address, port, process, num_processes, secret, timeout)


class _Registrar:
    """Process 0, which registers the others."""

    def __init__(self, num_processes: int, log: Callable[[str], None]) -> None:
        self._num_processes, self._log = num_processes, log
        self._changed = threading.Condition()
        self._arrived: dict[int, tuple[str, socket.socket]] = {}  # its token, its connection
        self._rejected: list[socket.socket] = []
        self._problem: str | None = None
        self._strangers = 0

    def gather(
        self, address: str, bind: str | None, port: int, secret: str, timeout: float
    ) -> Attendance:
        server, at_once = _listen(address, bind), self._num_processes + MAX_HANDSHAKES
        _allow_open_files(2 * at_once)  # of the roll call, and of JAX's service
        begin = time.monotonic()
        with Acceptor(server, secret, self._register, self._drop, at_once), self._changed:
            self._changed.wait_for(
                lambda: self._problem or len(self._arrived) == self._num_processes - 1, timeout
            )
            # Engines start a process again that ended while others were missing.
            left = min(begin + timeout - time.monotonic(), RESTART_SECONDS)
            self._changed.wait_for(lambda: self._problem or not self._gone(), left)
            missing = set(range(1, self._num_processes)) - set(self._arrived)
            connections = {process: conn for process, (_, conn) in self._arrived.items()}
            problem = self._problem
        error: ClusterError | None = ClusterError(problem) if problem else None
        if missing and error is None:
            dropped = f" (dropped {self._strangers} unknown connections)" if self._strangers else ""
            error = PeerLostError(
                f"{format_processes(missing)} did not connect within {timeout:g} s{dropped}"
            )
        hosts = sorted({_host(conn.getsockname()) for conn in connections.values()})
        others = [host for host in hosts if not is_loopback(host)]
        host = (others or hosts or [""])[0]
        answer = {"problem": error and str(error), "status": error and error.status, "host": host}
        for connection in (*connections.values(), *self._rejected):
            with contextlib.suppress(OSError):  # it is gone; the next wait reports it
                connection.sendall(json.dumps(answer).encode() + b"\n")
            if error is not None:
                connection.close()
        if error is not None:
            raise error
        at = join_address(host if len(others) <= 1 else ANY_HOST, port)
        return Attendance(host, join_address(host, port), bind or at, connections)

    def _gone(self) -> list[int]:
        """Return the processes that have ended since they reported."""
        return [n for n, (_, connection) in self._arrived.items() if _is_closed(connection)]

    def _register(self, connection: socket.socket) -> None:
        hello = _read_line(connection, time.monotonic() + HANDSHAKE_SECONDS)
        process, total, token = (hello.get(key) for key in ("process", "num_processes", "token"))
        if type(process) is not int or type(total) is not int or type(token) is not str:
            self._drop(_host(connection.getpeername()), "it did not register")
            connection.close()
            return
        with self._changed:
            known = self._arrived.get(process)
            if known is not None and (known[0] == token or _is_closed(known[1])):
                known[1].close()  # the process has connected again, or was started again
            elif problem := self._check(process, total):
                self._problem = self._problem or problem
                self._rejected.append(connection)
                self._changed.notify()
                return
            self._arrived[process] = token, connection
            self._changed.notify()

    def _check(self, process: int, total: int) -> str | None:
        if total != self._num_processes:
            return (
                f"process {process} was given {total} processes and process 0 was given "
                f"{self._num_processes}: give all of them the same number"
            )
        if process in self._arrived or not 0 < process < total:
            return f"two processes have the index {process}: give each its own, from 0 on"
        return None

    def _drop(self, host: str, what: str) -> None:
        with self._changed:
            self._strangers += 1
            if self._strangers <= _MAX_NAMED_STRANGERS:
                self._log(f"dropped a connection from {host}: {what}")
            elif self._strangers == _MAX_NAMED_STRANGERS + 1:
                self._log("drops more such connections without logging them")


def _report(
    address: str, port: int, process: int, num_processes: int, secret: str, timeout: float
) -> Attendance:
    """Report to process 0 and stay connected."""
    hello = {"process": process, "num_processes": num_processes, "token": secrets.token_hex(8)}
    deadline, rejections = time.monotonic() + timeout, 0
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError, UnicodeError), contextlib.ExitStack() as stack:
            seconds = min(left, HANDSHAKE_SECONDS)
            connection = socket.create_connection(split_address(address), timeout=seconds)
            stack.callback(connection.close)
            try:
                call(connection, secret, seconds=seconds)
            except RejectedError:
                rejections += 1
                if rejections >= _MAX_REJECTIONS:
                    raise ClusterError(
                        f"process 0 at {address} rejects process {process}: give all of them the "
                        "same FTMESH_SECRET"
                    ) from None
                raise
            rejections = 0
            connection.sendall(json.dumps(hello).encode() + b"\n")
            # Process 0 knows who is missing, and may have started later.
            answer = _read_line(connection, time.monotonic() + timeout + HANDSHAKE_SECONDS)
            if answer.get("problem") is not None:
                is_lost = answer.get("status") == PeerLostError.status
                raise (PeerLostError if is_lost else ClusterError)(str(answer["problem"]))
            if "problem" in answer:
                own, peer = _host(connection.getsockname()), _host(connection.getpeername())
                told = str(answer.get("host"))
                if is_loopback(peer) and not is_loopback(told):  # at the host of process 0
                    own = peer = told
                stack.pop_all()
                at = join_address(peer, port)
                return Attendance(own, at, at, {0: connection})
        time.sleep(_RETRY_SECONDS)  # process 0 is not there yet, or another program is
    raise PeerLostError(
        f"no answer at {address} within {timeout:g} s, where process 0 should be: check that it "
        "runs, and that the address and FTMESH_SECRET are right"
    )


def _listen(address: str, bind: str | None) -> socket.socket:
    host, port = split_address(bind or address)
    hosts = [host]
    if bind is None:
        with contextlib.suppress(OSError, UnicodeError):
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            hosts = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        if not is_loopback(host):
            hosts = [each for each in hosts if _is_address(each) and not is_loopback(each)]
    for each in hosts or [ANY_HOST]:
        dual_stack = each == ANY_HOST and socket.has_dualstack_ipv6()
        name = "" if each == ANY_HOST and not dual_stack else each
        family = socket.AF_INET6 if ":" in name else socket.AF_INET
        try:
            return socket.create_server(
                (name, port), family=family, backlog=_BACKLOG, dualstack_ipv6=dual_stack
            )
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                problem = f"process 0 cannot listen at {bind or address}: {error.strerror}"
                raise ClusterError(f"{problem}; give another port") from error
    raise ClusterError(
        f"process 0 runs at {platform.node()}, which does not have the address {address}: give "
        f"all processes FTMESH_COORDINATOR={platform.node()}:{port}, or another name of this host"
    )


def _allow_open_files(number: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + 1024 if hard == resource.RLIM_INFINITY else min(number + 1024, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def split_address(address: str) -> tuple[str, int]:
    """Split an address such as ``10.0.0.1:8476`` or ``[::1]:8476`` into host and port."""
    host, _, port = address.rpartition(":")
    is_host = bool(host) and (":" not in host or (host[0], host[-1]) == ("[", "]"))
    is_port = re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65536
    if not is_host or not is_port:
        raise ArgumentError(f"{address!r:.60} is not a coordinator address: give HOST:PORT")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Return ``HOST:PORT``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """True for an address of this machine alone, and for ``localhost``."""
    if _is_address(host):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


def _host(name: Any) -> str:
    """Return the host of a socket's name; one of IPv4 in the notation of IPv4."""
    host = str(name[0]).partition("%")[0]
    mapped = getattr(ipaddress.ip_address(host), "ipv4_mapped", None)
    return str(mapped or host)


def _is_closed(connection: socket.socket) -> bool:
    """True if the other end is gone. It sends nothing before it has an answer."""
    seconds = connection.gettimeout()
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        connection.settimeout(seconds)


def _read_line(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """Return the JSON object that the other side sends; empty if it sends something else."""
    data = b""
    try:
        while not data.endswith(b"\n") and len(data) < _MAX_LINE_BYTES:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            part = connection.recv(_MAX_LINE_BYTES - len(data))
            if not part:
                return {}
            data += part
        message = json.loads(data)
    except (OSError, ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}
