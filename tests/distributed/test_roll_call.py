"""Everyone is there, or everyone learns who is not."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from ftmesh.distributed.initialize import call_roll
from ftmesh.elastic.pod_environment import free_port
from ftmesh.errors import ArgumentError, ClusterError


def called(numbers, totals=None, limit=10.0, before=lambda port: None):
    """What each of these processes learns."""
    port = free_port()
    totals = totals or [len(numbers)] * len(numbers)
    address = f"127.0.0.1:{port}"

    def call(number, total):
        try:
            return call_roll(address, number, total, bind=address, limit=limit)
        except ClusterError as error:
            return str(error)

    with ThreadPoolExecutor(len(numbers)) as threads:
        waiting = [threads.submit(call, *pair) for pair in zip(numbers, totals, strict=True)]
        before(port)
        return [each.result() for each in waiting]


def test_all_come():
    assert called([3, 1, 0, 2]) == [None] * 4


def test_hundreds_come():
    assert called(range(200), limit=30) == [None] * 200


def test_one_comes_late():
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(call_roll, address, 1, 2, bind=address, limit=10)
        with pytest.raises(TimeoutError):
            first.result(0.3)
        call_roll(address, 0, 2, bind=address, limit=10)
        assert first.result(5) is None


def test_the_missing_are_named_to_all_who_came():
    said = "processes 2 and 4 did not come within 4 s"
    assert called([0, 1, 3], [5, 5, 5], limit=4.0) == [said] * 3


def test_nobody_is_process_0():
    (said,) = called([1], [2], limit=0.5)
    assert said.startswith("nobody answered at 127.0.0.1:")
    assert "within 0.5 s, where process 0 should be" in said


def test_two_have_one_number():
    said = "two processes have the number 1: give each its own, from 0 on"
    assert said in called([0, 1, 1], [3, 3, 3], limit=30.0)


def test_one_was_told_of_another_number():
    said = "process 1 was told of 8 processes, and process 0 of 2"
    assert [text[: len(said)] for text in called([0, 1], [2, 8])] == [said] * 2


def test_strangers_change_nothing():
    def strange(port):
        for text in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"process": "x"}\n', b"\xff" * 10_000):
            for _ in range(100):  # until process 0 is there
                try:
                    with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                        connection.sendall(text)
                    break
                except OSError:
                    continue

    assert called([0, 1, 2], before=strange) == [None] * 3


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ClusterError, match=r"cannot listen at .*: Address already in use"):
            call_roll(address, 0, 2, bind=address, limit=1)


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
def test_addresses_that_are_none(address):
    with pytest.raises(ArgumentError, match="is no address of a coordinator: give HOST:PORT"):
        call_roll(address, 1, 2, bind=address, limit=1)
