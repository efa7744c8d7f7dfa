"""All processes are there, or all of them learn who is missing; strangers change nothing."""

import os
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest

from ftmesh.distributed import handshake, roll_call
from ftmesh.distributed.handshake import MAGIC, NONCE_BYTES, call, find_secret
from ftmesh.distributed.roll_call import call_roll, is_loopback, join_address
from ftmesh.elastic.rpc import free_port
from ftmesh.errors import ArgumentError, ClusterError, PeerLostError


def call_all(
    numbers,
    totals=None,
    timeout=10.0,
    secrets=None,
):
    """Return the error of each process, or None."""
    port = free_port()
    totals = totals or [len(numbers)] * len(numbers)
    secrets = secrets or [""] * len(numbers)
    address = f"127.0.0.1:{port}"

    def call_one(number, total, secret):
        try:
            roll = call_roll(address, number, total, timeout=timeout, secret=secret)
        except ClusterError as error:
            return str(error)
        return roll

    with ThreadPoolExecutor(len(numbers)) as threads, ExitStack() as stack:
        each = zip(numbers, totals, secrets, strict=True)
        waiting = [threads.submit(call_one, *arguments) for arguments in each]
        results = [future.result() for future in waiting]
        for roll in results:
            if not isinstance(roll, str):
                for connection in roll.connections.values():
                    stack.enter_context(connection)
        for number, roll in zip(numbers, results, strict=True):
            if not isinstance(roll, str):
                assert (roll.host, roll.coordinator, roll.bind) == ("127.0.0.1", address, address)
                others = set(range(1, totals[0])) if number == 0 else {0}
                assert roll.connections.keys() == others
        return [roll if isinstance(roll, str) else None for roll in results]


@contextmanager
def listener(address, num_processes, **options):
    """Process 0 in a thread; yields its future result, which is closed in the end."""
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(call_roll, address, 0, num_processes, timeout=20, **options)
        yield future
        for connection in future.result().connections.values():
            connection.close()


def connected(port):
    """A connection to process 0, as soon as it listens."""
    for _ in range(100):
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except OSError:
            time.sleep(0.05)
    raise AssertionError("nothing listens")


def test_all_processes_arrive():
    assert call_all([3, 1, 0, 2]) == [None] * 4


def test_hundreds_of_processes():
    assert call_all(range(200), timeout=30) == [None] * 200


def test_a_late_process():
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(call_roll, address, 1, 2, timeout=10)
        with pytest.raises(TimeoutError):
            first.result(0.3)
        for roll in (call_roll(address, 0, 2, timeout=10), first.result(5)):
            roll.connections.popitem()[1].close()


def test_missing_processes_are_named():
    expected = "processes 2 and 4 did not connect within 4 s"
    assert call_all([0, 1, 3], [5, 5, 5], timeout=4.0) == [expected] * 3


def test_process_0_is_missing():
    (expected,) = call_all([1], [2], timeout=0.5)
    assert expected.startswith("no answer at 127.0.0.1:")
    assert "within 0.5 s, where process 0 should be" in expected


def test_two_processes_with_the_same_index():
    expected = "two processes have the index 1: give each its own, from 0 on"
    assert expected in call_all([0, 1, 1], [3, 3, 3], timeout=30.0)


def test_different_numbers_of_processes():
    expected = "process 1 was given 8 processes and process 0 was given 2"
    assert [text[: len(expected)] for text in call_all([0, 1], [2, 8])] == [expected] * 2


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_a_process_that_is_started_again(order):
    """Its engine restarts a process that died while others were missing, also after the last."""
    address = f"127.0.0.1:{free_port()}"
    with listener(address, 3) as first:
        port = int(address.rpartition(":")[2])
        dead = connected(port)
        call(dead, "", seconds=5)
        dead.sendall(b'{"process": 1, "num_processes": 3, "token": "a"}\n')
        dead.close()
        time.sleep(0.2)
        with ThreadPoolExecutor(2) as threads:
            both = []
            for process in order:
                both.append(threads.submit(call_roll, address, process, 3, timeout=10))
                time.sleep(0.3)
            for future in both:
                future.result().connections[0].close()
        assert first.result().connections.keys() == {1, 2}


def test_a_process_that_ended_and_stays_away(monkeypatch):
    """It is reported like one that ends after the roll call."""
    monkeypatch.setattr(roll_call, "RESTART_SECONDS", 0.2)
    address = f"127.0.0.1:{free_port()}"
    with listener(address, 3) as first:
        dead = connected(int(address.rpartition(":")[2]))
        call(dead, "", seconds=5)
        dead.sendall(b'{"process": 1, "num_processes": 3, "token": "a"}\n')
        dead.close()
        call_roll(address, 2, 3, timeout=10).connections[0].close()
        assert first.result().connections.keys() == {1, 2}


def send(text):
    def strange(port, stack):
        stranger = stack.enter_context(connected(port))
        with suppress(ConnectionError):  # it is dropped while it sends
            stranger.sendall(text)

    return strange


def say_nothing(port, stack):
    """Hold connections open; more than process 0 serves at once."""
    for _ in range(300):
        stack.enter_context(connected(port))


def claim(secret):
    """Claim an index that another process has, without the secret."""

    def strange(port, stack):
        stranger = stack.enter_context(connected(port))
        with pytest.raises(OSError, match=r"closed|reset"):
            call(stranger, secret, seconds=5)

    return strange


def send_noise(port, stack):
    numbers = random.Random(4)
    for number in range(1000):
        data = numbers.randbytes(numbers.randrange(200))
        with connected(port) as stranger, suppress(ConnectionError):
            stranger.sendall((MAGIC if number % 2 else b"") + data)


@pytest.mark.parametrize(
    "strange",
    [
        pytest.param(send(b"GET / HTTP/1.1\r\n\r\n"), id="http"),
        pytest.param(send(b'{"process": 1, "num_processes": 3, "token": "x"}\n'), id="a claim"),
        pytest.param(send(b"\xff" * 10_000_000), id="a huge line"),
        pytest.param(send(MAGIC + bytes(NONCE_BYTES) + b"\n" * 1000), id="a wrong proof"),
        pytest.param(claim("another"), id="another secret"),
        pytest.param(claim(""), id="no secret"),
        pytest.param(say_nothing, id="silent"),
        pytest.param(send_noise, id="a thousand"),
    ],
)
def test_strangers_are_dropped(strange, monkeypatch):
    """And do not delay the others, whatever time they are given."""
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 60.0)
    address = f"127.0.0.1:{free_port()}"
    with listener(address, 3, secret="s"), ExitStack() as stack:
        strange(int(address.rpartition(":")[2]), stack)
        started = time.monotonic()
        with ThreadPoolExecutor(2) as threads:
            both = [
                threads.submit(call_roll, address, n, 3, timeout=20, secret="s") for n in (1, 2)
            ]
            for future in both:
                future.result().connections[0].close()
        assert time.monotonic() - started < 15


def test_strangers_are_logged():
    """The first by name; all processes that come later are served."""
    address, lines = f"127.0.0.1:{free_port()}", []
    with listener(address, 2, secret="s", log=lines.append), ExitStack() as stack:
        for _ in range(10):
            send(b"x" * 8)(int(address.rpartition(":")[2]), stack)
        for _ in range(100):
            if len(lines) > 5:
                break
            time.sleep(0.05)
        call_roll(address, 1, 2, timeout=10, secret="s").connections[0].close()
    assert lines[0] == "dropped a connection from 127.0.0.1: it uses another protocol"
    assert lines[5] == "drops more such connections without logging them"
    assert len(lines) == 6


def test_random_bytes_after_a_right_handshake():
    address, lines = f"127.0.0.1:{free_port()}", []
    numbers = random.Random(5)
    with listener(address, 2, secret="s", log=lines.append):
        for _ in range(40):
            with connected(int(address.rpartition(":")[2])) as stranger:
                call(stranger, "s", seconds=5)
                noise = numbers.randbytes(numbers.randrange(100))
                texts = (noise, b"[" * 3000, b'{"process": 1}', b'{"process": 1e999, "token": {}}')
                stranger.sendall(numbers.choice(texts) + b"\n")
        call_roll(address, 1, 2, timeout=10, secret="s").connections[0].close()
    assert lines[0] == "dropped a connection from 127.0.0.1: it did not register"


def test_another_secret(monkeypatch):
    monkeypatch.setattr(roll_call, "_MAX_REJECTIONS", 3)  # all within the timeout
    errors = call_all([0, 1], secrets=["a", "b"], timeout=3.0)
    assert errors[0].startswith("process 1 did not connect within 3 s (")
    assert errors[0].endswith(" unknown connections)")
    assert "rejects process 1: give all of them the same FTMESH_SECRET" in errors[1]


def test_where_a_secret_comes_from(tmp_path):
    file = tmp_path / "secret"
    file.write_text("abc\n")
    file.chmod(0o640)
    assert find_secret({}) == ""
    assert find_secret({"FTMESH_SECRET": "x", "FTMESH_SECRET_FILE": "none"}) == "x"
    variables = {"FTMESH_SECRET_FILE": str(file)}
    with pytest.raises(ArgumentError, match=r"others can read .* \(mode 640\): chmod 600 it"):
        find_secret(variables)
    file.chmod(0o400)
    assert find_secret(variables) == "abc"
    for name, problem in (("none", "No such file"), ("", "directory")):
        with pytest.raises(ArgumentError, match=problem):
            find_secret({"FTMESH_SECRET_FILE": str(tmp_path / name)})
    file.chmod(0o600)
    file.write_text(" \n")
    with pytest.raises(ArgumentError, match="is empty"):
        find_secret(variables)
    for data in (b"a\0b", b"\xff" * 32, b"a\nb"):  # workers could not be given it
        file.write_bytes(data)
        with pytest.raises(ArgumentError, match="is not printable ASCII"):
            find_secret(variables)
    with pytest.raises(ArgumentError, match="FTMESH_SECRET is not printable"):
        find_secret({"FTMESH_SECRET": "a\udcff"})
    file.unlink()
    os.mkfifo(file, 0o600)  # nobody writes to it
    with pytest.raises(ArgumentError, match="or not a file"):
        find_secret(variables)


def test_missing_processes_are_lost_peers():
    address = f"127.0.0.1:{free_port()}"
    for process in (0, 1):
        with pytest.raises(PeerLostError) as raised:
            call_roll(address, process, 2, timeout=0.5)
        assert raised.value.status == 76


def test_process_0_listens_at_one_address():
    """Another address of the host, even a loopback one, is refused."""
    port = free_port()
    with listener(f"127.0.0.1:{port}", 2):
        connected(port).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)
        call_roll(f"127.0.0.1:{port}", 1, 2, timeout=10).connections[0].close()


def test_process_0_is_elsewhere():
    with pytest.raises(ClusterError, match=r"does not have the address 192.0.2.1:80: give all"):
        call_roll("192.0.2.1:80", 0, 2, timeout=1)


def test_a_name_that_leads_to_loopback(monkeypatch):
    """As Debian's own name of a host does: process 0 takes the address that others use."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        own = probe.getsockname()[0]
    port, resolve = free_port(), socket.getaddrinfo

    def resolve_name(host, *arguments, **options):
        return resolve({"this-host": "127.0.1.1"}.get(host, host), *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_name)
    with listener(f"this-host:{port}", 3) as first, ThreadPoolExecutor(2) as threads:
        near = threads.submit(call_roll, f"this-host:{port}", 1, 3, timeout=10)
        far = threads.submit(call_roll, f"{own}:{port}", 2, 3, timeout=10)
        rolls = [first.result(), near.result(), far.result()]
        for roll in rolls:
            at = f"{own}:{port}"
            assert (roll.host, roll.coordinator, roll.bind) == (own, at, at)
            roll.connections.popitem()[1].close()


def test_addresses():
    assert (join_address("a", 1), join_address("::1", 1)) == ("a:1", "[::1]:1")
    hosts = ("localhost", "127.0.1.1", "::1", "node0", "10.0.0.1")
    assert [is_loopback(host) for host in hosts] == [True] * 3 + [False] * 2


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ClusterError, match=r"cannot listen at .*: Address already in use"):
            call_roll(address, 0, 2, timeout=1)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        "host:",
        ":80",
        "host:port",
        "host:0",
        "h:99999",
        "::1:80",
        "h:٨٠",
        "h:" + "9" * 5000,
    ],
)
def test_invalid_addresses(address):
    with pytest.raises(ArgumentError, match="is not a coordinator address: give HOST:PORT"):
        call_roll(address, 1, 2, timeout=1)


def test_a_secret_that_systemd_gives(tmp_path):
    """Its access list for the user of the unit appears as the access of a group."""
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (tmp_path / "link").symlink_to(credentials)
    for folder in (credentials, tmp_path):
        (folder / "secret").write_text("abc\n")
        (folder / "secret").chmod(0o440)
    variables = {"FTMESH_SECRET_FILE": str(credentials / "secret")}
    with pytest.raises(ArgumentError, match=r"others can read .* \(mode 440\)"):
        find_secret(variables)
    variables["CREDENTIALS_DIRECTORY"] = str(tmp_path / "link")
    assert find_secret(variables) == "abc"
    with pytest.raises(ArgumentError, match="others can read"):
        find_secret({**variables, "FTMESH_SECRET_FILE": str(tmp_path / "secret")})
    (credentials / "secret").chmod(0o444)
    with pytest.raises(ArgumentError, match=r"others can read .* \(mode 444\)"):
        find_secret(variables)
