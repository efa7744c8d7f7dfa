"""Handshake: two processes prove to each other that they know the secret of their run.

    listener  "ftmesh/1", a nonce
    caller    "ftmesh/1", a nonce, HMAC(secret, "caller" and both nonces)
    listener  HMAC(secret, "listener" and both nonces)

The secret is never sent, and a recorded handshake cannot be replayed. At most 72 bytes are read
from an unknown caller. After the handshake the connection is trusted, and not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping

from ftmesh.errors import ArgumentError

HANDSHAKE_SECONDS = 5.0
MAX_HANDSHAKES = 256  # at once
MAX_SECRET_BYTES = 4096
MAGIC = b"ftmesh/1"
NONCE_BYTES = 32
PROOF_BYTES = 32
MAKE_SECRET = "`(umask 077; openssl rand -hex 32 > FILE)`, and set FTMESH_SECRET_FILE on every host"
_POLL_SECONDS = 0.1


class RejectedError(OSError):
    """The other end has closed the connection after it has read a proof."""


def find_secret(environ: Mapping[str, str]) -> str:
    """Return ``FTMESH_SECRET``, or the content of ``FTMESH_SECRET_FILE``; empty if neither is set.

    Raises:
        ArgumentError: The file cannot be read, is empty, or is readable by others than its owner;
            or the secret is not printable ASCII.
    """
    secret, source = environ.get("FTMESH_SECRET", ""), "FTMESH_SECRET"
    if not secret and (name := environ.get("FTMESH_SECRET_FILE")):
        folder = environ.get("CREDENTIALS_DIRECTORY")
        is_credential = bool(folder) and _is_in(name, str(folder))
        secret = _read_secret(name, 0o007 if is_credential else 0o077)
        source = f"FTMESH_SECRET_FILE: {name}"
    if not (secret.isascii() and secret.isprintable()):  # workers get it as a variable
        raise ArgumentError(f"{source} is not printable ASCII: make {MAKE_SECRET}")
    return secret


def _is_in(name: str, folder: str) -> bool:
    """True for a credential of systemd: what others see as access of a group is that of its ACL."""
    return os.path.dirname(os.path.realpath(name)) == os.path.realpath(folder)


def _read_secret(name: str, forbidden_mode: int) -> str:
    try:
        with open(name, "rb", opener=_open_at_once) as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_SECRET_BYTES) if stat.S_ISREG(mode) else b""
    except OSError as error:
        raise ArgumentError(f"FTMESH_SECRET_FILE: {name}: {error.strerror}") from error
    if mode & forbidden_mode:
        raise ArgumentError(
            f"FTMESH_SECRET_FILE: others can read {name} (mode {mode & 0o777:o}): chmod 600 it"
        )
    secret = data.decode("latin-1").strip()
    if not secret:
        raise ArgumentError(
            f"FTMESH_SECRET_FILE: {name} is empty or not a file: make {MAKE_SECRET}"
        )
    return secret


def _open_at_once(name: str, flags: int) -> int:
    """Open a pipe without waiting for a writer. This module has no imports that need packages."""
    return os.open(name, flags | os.O_NONBLOCK)


def call(connection: socket.socket, secret: str, *, seconds: float) -> None:
    """Do the caller's part. Raises OSError unless the listener knows the secret."""
    deadline, ours = time.monotonic() + seconds, secrets.token_bytes(NONCE_BYTES)
    _check_magic(connection, deadline)
    theirs = read_exactly(connection, NONCE_BYTES, deadline)
    connection.sendall(MAGIC + ours + proof(secret, b"caller", theirs, ours))
    try:
        answered = read_exactly(connection, PROOF_BYTES, deadline)
    except OSError as error:
        raise RejectedError(str(error)) from error
    _check_proof(answered, proof(secret, b"listener", theirs, ours))


def answer(connection: socket.socket, secret: str, *, seconds: float) -> None:
    """Do the listener's part. Raises OSError unless the caller knows the secret."""
    deadline, ours = time.monotonic() + seconds, secrets.token_bytes(NONCE_BYTES)
    connection.settimeout(seconds)
    connection.sendall(MAGIC + ours)
    _check_magic(connection, deadline)
    theirs = read_exactly(connection, NONCE_BYTES, deadline)
    proved = read_exactly(connection, PROOF_BYTES, deadline)
    _check_proof(proved, proof(secret, b"caller", ours, theirs))
    connection.sendall(proof(secret, b"listener", ours, theirs))


def proof(secret: str, role: bytes, listener_nonce: bytes, caller_nonce: bytes) -> bytes:
    """Return what only a process that knows the secret can send in this role."""
    return hmac.digest(secret.encode(), role + listener_nonce + caller_nonce, "sha256")


def read_exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Read `size` bytes. Raises OSError if they do not come before `deadline`."""
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise OSError("it took too long")
        connection.settimeout(left)
        part = connection.recv(size - len(data))
        if not part:
            raise OSError("it closed the connection")
        data += part
    return data


def _check_magic(connection: socket.socket, deadline: float) -> None:
    if read_exactly(connection, len(MAGIC), deadline) != MAGIC:
        raise OSError("it uses another protocol")


def _check_proof(proved: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proved, expected):
        raise OSError("it does not know the secret")


class Acceptor:
    """Accepts connections of callers that know the secret, many at a time.

    `on_connection` is called with each of them, and `on_stranger` with the address of each rejected
    caller and the reason; both in a thread of the connection. With more than `max_handshakes` at
    once, the oldest is dropped.
    """

    def __init__(
        self,
        server: socket.socket,
        secret: str,
        on_connection: Callable[[socket.socket], None],
        on_stranger: Callable[[str, str], None],
        max_handshakes: int = MAX_HANDSHAKES,
    ) -> None:
        self._server, self._secret, self._max_handshakes = server, secret, max_handshakes
        self._on_connection, self._on_stranger = on_connection, on_stranger
        self._lock = threading.Lock()
        self._pending: dict[socket.socket, None] = {}  # in a handshake, the oldest first
        self._closed = threading.Event()
        server.settimeout(_POLL_SECONDS)
        self._thread = threading.Thread(target=self._accept, daemon=True, name="acceptor")
        self._thread.start()

    def __enter__(self) -> Acceptor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Accept no more connections; those that were handed over stay open."""
        self._closed.set()
        self._thread.join()
        self._server.close()
        with self._lock:
            for pending in self._pending:
                _shut(pending)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                pending, _ = self._server.accept()
            except TimeoutError:
                continue
            except OSError:  # no more descriptors
                self._closed.wait(_POLL_SECONDS)
                continue
            with self._lock:
                self._pending[pending] = None
                if len(self._pending) > self._max_handshakes:
                    oldest = next(iter(self._pending))
                    del self._pending[oldest]
                    _shut(oldest)  # and its thread closes it
            try:
                threading.Thread(target=self._admit, args=(pending,), daemon=True).start()
            except RuntimeError:  # no more threads
                self._forget(pending)
                pending.close()

    def _admit(self, pending: socket.socket) -> None:
        peer = "a host that has gone"
        try:
            peer = str(pending.getpeername()[0])
            answer(pending, self._secret, seconds=HANDSHAKE_SECONDS)
        except OSError as error:
            pending.close()
            if not self._closed.is_set():
                self._on_stranger(peer, str(error))
            return
        finally:
            self._forget(pending)
        if self._closed.is_set():
            pending.close()
        else:
            self._on_connection(pending)

    def _forget(self, pending: socket.socket) -> None:
        with self._lock:
            self._pending.pop(pending, None)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
