"""Peer store: a process next to each worker that keeps blobs in memory and outlives the worker.

The process (`store_command`) reads its secret from ``FTMESH_SECRET`` and listens at
``FTMESH_KEEPER_HOST``, loopback by default. It prints its address and exits when stdin closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ftmesh.elastic.rpc import LOOPBACK, STALL_SECONDS, Channel, ChannelClosed, Listener, connect
from ftmesh.errors import ClusterError

CAPACITY = 1 << 32  # bytes
MAX_BLOB_BYTES = 1 << 36
CONNECT_SECONDS = 2.0  # to a store; a host that is gone is not waited for
MIN_CHECKSUM_RATE = 1e8  # bytes per second that a store checks at least
MAX_THREADS = 16  # that ask stores at once
MAX_NAME_CHARS = 200
_NAME = re.compile(rf"[a-z0-9./-]{{0,{MAX_NAME_CHARS}}}")

# With an empty package `ftmesh`, whose modules would import JAX, a store starts at once.
_PROGRAM = """
import sys, types
package = sys.modules["ftmesh"] = types.ModuleType("ftmesh")
package.__path__ = sys.argv[2:]
from ftmesh.elastic import peer_store
peer_store.main()
"""

T = TypeVar("T")
Holders = Mapping[str, Sequence[int]]  # blob name -> hosts that hold it


class RequestRejected(ClusterError):  # noqa: N818
    """A peer store rejects a request."""


class PeerStores:
    """The peer stores of all hosts, some of which may be gone.

    The store of this host comes first, then those after it. A store that does not answer within
    `timeout` seconds is not used again; `say` is called if it is lost or rejects a request.
    """

    def __init__(
        self,
        addresses: Mapping[int, str],
        host: int,
        secret: str,
        timeout: float,
        say: Callable[[str], None],
    ) -> None:
        self.hosts = sorted(addresses, key=lambda other: (other < host, other))
        self._stores = {h: PeerStore(addresses[h], secret, timeout) for h in self.hosts}
        self._say = say
        self._lost: set[int] = set()
        self._threads = ThreadPoolExecutor(MAX_THREADS, "peer stores")

    def put(self, blobs: Mapping[str, bytes], copies: int) -> int:
        """Put blobs into the first `copies` stores that take them; return how many did."""
        checksums = {name: zlib.crc32(data) for name, data in blobs.items()}

        def put_all(store: PeerStore) -> bool:
            for name, data in blobs.items():
                store.put(name, data, checksums[name])
            return True

        taken = 0
        for host in self.hosts:
            if taken < copies and self._ask(host, put_all):
                taken += 1
        return taken

    def holders(self, prefix: str) -> Holders:
        """Return which stores hold which blobs whose names start with `prefix`."""
        answers = self._ask_all(lambda store: store.names(prefix))
        holders: dict[str, list[int]] = {}
        for host, names in zip(self.hosts, answers, strict=True):
            for name in names or []:
                holders.setdefault(name, []).append(host)
        return holders

    def get(self, names: Sequence[str], holders: Holders) -> list[bytes | None]:
        """Return blobs; None for one that no store returns intact."""
        return list(self._threads.map(lambda name: self._get(name, holders), names))

    def drop(self, prefix: str) -> None:
        """Drop the blobs whose names start with `prefix` from all stores."""
        self._ask_all(lambda store: store.drop(prefix))

    def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown()
        for store in self._stores.values():
            store.close()

    def _get(self, name: str, holders: Holders) -> bytes | None:
        for host in holders.get(name, ()):
            data = self._ask(host, lambda store: store.get(name))
            if data is not None:
                return data
        return None

    def _ask_all(self, request: Callable[[PeerStore], T]) -> list[T | None]:
        return list(self._threads.map(lambda host: self._ask(host, request), self.hosts))

    def _ask(self, host: int, request: Callable[[PeerStore], T]) -> T | None:
        if host in self._lost:
            return None
        try:
            return request(self._stores[host])
        except RequestRejected as error:
            self._say(f"host {host}: {error}")
        except ClusterError as error:
            if host not in self._lost:  # two threads may have asked at once
                self._lost.add(host)
                self._say(f"the peer store of host {host} is lost: {error}")
        return None


class PeerStore:
    """A client of one peer store. It connects with the first request.

    A request that is rejected or not answered within `timeout` seconds raises a `ClusterError` that
    names the address.
    """

    def __init__(self, address: str, secret: str, timeout: float) -> None:
        self.address, self.timeout = address, timeout
        self._secret = secret
        self._channel: Channel | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> PeerStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def put(self, name: str, data: bytes | memoryview, crc32: int | None = None) -> None:
        """Store a blob, replacing one of the same name."""
        checksum = zlib.crc32(data) if crc32 is None else crc32
        size = memoryview(data).nbytes
        request = {"do": "put", "name": name, "bytes": size, "crc32": checksum}
        with self._request(request) as channel:
            self._receive(channel)
            channel.send({}, data)
            self._receive(channel, size)

    def get(self, name: str) -> bytes:
        """Return a blob, with its checksum verified."""
        with self._request({"do": "get", "name": name}) as channel:
            header, _ = self._receive(channel)
            _, data = self._receive(channel, header["bytes"])
        if zlib.crc32(data) != header["crc32"]:
            raise ClusterError(f"{name} of the peer store at {self.address} was damaged in transit")
        return data

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all blobs that start with `prefix`, sorted."""
        with self._request({"do": "names", "prefix": prefix}) as channel:
            names: list[str] = json.loads(self._receive(channel)[1])
        return names

    def drop(self, prefix: str) -> int:
        """Drop all blobs whose names start with `prefix`; return how many there were."""
        with self._request({"do": "drop", "prefix": prefix}) as channel:
            return int(self._receive(channel)[0]["count"])

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    @contextlib.contextmanager
    def _request(self, message: dict[str, Any]) -> Iterator[Channel]:
        """Send a request; after an error in the middle of it, reconnect for the next one."""
        with self._lock:
            if self._channel is None:
                self._channel = connect(
                    self.address,
                    self._secret,
                    timeout=min(self.timeout, CONNECT_SECONDS),
                    stall=self.timeout,
                    max_data=MAX_BLOB_BYTES,
                )
            try:
                self._channel.send(message)
                yield self._channel
            except RequestRejected:
                raise
            except BaseException:
                self.close()
                raise

    def _receive(self, channel: Channel, checked_bytes: int = 0) -> tuple[dict[str, Any], bytes]:
        """Return the next frame; the store may compute a checksum of `checked_bytes` before."""
        seconds = self.timeout + checked_bytes / MIN_CHECKSUM_RATE
        frame = channel.receive(seconds)
        if frame is None:
            raise ClusterError(
                f"no answer from the peer store at {self.address} for {seconds:.3g} s"
            )
        if (why := frame[0].get("rejected")) is not None:
            raise RequestRejected(f"the peer store at {self.address} rejects it: {why}")
        return frame


# The process of a store -------------------------------------------------------------------------


def store_command(capacity: int = CAPACITY) -> list[str]:
    """Return the command that runs a store; it needs ``FTMESH_SECRET`` in its environment."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, str(capacity), package]


def main() -> None:
    """Run a store until stdin closes."""
    for signum in (signal.SIGINT, signal.SIGHUP):  # from a terminal, meant for the launcher
        signal.signal(signum, signal.SIG_IGN)
    blobs = BlobStore(int(sys.argv[1]))
    listener = Listener(
        lambda channel: serve(blobs, channel),
        secret=os.environ.get("FTMESH_SECRET", ""),
        host=os.environ.get("FTMESH_KEEPER_HOST", LOOPBACK),
        max_data=min(blobs.capacity, MAX_BLOB_BYTES),
    )
    print(listener.address, flush=True)
    sys.stdin.buffer.read()
    os._exit(0)  # without waiting for clients


def serve(blobs: BlobStore, channel: Channel) -> None:
    """Answer the requests of one client until it disconnects."""
    with channel, contextlib.suppress(ChannelClosed, MemoryError):
        while frame := channel.receive():
            try:
                _answer(blobs, channel, frame[0])
            except RequestRejected as error:
                channel.send({"rejected": str(error)})


def _answer(blobs: BlobStore, channel: Channel, message: dict[str, Any]) -> None:
    """Handle a request. Sizes go before the data, so that a blob can be rejected or awaited."""
    match message:
        case {"do": "put", "name": str(name), "bytes": int(size), "crc32": int(crc32)}:
            with blobs.reserve(name, size):
                channel.send({})
                frame = channel.receive(STALL_SECONDS)
                if frame is None:
                    raise ChannelClosed(f"{channel.peer} did not send {name}")
                _, data = frame
                if len(data) != size:
                    raise RequestRejected(f"{name} has {len(data)} bytes, not the {size} announced")
                blobs.put(name, data, crc32)
            channel.send({})
        case {"do": "get", "name": str(name)}:
            data, crc32 = blobs.get(name)
            channel.send({"bytes": len(data), "crc32": crc32})
            if zlib.crc32(data) != crc32:
                raise RequestRejected(f"{name} was damaged in memory")
            channel.send({}, data)
        case {"do": "names", "prefix": str(prefix)}:
            channel.send({}, json.dumps(blobs.names(prefix)).encode())
        case {"do": "drop", "prefix": str(prefix)}:
            channel.send({"count": blobs.drop(prefix)})
        case _:
            raise RequestRejected(f"unknown request {str(message)[:100]}")


class BlobStore:
    """The blobs of a store, with their checksums: `capacity` bytes at most. Thread-safe."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blobs: dict[str, tuple[bytes, int]] = {}
        self._used = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def reserve(self, name: str, size: int) -> Iterator[None]:
        """Reserve memory for a blob that is `put` in the block; released if the block fails."""
        _check_name(name)
        if not name or size < 0:
            raise RequestRejected(f"a blob named {name!r} of {size} bytes")
        with self._lock:
            if self._used + size > self.capacity:
                raise RequestRejected(
                    f"{name} has {size} bytes, and {max(self.capacity - self._used, 0)} of "
                    f"{self.capacity} are free"
                )
            self._used += size
        try:
            yield
        except BaseException:
            with self._lock:
                self._used -= size
            raise

    def put(self, name: str, data: bytes, crc32: int) -> None:
        """Store a blob for which memory is reserved, replacing one of the same name."""
        if zlib.crc32(data) != crc32:
            raise RequestRejected(f"{name} was damaged in transit")
        with self._lock:
            self._used -= self._size(name)
            self._blobs[name] = data, crc32

    def get(self, name: str) -> tuple[bytes, int]:
        """Return a blob and the checksum it arrived with."""
        with self._lock:
            if name not in self._blobs:
                raise RequestRejected(f"there is no {name}")
            return self._blobs[name]

    def names(self, prefix: str) -> list[str]:
        """Return the names that start with `prefix`, sorted."""
        _check_name(prefix)
        with self._lock:
            return sorted(name for name in self._blobs if name.startswith(prefix))

    def drop(self, prefix: str) -> int:
        """Drop blobs whose names start with `prefix`; return how many there were."""
        names = self.names(prefix)
        with self._lock:
            for name in names:
                self._used -= self._size(name)
                self._blobs.pop(name, None)
        return len(names)

    def _size(self, name: str) -> int:
        return len(self._blobs[name][0]) if name in self._blobs else 0


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or ".." in name:
        raise RequestRejected(
            f"{name[:MAX_NAME_CHARS]!r} is not a plain name: up to {MAX_NAME_CHARS} of a-z, 0-9, "
            "'.', '/' and '-', and no '..'"
        )
