"""Keepers hold what they were given, whole, and say no where they must."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
import zlib

import pytest

from ftmesh.elastic import isolated_main
from ftmesh.elastic.peer_store import Blobs, Keeper, Refused, keeper_command, serve
from ftmesh.elastic.rpc import ChannelClosed, Listener, connect
from ftmesh.errors import ClusterError
from tests.support.peer_stores import SECRET, Running, running

LIMIT = 10_000_000


@pytest.fixture(scope="module")
def process():
    with running(1, LIMIT) as keepers:
        yield keepers[0]


@pytest.fixture
def keeper(process):
    with process.ask() as keeper:
        yield keeper
        keeper.drop("")


class TestWhatItHolds:
    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 10_000])
    def test_what_was_put_is_got(self, keeper, data):
        keeper.put("state/1/30/0.bin", data)
        assert keeper.get("state/1/30/0.bin") == data
        keeper.put("state/1/30/0.bin", memoryview(b"other"), zlib.crc32(b"other"))
        assert keeper.get("state/1/30/0.bin") == b"other"

    def test_names_and_dropping(self, keeper):
        for name in ("a/2", "a/1", "b", "a-1"):
            keeper.put(name, b"1")
        assert keeper.names() == ["a-1", "a/1", "a/2", "b"]
        assert keeper.names("a/") == ["a/1", "a/2"]
        assert keeper.drop("a/") == 2
        assert keeper.drop("a/") == 0
        assert keeper.names() == ["a-1", "b"]

    def test_what_it_has_not(self, keeper):
        with pytest.raises(ClusterError, match=f"{keeper.address} refuses: it has no c"):
            keeper.get("c")
        assert keeper.names() == []  # and it can be asked on

    @pytest.mark.parametrize("name", ["", "../b", "a..b", "A", "a b", "a\nb", "a\0", "x" * 201])
    def test_names_that_are_not_plain(self, keeper, name):
        with pytest.raises(ClusterError, match="refuses"):
            keeper.put(name, b"1")
        if name:
            with pytest.raises(ClusterError, match="is no plain name"):
                keeper.drop(name)
        assert keeper.names() == []

    def test_several_clients(self, process, keeper):
        def work(number):
            with process.ask() as own:
                for turn in range(20):
                    own.put(f"{number}/{turn % 3}", bytes([number]) * 10_000)
                    assert own.get(f"{number}/{turn % 3}") == bytes([number]) * 10_000
            done.append(number)

        done = []
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(done) == [0, 1, 2, 3]
        assert len(keeper.names()) == 12


class TestTheLimit:
    def test_what_is_too_much_is_refused_before_it_is_sent(self, keeper):
        keeper.put("a", bytes(LIMIT - 10))
        with pytest.raises(
            ClusterError, match=f"b has 11 bytes, and 10 of {LIMIT} are free: drop some"
        ):
            keeper.put("b", bytes(11))
        keeper.put("b", bytes(10))
        keeper.drop("a")
        keeper.put("c", bytes(LIMIT - 10))
        assert keeper.names() == ["b", "c"]

    def test_what_comes_to_nothing_gives_its_room_back(self, keeper):
        for _ in range(3):
            with pytest.raises(ClusterError, match="damaged on its way"):
                keeper.put("a", bytes(LIMIT), crc32=1)
        keeper.put("a", bytes(LIMIT))
        assert keeper.drop("a") == 1
        keeper.put("a", bytes(LIMIT))

    def test_room_that_others_are_filling_is_not_free(self):
        blobs = Blobs(10)
        with blobs.room("a", 6):
            with pytest.raises(Refused, match="4 of 10 are free"), blobs.room("b", 6):
                pass
            blobs.put("a", b"123456", zlib.crc32(b"123456"))
            with blobs.room("b", 4):
                blobs.put("b", b"1234", zlib.crc32(b"1234"))
        with pytest.raises(Refused, match="0 of 10 are free"), blobs.room("c", 1):
            pass


class TestWhatIsDamaged:
    def test_on_its_way_in(self, keeper):
        keeper.put("a", b"old")
        with pytest.raises(ClusterError, match="a was damaged on its way"):
            keeper.put("a", b"new", crc32=zlib.crc32(b"mew"))
        assert keeper.get("a") == b"old"

    def test_half_of_it(self, process, keeper):
        """One who goes in the midst of giving leaves what there was."""
        keeper.put("a", b"old")
        channel = connect(process.address, SECRET, timeout=10)
        channel.send({"do": "put", "name": "a", "bytes": 10**6, "crc32": 0})
        assert channel.receive(10) == ({}, b"")
        channel._socket.sendall(b"\0\0\0\2" + (10**6).to_bytes(8, "big") + b"{}" + bytes(1000))
        channel.close()
        until = time.monotonic() + 10
        while "b" not in keeper.names():  # nor is its room lost
            with contextlib.suppress(Refused):
                keeper.put("b", bytes(LIMIT - 3))
            assert time.monotonic() < until
        assert keeper.get("a") == b"old"

    def test_in_its_memory(self):
        """A byte flips there: it is not given to anyone."""
        blobs = Blobs(100)
        with blobs.room("a", 3):
            blobs.put("a", b"abc", zlib.crc32(b"abc"))
        blobs._held["a"] = b"abd", zlib.crc32(b"abc")
        with (
            Listener(lambda channel: serve(blobs, channel), secret=SECRET) as listener,
            Keeper(listener.address, SECRET, 10) as keeper,
        ):
            with pytest.raises(ClusterError, match="refuses: a was damaged in its memory"):
                keeper.get("a")
            assert keeper.names() == ["a"]


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"do": "eval", "name": "1"},
        {"do": "put", "name": "a", "bytes": -1, "crc32": 0},
        {"do": "put", "name": ["a"], "bytes": 1, "crc32": 0},
        {"do": "get", "name": None},
        {"do": "names"},
    ],
)
def test_questions_that_make_no_sense(process, keeper, message):
    with connect(process.address, SECRET, timeout=10) as channel:
        channel.send(message)
        assert "refused" in channel.receive(10)[0]
        channel.send({"do": "names", "prefix": ""})
        assert json.loads(channel.receive(10)[1]) == []


class TestItsProcess:
    def test_it_starts_at_once_and_with_the_standard_library_alone(self):
        run = keeper_command(10)
        assert run[1:3] == ["-I", "-S"]  # nothing else could be imported
        begin = time.monotonic()
        done = subprocess.run(
            [run[0], "-X", "importtime", *run[1:]],
            env={"FTMESH_SECRET": "a"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )
        assert time.monotonic() - begin < 5  # 0.06 s on a machine that is not busy
        assert done.stdout.startswith("127.0.0.1:")
        imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
        assert "ftmesh.elastic.rpc" in imported
        assert not {"numpy", "jax"} & set(imported)

    def test_it_does_not_start_without_a_secret(self):
        done = subprocess.run(
            keeper_command(), env={}, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == 1
        assert "a listener without a secret would let anyone in: give one" in done.stderr

    def test_it_ends_with_its_standard_input_and_not_with_a_terminal(self):
        keeper = Running()
        try:
            for number in (signal.SIGINT, signal.SIGHUP):
                os.kill(keeper.process.pid, number)
            with keeper.ask() as client:
                client.put("a", b"1")
                keeper.process.stdin.close()
                assert keeper.process.wait(10) == 0
                with pytest.raises(ChannelClosed, match=keeper.address):
                    client.get("a")
        finally:
            keeper.process.stdout.close()
            keeper.process.kill()

    def test_a_dead_one_is_told_quickly(self):
        with running(1) as keepers, keepers[0].ask(timeout=60) as client:
            client.put("a", b"1")
            keepers[0].kill()
            begin = time.monotonic()
            with pytest.raises(ClusterError, match=client.address):
                client.get("a")
            with pytest.raises(ClusterError, match=f"nothing answers at {client.address}"):
                client.put("a", b"1")
            assert time.monotonic() - begin < 5

    def test_one_that_is_stuck_is_told_in_time(self):
        with running(1) as keepers, keepers[0].ask(timeout=60) as client:
            client.put("a", b"1")
            keepers[0].stop()
            client.timeout = 0.3
            for ask in (client.names, lambda: client.put("b", bytes(10**8))):
                with pytest.raises(ClusterError, match=client.address):
                    ask()

    def test_a_stranger(self, process):
        with pytest.raises(ClusterError, match="is no listener that knows the secret"):
            Keeper(process.address, "guess", 10).names()


def test_modules_alone_get_their_arguments():
    assert isolated_main.command("a.b", "1")[-3:] == [isolated_main.__file__, "a.b", "1"]
