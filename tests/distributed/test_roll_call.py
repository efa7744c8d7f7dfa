"""All processes are there, or all of them learn who is missing."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from ftmesh.distributed.startup import call_roll
from ftmesh.elastic.rpc import free_port
from ftmesh.errors import ArgumentError, ClusterError


def call_all(numbers, totals=None, timeout=10.0, before=lambda port: None):
    """Return the error of each process, or None."""
    port = free_port()
    totals = totals or [len(numbers)] * len(numbers)
    address = f"127.0.0.1:{port}"

    def call(number, total):
        try:
            return call_roll(address, number, total, bind=address, timeout=timeout)
        except ClusterError as error:
            return str(error)

    with ThreadPoolExecutor(len(numbers)) as threads:
        waiting = [threads.submit(call, *pair) for pair in zip(numbers, totals, strict=True)]
        before(port)
        return [future.result() for future in waiting]


def test_all_processes_arrive():
    assert call_all([3, 1, 0, 2]) == [None] * 4


def test_hundreds_of_processes():
    assert call_all(range(200), timeout=30) == [None] * 200


def test_a_late_process():
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(call_roll, address, 1, 2, bind=address, timeout=10)
        with pytest.raises(TimeoutError):
            first.result(0.3)
        call_roll(address, 0, 2, bind=address, timeout=10)
        assert first.result(5) is None


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


def test_strangers_are_ignored():
    def strange(port):
        for text in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"process": "x"}\n', b"\xff" * 10_000):
            for _ in range(100):  # until process 0 is there
                try:
                    with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                        connection.sendall(text)
                    break
                except OSError:
                    continue

    assert call_all([0, 1, 2], before=strange) == [None] * 3


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ClusterError, match=r"cannot listen at .*: Address already in use"):
            call_roll(address, 0, 2, bind=address, timeout=1)


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
        call_roll(address, 1, 2, bind=address, timeout=1)
