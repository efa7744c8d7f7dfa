"""Channel: whole messages between two processes that know one secret, over TCP.

A frame is a JSON object and some bytes, each preceded by its length: nothing that is received can
run code. Both ends prove that they know the secret before the first frame (`handshake`); after that
the connection is trusted, as loopback may be.

Handshake: the two ends of a connection prove to each other that they know one secret.

    listener  "ftmesh/1", a nonce
    caller    "ftmesh/1", a nonce, HMAC(secret, "caller" and both nonces)
    listener  HMAC(secret, "listener" and both nonces)

The secret itself never travels, and what travels is of no use in another handshake. Of a stranger
no more than 72 bytes are read.
"""

from __future__ import annotations

import contextlib
import hmac
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

from ftmesh.elastic.pod_environment import LOOPBACK, free_port
from ftmesh.errors import ArgumentError, ClusterError

MOST_HEADER = 1 << 20  # bytes of the JSON of a frame
MOST_DATA = 1 << 24
STALL_SECONDS = 30.0
HANDSHAKE_SECONDS = 5.0
MOST_HANDSHAKES = 256  # at once; one more, and the oldest is dropped
BACKLOG = 1024  # connections that the system holds until they are taken
WAKE_SECONDS = 1.0  # for the connection that ends a listener
PAUSE_SECONDS = 0.05  # where the system has no more connections to give

_LENGTHS = struct.Struct(">IQ")  # of the JSON, of the data


class ChannelClosed(ClusterError, ConnectionError):  # noqa: N818
    """The other end is gone, or is not what it should be."""


class Channel:
    """One connection, past the handshake; `peer` is the address of the other end.

    Any thread may send and close; one receives. It breaks when the other end neither goes on with a
    frame nor takes more of one for `stall` seconds.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        most_data: int = MOST_DATA,
        stall: float = STALL_SECONDS,
    ) -> None:
        self.peer = "{}:{}".format(*connection.getpeername()[:2])
        self._socket, self._most_data = connection, most_data
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        connection.settimeout(stall)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def send(self, message: dict[str, Any], data: bytes | memoryview = b"") -> None:
        """Send a frame, whole."""
        header, body = json.dumps(message).encode(), memoryview(data).cast("B")
        if len(header) > MOST_HEADER or len(body) > self._most_data:
            raise ArgumentError(
                f"a message of {len(header)} bytes with {len(body)} bytes of data is too long: at "
                f"most {MOST_HEADER} with {self._most_data} are sent to {self.peer}"
            )
        first = memoryview(_LENGTHS.pack(len(header), len(body)) + header)
        with self._sending:
            try:
                sent = self._socket.sendmsg([first, body])
                for part in (first[sent:], body[max(sent - len(first), 0) :]):
                    while part:
                        part = part[self._socket.send(part) :]
            except OSError as error:
                raise self._broken(f"took no message: {error}") from error

    def receive(self, timeout: float | None = None) -> tuple[dict[str, Any], bytes] | None:
        """The next frame; None if none has begun when `timeout` seconds are up."""
        with self._receiving:
            try:
                if not self._has_begun(timeout):
                    return None
                length, size = _LENGTHS.unpack(self._read(_LENGTHS.size))
                if length > MOST_HEADER or size > self._most_data:
                    raise ValueError(f"{length} and {size} bytes are too many")
                message = json.loads(self._read(length))
                if not isinstance(message, dict):
                    raise ValueError("it is no JSON object")
                return message, self._read(size)
            except OSError as error:
                raise self._broken(f"is gone: {error}") from error
            except (ValueError, RecursionError) as error:
                raise self._broken(f"has sent what is no frame: {error}") from error

    def close(self) -> None:
        """Close both directions; whoever waits to send or receive is told."""
        _shut(self._socket)
        with self._sending, self._receiving:  # nobody uses its number any more
            self._socket.close()

    def _has_begun(self, timeout: float | None) -> bool:
        if self._socket.fileno() < 0:
            raise OSError("this end was closed")
        waits = select.poll()
        waits.register(self._socket, select.POLLIN)
        return bool(waits.poll(None if timeout is None else math.ceil(max(timeout, 0) * 1000)))

    def _read(self, size: int) -> bytes:
        """So many bytes, received where they stay."""
        if not size:
            return b""
        held = io.BytesIO()
        held.seek(size - 1)
        held.write(b"\0")
        with held.getbuffer() as room:
            at = 0
            while at < size:
                count = self._socket.recv_into(room[at:])
                if not count:
                    raise OSError("the connection was closed")
                at += count
        return held.getvalue()

    def _broken(self, what: str) -> ChannelClosed:
        """Use it no more: the next byte may be in the midst of a frame."""
        _shut(self._socket)
        return ChannelClosed(f"{self.peer} {what}")


def connect(
    address: str,
    secret: str,
    *,
    timeout: float,
    most_data: int = MOST_DATA,
    stall: float = STALL_SECONDS,
) -> Channel:
    """A channel to the listener at ``host:port``, within `timeout` seconds."""
    host, colon, port = address.rpartition(":")
    if not colon or not re.fullmatch("[0-9]{1,5}", port) or not secret:
        raise ArgumentError(f"connecting takes host:port and a secret, not {address!r:.60}")
    until = time.monotonic() + timeout
    try:
        connection = socket.create_connection((host, int(port)), timeout)
    except (OSError, OverflowError) as error:
        raise ChannelClosed(f"nothing answers at {address}: {error}") from error
    try:
        call(connection, secret, seconds=until - time.monotonic())
        return Channel(connection, most_data=most_data, stall=stall)
    except OSError as error:
        connection.close()
        raise ChannelClosed(
            f"{address} is no listener that knows the secret of this process: {error}"
        ) from error


class Listener:
    """Takes connections from whoever knows the secret, and gives each to `on_channel`.

    That is called in a thread of the connection's own, and closes the channel. `address` is where
    others connect to.
    """

    def __init__(
        self,
        on_channel: Callable[[Channel], None],
        *,
        secret: str,
        host: str = LOOPBACK,
        port: int = 0,
        most_data: int = MOST_DATA,
    ) -> None:
        if not secret:
            raise ArgumentError("a listener without a secret would let anyone in: give one")
        self._on_channel, self._secret, self._most_data = on_channel, secret, most_data
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._closed = threading.Event()
        self._socket = _bound(host, port)
        self.address = "{}:{}".format(*self._socket.getsockname()[:2])
        self._thread = threading.Thread(target=self._accept, daemon=True, name="listener")
        self._thread.start()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Take no more connections; channels that were handed over stay."""
        self._closed.set()
        _shut(self._socket)  # wakes the thread on Linux; elsewhere a connection does
        with contextlib.suppress(OSError):
            socket.create_connection(self._socket.getsockname(), WAKE_SECONDS).close()
        self._thread.join()
        self._socket.close()
        with self._lock:
            for stranger in self._strangers:
                _shut(stranger)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                stranger, _ = self._socket.accept()
            except OSError:
                self._closed.wait(PAUSE_SECONDS)
                continue
            with self._lock:
                self._strangers[stranger] = None
                if len(self._strangers) > MOST_HANDSHAKES:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    _shut(oldest)  # and its thread closes it
            try:
                threading.Thread(target=self._greet, args=(stranger,), daemon=True).start()
            except RuntimeError:  # no more threads
                self._forget(stranger)
                stranger.close()

    def _greet(self, stranger: socket.socket) -> None:
        try:
            answer(stranger, self._secret, seconds=HANDSHAKE_SECONDS)
            channel = Channel(stranger, most_data=self._most_data)
        except OSError:
            stranger.close()
            return
        finally:
            self._forget(stranger)
        if self._closed.is_set():
            channel.close()
        else:
            self._on_channel(channel)

    def _forget(self, stranger: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(stranger, None)


def _bound(host: str, port: int) -> socket.socket:
    """A socket that listens; where any port will do, at one that no outgoing connection is given.

    Else, once the listener is gone, a caller of its address could be connected to itself, or to
    another program.
    """
    for _ in range(100):
        try:
            return socket.create_server((host, port or free_port()), backlog=BACKLOG)
        except OSError:  # another was quicker
            if port:
                raise
    raise ArgumentError(f"cannot listen at {host}: give another host")


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


MAGIC = b"ftmesh/1"
NONCE = 32  # bytes
PROOF = 32


def call(connection: socket.socket, secret: str, *, seconds: float) -> None:
    """The caller's part; an OSError unless the listener knows the secret."""
    until, ours = time.monotonic() + seconds, secrets.token_bytes(NONCE)
    _check(_exactly(connection, len(MAGIC), until) == MAGIC, "it speaks another language")
    theirs = _exactly(connection, NONCE, until)
    connection.sendall(MAGIC + ours + proof(secret, b"caller", theirs, ours))
    found = _exactly(connection, PROOF, until)
    _check(
        hmac.compare_digest(found, proof(secret, b"listener", theirs, ours)),
        "it does not know the secret",
    )


def answer(connection: socket.socket, secret: str, *, seconds: float) -> None:
    """The listener's part; an OSError unless the caller knows the secret."""
    until, ours = time.monotonic() + seconds, secrets.token_bytes(NONCE)
    connection.settimeout(seconds)
    connection.sendall(MAGIC + ours)
    _check(_exactly(connection, len(MAGIC), until) == MAGIC, "it speaks another language")
    theirs = _exactly(connection, NONCE, until)
    found = _exactly(connection, PROOF, until)
    _check(
        hmac.compare_digest(found, proof(secret, b"caller", ours, theirs)),
        "it does not know the secret",
    )
    connection.sendall(proof(secret, b"listener", ours, theirs))


def proof(secret: str, role: bytes, listeners: bytes, callers: bytes) -> bytes:
    """What only those can say who know the secret; a role's is no use to the other."""
    return hmac.digest(secret.encode(), role + listeners + callers, "sha256")


def _exactly(connection: socket.socket, size: int, until: float) -> bytes:
    """So many bytes, all of them before `until`."""
    got = b""
    while len(got) < size:
        left = until - time.monotonic()
        _check(left > 0, "it took too long")
        connection.settimeout(left)
        part = connection.recv(size - len(got))
        _check(bool(part), "it closed the connection")
        got += part
    return got


def _check(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise OSError(otherwise)
