"""Server: the page on loopback, and plans for the damage that it is asked about.

Only the page that this server gave out may ask. Its address has a token that other pages cannot
know, requests name this server as their host and, if they name one, as their origin, and a body is
small, is JSON, and all of a request is there within seconds, however it is sent.
"""

from __future__ import annotations

import io
import json
import math
import re
import secrets
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from http.client import HTTP_PORT
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ftmesh.cost.links import DEFAULT, Network
from ftmesh.errors import ArgumentError, FtmeshError
from ftmesh.topology.notation import parse_blocks, parse_shape
from ftmesh.topology.topology import Topology
from ftmesh.units import check_bytes
from ftmesh.view.page import page
from ftmesh.view.scene import ALL, check_fits, scene

HOST = "127.0.0.1"
MAX_BYTES = 32 * 1024  # of a request
PATIENCE = 10.0  # seconds for a request to arrive
_FIELDS = {
    "mesh": str,
    "wrap": str,
    "failed": str,
    "failed_links": str,
    "devices_per_chip": int,
    "algorithm": str,
    "payload_bytes": int,
}
_LONG_NUMBER = re.compile(r"[0-9]{7}")


class Server:
    """Serves the page of `scene` at `address` until it is closed; one plan is made at a time."""

    def __init__(
        self,
        first: dict[str, Any],
        *,
        on: Network = DEFAULT,
        options: str = "",
        port: int = 0,
        patience: float = PATIENCE,
    ) -> None:
        self._token = secrets.token_urlsafe(16)
        self._on = on
        self._planning = threading.Lock()
        self._page = page([first], options=options, plans_at="plan").encode()
        server = self

        class Handler(_Handler):
            owner = server
            timeout = patience

        try:
            self._http = _Http((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            raise ArgumentError(f"cannot serve on port {port} of {HOST}: {error}") from None

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._http.server_address[1])

    @property
    def address(self) -> str:
        """Where the page is; whoever knows it may ask for plans."""
        return f"http://{HOST}:{self.port}/{self._token}/"

    def run(self) -> None:
        """Serve until `close` is called, or the process is interrupted."""
        self._http.serve_forever(poll_interval=0.05)

    def close(self) -> None:
        """End `run`, from another thread, and give the port back."""
        self._http.shutdown()
        self._http.server_close()

    def answer(self, request: Any) -> dict[str, Any]:
        """The scene that a request's JSON asks for; a `FtmeshError` says what is wrong with it."""
        topology, wanted = _read(request)
        with self._planning:
            return scene(
                topology,
                wanted["algorithm"],
                payload_bytes=wanted["payload_bytes"],
                on=self._on,
            )


class _Http(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that has gone is no error; anything else is said, with its traceback."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Arriving(io.RawIOBase):
    """What a client sends, until `until`; then it is a `TimeoutError`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self.until = connection, time.monotonic()

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """What has come, or comes in time."""
        left, usual = self.until - time.monotonic(), self._connection.gettimeout()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(usual)


class _Handler(BaseHTTPRequestHandler):
    """One request; everything about it is checked before anything is done."""

    owner: Server
    timeout = PATIENCE
    server_version = "ftmesh"
    sys_version = ""
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        """Read what comes within bounds of time."""
        super().setup()
        self._arriving = _Arriving(self.connection)
        self.rfile = io.BufferedReader(self._arriving)

    def handle_one_request(self) -> None:
        """All of it has so many seconds, also for a client that sends byte after byte."""
        self._arriving.until = time.monotonic() + self.timeout
        super().handle_one_request()

    def do_GET(self) -> None:
        """The page."""
        if self._is_ours():
            if self.path == f"/{self.owner._token}/":
                self._send(HTTPStatus.OK, self.owner._page, "text/html; charset=utf-8")
            else:
                self._refuse(HTTPStatus.NOT_FOUND, "there is no such page: see the address printed")

    def do_POST(self) -> None:
        """A plan."""
        if not self._is_ours():
            return
        if self.path != f"/{self.owner._token}/plan":
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page: see the address printed")
            return
        body = self._body()
        if body is None:
            return
        try:
            made = self.owner.answer(_parsed(body))
        except FtmeshError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, " ".join(str(error).split()))
        except Exception:
            traceback.print_exc()
            why = "ftmesh failed, and says where on its terminal: please report it"
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, why)
        else:
            self._send(HTTPStatus.OK, json.dumps(made).encode(), "application/json")

    def _is_ours(self) -> bool:
        """Whether the request names this server, as a page from elsewhere could not make it do."""
        port = "" if self.owner.port == HTTP_PORT else f":{self.owner.port}"
        names = {f"{HOST}{port}", f"localhost{port}"}
        origin = self.headers.get("Origin")
        if self.headers.get("Host") in names and (
            origin is None or origin in {f"http://{name}" for name in names}
        ):
            return True
        self._refuse(HTTPStatus.FORBIDDEN, "only the page that this server gave out may ask")
        return False

    def _body(self) -> bytes | None:
        length = self.headers.get("Content-Length", "")
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip()
        if kind != "application/json":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "a request is application/json")
        elif not (length.isascii() and length.isdigit()):
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "a request says how long it is")
        elif len(length) > 9 or int(length) > MAX_BYTES:
            self._refuse(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has up to {MAX_BYTES:,} bytes"
            )
        else:
            try:
                return self.rfile.read(int(length))
            except TimeoutError:
                why = f"all of a request is to be there within {self.timeout:g} seconds"
                self._refuse(HTTPStatus.REQUEST_TIMEOUT, why)
        return None

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self.close_connection = True  # what is left of the request is not read
        self._send(status, json.dumps({"error": why}).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        if self.close_connection:
            self.send_header("Connection", "close")
        with suppress(ConnectionError):  # the page has gone, or asks for something else
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the page shows what went wrong."""


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body, object_pairs_hook=_fields)
    except ArgumentError:
        raise
    except (ValueError, RecursionError):
        raise ArgumentError("a request is JSON, and this is not") from None


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_repeated("a request", [name for name, _ in pairs])
    return dict(pairs)


def _refuse_repeated(what: str, words: list[str]) -> None:
    twice = next((word for word, count in Counter(words).items() if count > 1), None)
    if twice is not None:
        raise ArgumentError(f"{what} names {twice!r:.60} more than once")


def _read(request: Any) -> tuple[Topology, dict[str, Any]]:
    """The mesh and what is wanted for it, with nothing missing, unknown or of another kind."""
    if not isinstance(request, dict) or set(request) != set(_FIELDS):
        raise ArgumentError(f"a request has the fields {', '.join(_FIELDS)}, and no others")
    for name, kind in _FIELDS.items():
        if type(request[name]) is not kind:
            raise ArgumentError(f"the field {name} of a request is of type {kind.__name__}")
    if request["algorithm"] == ALL:
        raise ArgumentError("ask for one algorithm at a time")
    check_bytes(request["payload_bytes"])
    return _topology(request), request


def _topology(request: dict[str, Any]) -> Topology:
    """The mesh that a request describes; its size is looked at before its damage."""
    texts = [value for value in request.values() if isinstance(value, str)]
    if any(_LONG_NUMBER.search(text) for text in texts):
        raise ArgumentError("numbers of a mesh have up to six digits")
    shape = parse_shape(request["mesh"])
    check_fits(shape)
    for name in ("failed", "failed_links"):
        _refuse_repeated(
            name, [word for part in request[name].split(";") if (word := part.strip())]
        )
    named = sum(math.prod(block.size) for block in parse_blocks(request["failed"]))
    if named > math.prod(shape):
        raise ArgumentError(f"failed names {named:,} chips, and mesh {request['mesh']} has fewer")
    axes = "xyz"[: len(shape)]
    if not set(request["wrap"]) <= set(axes):
        raise ArgumentError(f"mesh {request['mesh']} wraps in some of {axes!r} or in none")
    if request["devices_per_chip"] not in (1, 2):
        raise ArgumentError("a chip has one device or two")
    topology = Topology.grid(
        shape,
        failed=request["failed"],
        failed_links=request["failed_links"],
        wrap=[axis in request["wrap"] for axis in axes],
    )
    return replace(topology, devices_per_chip=request["devices_per_chip"])
