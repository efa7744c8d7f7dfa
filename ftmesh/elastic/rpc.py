"""Messages between two processes of a run, over TCP.

A frame is a JSON object and some bytes, each with its length; nothing received can run code. Before
the first frame both ends prove that they know the secret of the run.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from ftmesh.distributed.handshake import Acceptor, call
from ftmesh.errors import ArgumentError, ClusterError

LOOPBACK = "127.0.0.1"
PORTS = range(20_000, 30_000)  # below those that systems give to outgoing connections
MAX_HEADER_BYTES = 1 << 20  # the JSON of a frame
MAX_DATA_BYTES = 1 << 24
STALL_SECONDS = 30.0  # without progress in the middle of a frame
BACKLOG = 1024  # connections that the system queues

_LENGTHS = struct.Struct(">IQ")  # of the JSON, of the data


class ChannelClosed(ClusterError, ConnectionError):  # noqa: N818
    """The other end is gone, or violates the protocol."""


class Channel:
    """A connection after the handshake. Any thread may send and close; one thread receives.

    It breaks after `stall` seconds without progress in the middle of a frame.
    """

    def __init__(
        self,
        connection: socket.socket,
        max_data: int = MAX_DATA_BYTES,
        stall: float = STALL_SECONDS,
    ) -> None:
        self.peer = "{}:{}".format(*connection.getpeername()[:2])
        self._socket, self._max_data = connection, max_data
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        connection.settimeout(stall)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def own_host(self) -> str:
        """The address of this end, by which the other end reaches this host."""
        return str(self._socket.getsockname()[0])

    def send(self, message: dict[str, Any], data: bytes | memoryview = b"") -> None:
        """Send a frame."""
        header, body = json.dumps(message).encode(), memoryview(data).cast("B")
        if len(header) > MAX_HEADER_BYTES or len(body) > self._max_data:
            raise ArgumentError(
                f"a message of {len(header)} bytes with {len(body)} bytes of data is too long for "
                f"{self.peer}: at most {MAX_HEADER_BYTES} with {self._max_data}"
            )
        first = memoryview(_LENGTHS.pack(len(header), len(body)) + header)
        with self._sending:
            try:
                sent = self._socket.sendmsg([first, body])
                for part in (first[sent:], body[max(sent - len(first), 0) :]):
                    while part:
                        part = part[self._socket.send(part) :]
            except OSError as error:
                raise self._broken(f"cannot be sent to: {error}") from error

    def receive(self, timeout: float | None = None) -> tuple[dict[str, Any], bytes] | None:
        """Return the next frame; None if none begins within `timeout` seconds."""
        with self._receiving:
            try:
                if not self._is_readable(timeout):
                    return None
                header_size, data_size = _LENGTHS.unpack(self._read(_LENGTHS.size))
                if header_size > MAX_HEADER_BYTES or data_size > self._max_data:
                    raise ValueError(f"{header_size} and {data_size} bytes are too many")
                message = json.loads(self._read(header_size))
                if not isinstance(message, dict):
                    raise ValueError("not a JSON object")
                return message, self._read(data_size)
            except OSError as error:
                raise self._broken(f"is gone: {error}") from error
            except (ValueError, RecursionError) as error:
                raise self._broken(f"has sent an invalid frame: {error}") from error

    def close(self) -> None:
        """Close both directions; waiting threads get an error."""
        _shut(self._socket)
        with self._sending, self._receiving:  # nobody uses its descriptor any more
            self._socket.close()

    def _is_readable(self, timeout: float | None) -> bool:
        if self._socket.fileno() < 0:
            raise OSError("this end was closed")
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if timeout is None else math.ceil(max(timeout, 0) * 1000)))

    def _read(self, size: int) -> bytes:
        """Read into a buffer that `getvalue` returns without a copy."""
        if not size:
            return b""
        buffer = io.BytesIO()
        buffer.seek(size - 1)
        buffer.write(b"\0")
        with buffer.getbuffer() as view:
            filled = 0
            while filled < size:
                count = self._socket.recv_into(view[filled:])
                if not count:
                    raise OSError("the connection was closed")
                filled += count
        return buffer.getvalue()

    def _broken(self, what: str) -> ChannelClosed:
        """Shut the connection, which may be in the middle of a frame."""
        _shut(self._socket)
        return ChannelClosed(f"{self.peer} {what}")


def connect(
    address: str,
    secret: str,
    *,
    timeout: float,
    max_data: int = MAX_DATA_BYTES,
    stall: float = STALL_SECONDS,
) -> Channel:
    """Connect to the listener at ``host:port``; raise ChannelClosed unless it knows the secret."""
    host, colon, port = address.rpartition(":")
    if not colon or not re.fullmatch("[0-9]{1,5}", port) or not secret:
        raise ArgumentError(f"give host:port and a secret to connect, not {address!r:.60}")
    deadline = time.monotonic() + timeout
    try:
        connection = socket.create_connection((host, int(port)), timeout)
    except (OSError, OverflowError) as error:
        raise ChannelClosed(f"nothing answers at {address}: {error}") from error
    try:
        call(connection, secret, seconds=deadline - time.monotonic())
        return Channel(connection, max_data=max_data, stall=stall)
    except OSError as error:
        connection.close()
        raise ChannelClosed(
            f"{address} is not a listener that knows the secret of this run: {error}"
        ) from error


class Listener:
    """Accepts connections from processes that know the secret.

    `on_channel` is called with each channel, in a thread of its own, and closes the channel.
    `on_stranger` is called with the address of each rejected caller, and the reason.
    """

    def __init__(
        self,
        on_channel: Callable[[Channel], None],
        *,
        secret: str,
        host: str = LOOPBACK,
        port: int = 0,
        max_data: int = MAX_DATA_BYTES,
        on_stranger: Callable[[str, str], None] = lambda peer, reason: None,
    ) -> None:
        if not secret:
            raise ArgumentError("a listener without a secret would admit anyone: give one")
        self._on_channel, self._max_data = on_channel, max_data
        server = _listening_socket(host, port)
        self.address = "{}:{}".format(*server.getsockname()[:2])
        self._acceptor = Acceptor(server, secret, self._open_channel, on_stranger)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Accept no more connections; channels that were handed over stay open."""
        self._acceptor.close()

    def _open_channel(self, connection: socket.socket) -> None:
        try:
            channel = Channel(connection, max_data=self._max_data)
        except OSError:  # it has gone meanwhile
            connection.close()
        else:
            self._on_channel(channel)


def free_port(host: str = LOOPBACK) -> int:
    """Return a free port outside the range of outgoing connections."""
    for _ in range(1000):
        port = PORTS[secrets.randbelow(len(PORTS))]
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise ArgumentError(f"no port from {PORTS[0]} to {PORTS[-1]} is free at {host}")


def _listening_socket(host: str, port: int) -> socket.socket:
    """Listen, by default on a port outside the range of outgoing connections.

    Otherwise a caller of a listener that is gone could be connected to itself or another program.
    """
    for _ in range(100):
        try:
            return socket.create_server((host, port or free_port(host)), backlog=BACKLOG)
        except OSError:  # another process took the port
            if port:
                raise
    raise ArgumentError(f"cannot listen at {host}: give another host")


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
