"""An HTTP server on loopback for the page, which plans for the damage that a user clicks.

Only the page of this server may ask for plans. Its URL contains a token that other pages cannot
know. Requests must name this server as their host and, if they name an origin, as that. Bodies must
be small and JSON, and a request must arrive completely within seconds.
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
from ftmesh.view.page import ALL, build_scene, check_fits, render_page

HOST = "127.0.0.1"
MAX_REQUEST_BYTES = 32 * 1024
REQUEST_TIMEOUT = 10.0  # seconds for a request to arrive
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
_NO_PAGE = "there is no such page: use the address that was printed"


class Server:
    """Serves a page at `address` until it is closed, and plans for one request at a time.

    Args:
        first: The scene that is shown first; see `ftmesh.view.page.build_scene`.
        options: Command line options about links; see `ftmesh.view.page.render_page`.
        port: Port on loopback; 0 for any that is free.
        timeout: Seconds within which a request must arrive.
    """

    def __init__(
        self,
        first: dict[str, Any],
        *,
        network: Network = DEFAULT,
        options: str = "",
        port: int = 0,
        timeout: float = REQUEST_TIMEOUT,
    ) -> None:
        self._token = secrets.token_urlsafe(16)
        self._network = network
        self._planning = threading.Lock()
        self._page = render_page([first], options=options, plans_at="plan").encode()
        handler = type("Handler", (_Handler,), {"owner": self, "timeout": timeout})
        try:
            self._http = _Http((HOST, port), handler)
        except (OSError, OverflowError) as error:
            raise ArgumentError(f"cannot serve on port {port} of {HOST}: {error}") from None

    @property
    def port(self) -> int:
        return int(self._http.server_address[1])

    @property
    def address(self) -> str:
        """The URL of the page; whoever knows it may ask for plans."""
        return f"http://{HOST}:{self.port}/{self._token}/"

    def run(self) -> None:
        """Serve until `close` is called, or the process is interrupted."""
        self._http.serve_forever(poll_interval=0.05)

    def close(self) -> None:
        """Stop `run`, from another thread, and release the port."""
        self._http.shutdown()
        self._http.server_close()

    def plan_scene(self, request: Any) -> dict[str, Any]:
        """Plan the scene that the JSON of a request describes."""
        topology = _parse_request(request)
        size, algorithm = request["payload_bytes"], request["algorithm"]
        with self._planning:
            return build_scene(topology, algorithm, payload_bytes=size, network=self._network)


class _Http(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore closed connections; print the traceback of anything else."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _DeadlineReader(io.RawIOBase):
    """Reads from a connection; raises `TimeoutError` after `deadline`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self.deadline = connection, time.monotonic()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left, usual = self.deadline - time.monotonic(), self._connection.gettimeout()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(usual)


class _Handler(BaseHTTPRequestHandler):
    """Handles a connection; checks all of a request before acting on it."""

    owner: Server
    timeout = REQUEST_TIMEOUT
    server_version = "ftmesh"
    sys_version = ""
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        """Read requests with a deadline."""
        super().setup()
        self._reader = _DeadlineReader(self.connection)
        self.rfile = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        """Give the whole request `timeout` seconds, even if it arrives byte by byte."""
        self._reader.deadline = time.monotonic() + self.timeout
        super().handle_one_request()

    def do_GET(self) -> None:
        """Send the page."""
        if self._is_ours():
            if self.path == f"/{self.owner._token}/":
                self._send(HTTPStatus.OK, self.owner._page, "text/html; charset=utf-8")
            else:
                self._reject(HTTPStatus.NOT_FOUND, _NO_PAGE)

    def do_POST(self) -> None:
        """Plan, and send the scene."""
        if not self._is_ours():
            return
        if self.path != f"/{self.owner._token}/plan":
            self._reject(HTTPStatus.NOT_FOUND, _NO_PAGE)
            return
        body = self._body()
        if body is None:
            return
        try:
            scene = self.owner.plan_scene(_parse_json(body))
        except FtmeshError as error:
            self._reject(HTTPStatus.BAD_REQUEST, " ".join(str(error).split()))
        except Exception:
            traceback.print_exc()
            why = "ftmesh failed, with a traceback on its terminal: please report it"
            self._reject(HTTPStatus.INTERNAL_SERVER_ERROR, why)
        else:
            self._send(HTTPStatus.OK, json.dumps(scene).encode(), "application/json")

    def _is_ours(self) -> bool:
        """Whether the request names this server as host and origin, which other pages cannot do."""
        port = "" if self.owner.port == HTTP_PORT else f":{self.owner.port}"
        names = {f"{HOST}{port}", f"localhost{port}"}
        origin = self.headers.get("Origin")
        if self.headers.get("Host") in names and (
            origin is None or origin in {f"http://{name}" for name in names}
        ):
            return True
        self._reject(HTTPStatus.FORBIDDEN, "only the page of this server may send requests")
        return False

    def _body(self) -> bytes | None:
        length = self.headers.get("Content-Length", "")
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip()
        if kind != "application/json":
            why = "the content type of a request must be application/json"
            self._reject(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, why)
        elif not (length.isascii() and length.isdigit()):
            self._reject(HTTPStatus.LENGTH_REQUIRED, "a request needs a Content-Length")
        elif len(length) > 9 or int(length) > MAX_REQUEST_BYTES:
            why = f"a request has at most {MAX_REQUEST_BYTES:,} bytes"
            self._reject(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why)
        else:
            try:
                return self.rfile.read(int(length))
            except TimeoutError:
                why = f"a request must arrive within {self.timeout:g} seconds"
                self._reject(HTTPStatus.REQUEST_TIMEOUT, why)
        return None

    def _reject(self, status: HTTPStatus, why: str) -> None:
        self.close_connection = True  # the rest of the request is not read
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
        with suppress(ConnectionError):  # the page was closed, or sends another request
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the page shows errors."""


def _parse_json(body: bytes) -> Any:
    try:
        return json.loads(body, object_pairs_hook=_fields)
    except ArgumentError:
        raise
    except (ValueError, RecursionError):
        raise ArgumentError("a request must be JSON") from None


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _check_unique("a request", [name for name, _ in pairs])
    return dict(pairs)


def _check_unique(name: str, words: list[str]) -> None:
    repeated = next((word for word, count in Counter(words).items() if count > 1), None)
    if repeated is not None:
        raise ArgumentError(f"{name} has {repeated!r:.60} more than once")


def _parse_request(request: Any) -> Topology:
    """Check the fields of a request; return its mesh, whose size is checked before its damage."""
    if not isinstance(request, dict) or set(request) != set(_FIELDS):
        raise ArgumentError(f"a request must have exactly the fields {', '.join(_FIELDS)}")
    for name, kind in _FIELDS.items():
        if type(request[name]) is not kind:
            raise ArgumentError(f"the field {name} of a request must be of type {kind.__name__}")
    if request["algorithm"] == ALL:
        raise ArgumentError("a request must name one algorithm")
    check_bytes(request["payload_bytes"])
    texts = [value for value in request.values() if isinstance(value, str)]
    if any(_LONG_NUMBER.search(text) for text in texts):
        raise ArgumentError("numbers in a request have at most six digits")
    shape = parse_shape(request["mesh"])
    check_fits(shape)
    for name in ("failed", "failed_links"):
        _check_unique(name, [word for part in request[name].split(";") if (word := part.strip())])
    named = sum(math.prod(block.size) for block in parse_blocks(request["failed"]))
    if named > math.prod(shape):
        raise ArgumentError(f"failed names {named:,} chips, and mesh {request['mesh']} has fewer")
    axes = "xyz"[: len(shape)]
    if not set(request["wrap"]) <= set(axes):
        raise ArgumentError(f"wrap must be some of the axes {axes!r} of mesh {request['mesh']}")
    if request["devices_per_chip"] not in (1, 2):
        raise ArgumentError("devices_per_chip must be 1 or 2")
    failed, failed_links = request["failed"], request["failed_links"]
    wrap = [axis in request["wrap"] for axis in axes]
    topology = Topology.grid(shape, failed=failed, failed_links=failed_links, wrap=wrap)
    return replace(topology, devices_per_chip=request["devices_per_chip"])
