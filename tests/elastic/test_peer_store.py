"""Peer stores hold blobs intact, and reject what they must."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
import zlib

import pytest

from ftmesh.elastic.peer_store import BlobStore, PeerStore, RequestRejected, serve, store_command
from ftmesh.elastic.rpc import ChannelClosed, Listener, connect
from ftmesh.errors import ClusterError
from tests.support.peer_stores import SECRET, StoreProcess, running_stores

CAPACITY = 10_000_000


@pytest.fixture(scope="module")
def process():
    with running_stores(1, CAPACITY) as stores:
        yield stores[0]


@pytest.fixture
def store(process):
    with process.client() as store:
        yield store
        store.drop("")


class TestBlobs:
    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 10_000])
    def test_put_and_get(self, store, data):
        store.put("state/1/30/0.bin", data)
        assert store.get("state/1/30/0.bin") == data
        store.put("state/1/30/0.bin", memoryview(b"other"), zlib.crc32(b"other"))
        assert store.get("state/1/30/0.bin") == b"other"

    def test_names_and_drop(self, store):
        for name in ("a/2", "a/1", "b", "a-1"):
            store.put(name, b"1")
        assert store.names() == ["a-1", "a/1", "a/2", "b"]
        assert store.names("a/") == ["a/1", "a/2"]
        assert store.drop("a/") == 2
        assert store.drop("a/") == 0
        assert store.names() == ["a-1", "b"]

    def test_a_missing_blob(self, store):
        with pytest.raises(ClusterError, match=f"{store.address} rejects it: there is no c"):
            store.get("c")
        assert store.names() == []  # it can still be used

    @pytest.mark.parametrize("name", ["", "../b", "a..b", "A", "a b", "a\nb", "a\0", "x" * 201])
    def test_invalid_names(self, store, name):
        with pytest.raises(ClusterError, match="rejects it"):
            store.put(name, b"1")
        if name:
            with pytest.raises(ClusterError, match="is not a plain name"):
                store.drop(name)
        assert store.names() == []

    def test_several_clients(self, process, store):
        def use(number):
            with process.client() as own:
                for i in range(20):
                    own.put(f"{number}/{i % 3}", bytes([number]) * 10_000)
                    assert own.get(f"{number}/{i % 3}") == bytes([number]) * 10_000
            done.append(number)

        done = []
        threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(done) == [0, 1, 2, 3]
        assert len(store.names()) == 12


class TestCapacity:
    def test_a_blob_that_is_too_large_is_rejected_before_it_is_sent(self, store):
        store.put("a", bytes(CAPACITY - 10))
        with pytest.raises(ClusterError, match=f"b has 11 bytes, and 10 of {CAPACITY} are free"):
            store.put("b", bytes(11))
        store.put("b", bytes(10))
        store.drop("a")
        store.put("c", bytes(CAPACITY - 10))
        assert store.names() == ["b", "c"]

    def test_a_failed_put_releases_its_memory(self, store):
        for _ in range(3):
            with pytest.raises(ClusterError, match="damaged in transit"):
                store.put("a", bytes(CAPACITY), crc32=1)
        store.put("a", bytes(CAPACITY))
        assert store.drop("a") == 1
        store.put("a", bytes(CAPACITY))

    def test_reserved_memory_is_not_free(self):
        blobs = BlobStore(10)
        with blobs.reserve("a", 6):
            with pytest.raises(RequestRejected, match="4 of 10 are free"), blobs.reserve("b", 6):
                pass
            blobs.put("a", b"123456", zlib.crc32(b"123456"))
            with blobs.reserve("b", 4):
                blobs.put("b", b"1234", zlib.crc32(b"1234"))
        with pytest.raises(RequestRejected, match="0 of 10 are free"), blobs.reserve("c", 1):
            pass


class TestDamage:
    def test_in_transit(self, store):
        store.put("a", b"old")
        with pytest.raises(ClusterError, match="a was damaged in transit"):
            store.put("a", b"new", crc32=zlib.crc32(b"mew"))
        assert store.get("a") == b"old"

    def test_an_incomplete_put(self, process, store):
        """A client that disconnects in the middle of a put leaves the old blob."""
        store.put("a", b"old")
        channel = connect(process.address, SECRET, timeout=10)
        channel.send({"do": "put", "name": "a", "bytes": 10**6, "crc32": 0})
        assert channel.receive(10) == ({}, b"")
        channel._socket.sendall(b"\0\0\0\2" + (10**6).to_bytes(8, "big") + b"{}" + bytes(1000))
        channel.close()
        until = time.monotonic() + 10
        while "b" not in store.names():  # and its memory is released
            with contextlib.suppress(RequestRejected):
                store.put("b", bytes(CAPACITY - 3))
            assert time.monotonic() < until
        assert store.get("a") == b"old"

    def test_in_memory(self):
        """A byte flips: the blob is not returned."""
        blobs = BlobStore(100)
        with blobs.reserve("a", 3):
            blobs.put("a", b"abc", zlib.crc32(b"abc"))
        blobs._blobs["a"] = b"abd", zlib.crc32(b"abc")
        with (
            Listener(lambda channel: serve(blobs, channel), secret=SECRET) as listener,
            PeerStore(listener.address, SECRET, 10) as store,
        ):
            with pytest.raises(ClusterError, match="rejects it: a was damaged in memory"):
                store.get("a")
            assert store.names() == ["a"]


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
def test_invalid_requests(process, store, message):
    with connect(process.address, SECRET, timeout=10) as channel:
        channel.send(message)
        assert "rejected" in channel.receive(10)[0]
        channel.send({"do": "names", "prefix": ""})
        assert json.loads(channel.receive(10)[1]) == []


class TestProcess:
    def test_it_imports_only_the_standard_library(self):
        command = store_command(10)
        assert command[1:3] == ["-I", "-S"]  # nothing else could be imported
        begin = time.monotonic()
        done = subprocess.run(
            [command[0], "-X", "importtime", *command[1:]],
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

    def test_it_needs_a_secret(self):
        done = subprocess.run(
            store_command(), env={}, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == 1
        assert "a listener without a secret would admit anyone: give one" in done.stderr

    def test_it_ends_with_its_stdin_and_not_with_a_terminal(self):
        store = StoreProcess()
        try:
            for signum in (signal.SIGINT, signal.SIGHUP):
                os.kill(store.process.pid, signum)
            with store.client() as client:
                client.put("a", b"1")
                store.process.stdin.close()
                assert store.process.wait(10) == 0
                with pytest.raises(ChannelClosed, match=store.address):
                    client.get("a")
        finally:
            store.process.stdout.close()
            store.process.kill()

    def test_a_killed_store_is_noticed_quickly(self):
        with running_stores(1) as stores, stores[0].client(timeout=60) as client:
            client.put("a", b"1")
            stores[0].kill()
            begin = time.monotonic()
            with pytest.raises(ClusterError, match=client.address):
                client.get("a")
            with pytest.raises(ClusterError, match=f"nothing answers at {client.address}"):
                client.put("a", b"1")
            assert time.monotonic() - begin < 30  # half of the timeout

    def test_a_stopped_store_is_noticed_in_time(self):
        with running_stores(1) as stores, stores[0].client(timeout=60) as client:
            client.put("a", b"1")
            stores[0].stop()
            client.timeout = 0.3
            for request in (client.names, lambda: client.put("b", bytes(10**8))):
                with pytest.raises(ClusterError, match=client.address):
                    request()

    def test_a_stranger(self, process):
        with pytest.raises(ClusterError, match="is not a listener that knows the secret"):
            PeerStore(process.address, "guess", 10).names()
