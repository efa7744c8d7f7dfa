"""The server sends the page, plans what the page asks for, and rejects everything else."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from ftmesh.errors import ArgumentError
from ftmesh.topology.topology import Topology
from ftmesh.view.page import build_scene
from ftmesh.view.server import MAX_REQUEST_BYTES, Server

REQUEST = {
    "mesh": "4x4",
    "wrap": "",
    "failed": "2x2@0,0",
    "failed_links": "",
    "devices_per_chip": 1,
    "algorithm": "auto",
    "payload_bytes": 1_000_000,
}


@pytest.fixture(scope="module")
def server():
    running = Server(build_scene(Topology.grid("4x4")))
    thread = threading.Thread(target=running.run)
    thread.start()
    yield running
    running.close()
    thread.join()


@pytest.fixture
def call(server):
    path = re.fullmatch(r"http://127\.0\.0\.1:\d+(/[\w-]{20,}/)", server.address)[1]

    def to(method, where, body=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if where in ("", "plan"):
            where = path + where
        connection.request(method, where, body, headers)
        answer = connection.getresponse()
        found = answer.status, answer.read().decode(), dict(answer.getheaders())
        connection.close()
        return found

    return to


def plan(call, request, **headers):
    body = request if isinstance(request, bytes) else json.dumps(request)
    status, text, _ = call("POST", "plan", body, **{"Content_Type": "application/json", **headers})
    return status, json.loads(text)


def test_the_page_is_there_and_may_not_be_framed_or_kept(call):
    status, html, headers = call("GET", "")
    assert (status, html[:15]) == (200, "<!doctype html>")
    assert '"plans_at":"plan"' in html
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Cache-Control"] == "no-store"


def test_plans(call):
    status, scene = plan(call, REQUEST)
    expected = build_scene(Topology.grid("4x4", failed="2x2@0,0"), payload_bytes=1_000_000)
    assert (status, scene) == (200, json.loads(json.dumps(expected)))
    status, scene = plan(call, {**REQUEST, "wrap": "y", "failed_links": "2,2-3,2", "failed": ""})
    assert scene["mesh"]["name"] == "4x4 (wrapping in y) less links 2,2-3,2"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"failed": "1x4@1,0"}, "4x4 less 1x4@1,0 is cut into 2 parts that no link joins"),
        ({"failed": "1x1@9,9"}, "block 1x1@9,9 is not inside mesh 4x4"),
        ({"algorithm": "two_dim"}, "two_dim cannot run on 4x4 less 2x2@0,0"),
        ({"algorithm": "all"}, "must name one algorithm"),
        ({"mesh": "4y4"}, "'4y4' is not a mesh shape"),
        ({"mesh": "64x64"}, "up to 1,024 chips"),
        ({"mesh": "9" * 5000}, "at most six digits"),
        ({"failed": f"1x1@{'1' * 5000},1"}, "at most six digits"),
        ({"wrap": "z"}, "wrap must be some of the axes 'xy' of mesh 4x4"),
        ({"payload_bytes": 0}, "must be a positive whole number"),
        ({"payload_bytes": 10**17}, "must be a positive whole number up to"),
        ({"payload_bytes": True}, "payload_bytes of a request must be of type int"),
        ({"payload_bytes": 1.5}, "payload_bytes of a request must be of type int"),
        ({"failed": None}, "failed of a request must be of type str"),
        ({"devices_per_chip": 3}, "devices_per_chip must be 1 or 2"),
        ({"more": 1}, "must have exactly the fields mesh, "),
        ({"failed": "1x1@0,0; 1x1@0,0"}, "failed has '1x1@0,0' more than once"),
        ({"failed_links": "0,0-0,1;0,0-0,1"}, "failed_links has '0,0-0,1' more than once"),
        ({"failed": "4x4@0,0;1x1@0,0"}, "failed names 17 chips, and mesh 4x4 has fewer"),
        ({"failed": ";".join(f"900x{n}@0,0" for n in range(1, 900))}, "chips in all"),
    ],
)
def test_errors_are_one_sentence(call, change, says):
    status, answer = plan(call, {**REQUEST, **change})
    assert (status, set(answer)) == (400, {"error"})
    assert says in answer["error"]
    assert "\n" not in answer["error"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 30_000, b"null"])
def test_malformed_requests_are_rejected(call, body):
    status, answer = plan(call, body)
    assert status == 400
    assert answer["error"].startswith("a request")


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "attacker.example"},
        {"Host": "127.0.0.1:1"},
        {"Origin": "https://attacker.example"},
        {"Origin": "null"},
    ],
)
def test_other_pages_are_rejected(call, headers):
    for method, where in (("GET", ""), ("POST", "plan")):
        status, text, _ = call(method, where, json.dumps(REQUEST), **headers)
        assert status == 403
        assert "only the page" in text


def test_its_own_page_is_accepted(call, server):
    own = {"Host": f"localhost:{server.port}", "Origin": f"http://localhost:{server.port}"}
    assert plan(call, REQUEST, **own)[0] == 200


def test_the_token_is_required(call):
    for where in ("/", "/plan", "/favicon.ico", "/x/", "/../etc/passwd"):
        status, text, _ = call("GET", where)
        assert (status, "ftmesh.view" in text) == (404, False)
        status, text, _ = call("POST", where, json.dumps(REQUEST), Content_Type="application/json")
        assert status == 404


def test_size_and_type_of_requests(call):
    status, _, _ = call("POST", "plan", json.dumps(REQUEST))
    assert status == 415
    status, _, _ = call("POST", "plan", json.dumps(REQUEST), Content_Type="text/plain")
    assert status == 415
    assert plan(call, b" " * (MAX_REQUEST_BYTES + 1))[0] == 413
    assert plan(call, b"", Content_Length="9" * 400)[0] == 413
    assert plan(call, b"", Content_Length="-1")[0] == 411
    assert call("PUT", "plan", "{}")[0] == 501


def test_half_a_request_does_not_block_others(call, server):
    with socket.create_connection(("127.0.0.1", server.port)) as half:
        half.sendall(b"POST /")
        assert call("GET", "")[0] == 200


def test_repeated_fields_are_rejected(call):
    status, answer = plan(call, json.dumps(REQUEST).replace("{", '{"failed": "", ', 1).encode())
    assert (status, answer["error"]) == (400, "a request has 'failed' more than once")


@pytest.fixture(scope="module")
def impatient_server():
    running = Server(build_scene(Topology.grid("2x2")), timeout=2)
    thread = threading.Thread(target=running.run)
    thread.start()
    yield running
    running.close()
    thread.join()


@pytest.mark.parametrize("drips", [False, True])
def test_half_a_body_times_out(impatient_server, drips):
    path = impatient_server.address.split(str(impatient_server.port))[1]
    head = (
        f"POST {path}plan HTTP/1.1\r\nHost: 127.0.0.1:{impatient_server.port}\r\n"
        "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    )
    start = time.monotonic()
    with socket.create_connection(("127.0.0.1", impatient_server.port), timeout=20) as half:
        half.sendall(head.encode())
        while drips and time.monotonic() < start + 0.4:
            half.sendall(b" ")
            time.sleep(0.1)
        answer = half.makefile("rb").read().decode()
    assert time.monotonic() - start < 15
    assert answer.startswith("HTTP/1.1 408 ")
    assert answer.endswith('{"error": "a request must arrive within 2 seconds"}')


def test_half_a_head_times_out(impatient_server):
    start = time.monotonic()
    with socket.create_connection(("127.0.0.1", impatient_server.port), timeout=20) as half:
        half.sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert half.makefile("rb").read() == b""
    assert time.monotonic() - start < 15


def test_listens_on_loopback_only(server):
    assert server._http.server_address[0] == "127.0.0.1"


def test_a_port_in_use_is_rejected(server):
    with pytest.raises(ArgumentError, match=f"cannot serve on port {server.port}"):
        Server(build_scene(Topology.grid("2x2")), port=server.port)


def test_the_command_serves_until_it_is_interrupted():
    command = [sys.executable, "-m", "ftmesh", "view", "4x4", "--serve"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()}
    ) as process:
        address = process.stdout.readline().strip()
        port, path = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/.+/)", address).groups()
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=20)
        connection.request("GET", path)
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.stdout.read().endswith("stopped\n")
    assert process.returncode == 0
