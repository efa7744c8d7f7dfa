"""Handshake: the two ends of a connection prove to each other that they know one secret.

    listener  "ftmesh/1", a nonce
    caller    "ftmesh/1", a nonce, HMAC(secret, "caller" and both nonces)
    listener  HMAC(secret, "listener" and both nonces)

The secret itself never travels, and what travels is of no use in another handshake. Of a stranger
no more than 72 bytes are read.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

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
