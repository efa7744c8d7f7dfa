"""Keeper: a process beside a worker that holds blobs in memory, so that they outlive the worker.

Its secret is ``FTMESH_SECRET``, and it listens at ``FTMESH_KEEPER_HOST``, loopback where that is
not set. It says its address on one line, and ends when its standard input closes.

    keeper = Keeper("127.0.0.1:23456", secret, timeout=5)
    keeper.put("state/1/30/0.bin", data)

Blobs: bytes by name in memory, whole, with their checksums, up to a limit.
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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ftmesh.elastic.isolated_main import command
from ftmesh.elastic.pod_environment import LOOPBACK
from ftmesh.elastic.rpc import STALL_SECONDS, Channel, ChannelClosed, Listener, connect
from ftmesh.errors import ClusterError

LIMIT = 1 << 32  # bytes
MOST_DATA = 1 << 36  # of one blob
SLOWEST = 1e8  # bytes a second that a keeper looks through, at least


def keeper_command(limit: int = LIMIT) -> list[str]:
    """What starts a keeper of so many bytes; it needs the secret in its environment."""
    return command("ftmesh.elastic.peer_store", str(limit))


def main() -> None:
    """Be a keeper."""
    for each in (signal.SIGINT, signal.SIGHUP):  # those of a terminal
        signal.signal(each, signal.SIG_IGN)
    blobs = Blobs(int(sys.argv[1]))
    listener = Listener(
        lambda channel: serve(blobs, channel),
        secret=os.environ.get("FTMESH_SECRET", ""),
        host=os.environ.get("FTMESH_KEEPER_HOST", LOOPBACK),
        most_data=min(blobs.limit, MOST_DATA),
    )
    print(listener.address, flush=True)
    sys.stdin.buffer.read()
    os._exit(0)  # whoever is served


def serve(blobs: Blobs, channel: Channel) -> None:
    """Do what one client asks for until it goes."""
    with channel, contextlib.suppress(ChannelClosed, MemoryError):
        while frame := channel.receive():
            try:
                _answer(blobs, channel, frame[0])
            except Refused as error:
                channel.send({"refused": str(error)})


def _answer(blobs: Blobs, channel: Channel, message: dict[str, Any]) -> None:
    """Each way, the size comes before the bytes: it can be refused, and waited for long enough."""
    match message:
        case {"do": "put", "name": str(name), "bytes": int(size), "crc32": int(crc32)}:
            with blobs.room(name, size):
                channel.send({})
                frame = channel.receive(STALL_SECONDS)
                if frame is None:
                    raise ChannelClosed(f"{channel.peer} has not sent {name}")
                _, data = frame
                if len(data) != size:
                    raise Refused(f"{len(data)} bytes of {name} have come, and not {size}")
                blobs.put(name, data, crc32)
            channel.send({})
        case {"do": "get", "name": str(name)}:
            data, crc32 = blobs.get(name)
            channel.send({"bytes": len(data), "crc32": crc32})
            if zlib.crc32(data) != crc32:
                raise Refused(f"{name} was damaged in its memory")
            channel.send({}, data)
        case {"do": "names", "prefix": str(prefix)}:
            channel.send({}, json.dumps(blobs.names(prefix)).encode())
        case {"do": "drop", "prefix": str(prefix)}:
            channel.send({"count": blobs.drop(prefix)})
        case _:
            raise Refused(f"it does not know what {str(message)[:100]} would be")


class Keeper:
    """The keeper at an address, for its clients; it is connected to when first asked.

    What is not answered within `timeout` seconds, or is refused, is a `ClusterError` that names the
    address.
    """

    def __init__(self, address: str, secret: str, timeout: float) -> None:
        self.address, self.timeout = address, timeout
        self._secret = secret
        self._channel: Channel | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def put(self, name: str, data: bytes | memoryview, crc32: int | None = None) -> None:
        """Have it hold a blob, in place of an older one of that name."""
        checksum = zlib.crc32(data) if crc32 is None else crc32
        size = memoryview(data).nbytes
        with self._asking({"do": "put", "name": name, "bytes": size, "crc32": checksum}) as channel:
            self._next(channel)
            channel.send({}, data)
            self._next(channel, size)

    def get(self, name: str) -> bytes:
        """A blob, which is what was put."""
        with self._asking({"do": "get", "name": name}) as channel:
            told, _ = self._next(channel)
            _, data = self._next(channel, told["bytes"])
        if zlib.crc32(data) != told["crc32"]:
            raise ClusterError(f"{name} from the keeper at {self.address} was damaged on its way")
        return data

    def names(self, prefix: str = "") -> list[str]:
        """Those of all blobs that begin so, in order."""
        with self._asking({"do": "names", "prefix": prefix}) as channel:
            names: list[str] = json.loads(self._next(channel)[1])
        return names

    def drop(self, prefix: str) -> int:
        """Have it forget all blobs that begin so; how many there were."""
        with self._asking({"do": "drop", "prefix": prefix}) as channel:
            return int(self._next(channel)[0]["count"])

    def close(self) -> None:
        """Leave it, until it is asked again."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    @contextlib.contextmanager
    def _asking(self, message: dict[str, Any]) -> Iterator[Channel]:
        """A channel on which the question was asked; who fails in the midst of it begins anew."""
        with self._lock:
            if self._channel is None:
                self._channel = connect(
                    self.address,
                    self._secret,
                    timeout=self.timeout,
                    stall=self.timeout,
                    most_data=MOST_DATA,
                )
            try:
                self._channel.send(message)
                yield self._channel
            except Refused:
                raise
            except BaseException:
                self.close()
                raise

    def _next(self, channel: Channel, size: int = 0) -> tuple[dict[str, Any], bytes]:
        """Its next frame, which may be that it refuses; it looks through `size` bytes before."""
        seconds = self.timeout + size / SLOWEST
        frame = channel.receive(seconds)
        if frame is None:
            raise ClusterError(f"the keeper at {self.address} has said nothing for {seconds:.3g} s")
        if "refused" in frame[0]:
            raise Refused(f"the keeper at {self.address} refuses: {frame[0]['refused']}")
        return frame


MOST_NAME = 200
_PLAIN = re.compile(rf"[a-z0-9./-]{{0,{MOST_NAME}}}")


class Refused(ClusterError):  # noqa: N818
    """A keeper will not do what it was asked for."""


class Blobs:
    """What a keeper holds; any thread may use it.

    `limit` is for all bytes together, those included that are on their way.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held: dict[str, tuple[bytes, int]] = {}
        self._taken = 0  # of the limit
        self._lock = threading.Lock()

    @contextmanager
    def room(self, name: str, size: int) -> Iterator[None]:
        """Room for a blob that is to come and be `put` meanwhile; given back if that fails."""
        _check_name(name)
        if not name or size < 0:
            raise Refused(f"{name!r} of {size} bytes can be no blob")
        with self._lock:
            if self._taken + size > self.limit:
                raise Refused(
                    f"{name} has {size} bytes, and {max(self.limit - self._taken, 0)} of "
                    f"{self.limit} are free: drop some, or give the keeper more"
                )
            self._taken += size
        try:
            yield
        except BaseException:
            with self._lock:
                self._taken -= size
            raise

    def put(self, name: str, data: bytes, crc32: int) -> None:
        """Hold a blob for which there is room, in place of an older one of that name."""
        if zlib.crc32(data) != crc32:
            raise Refused(f"{name} was damaged on its way")
        with self._lock:
            self._taken -= self._size(name)
            self._held[name] = data, crc32

    def get(self, name: str) -> tuple[bytes, int]:
        """A blob and its checksum, as it was when it came."""
        with self._lock:
            if name not in self._held:
                raise Refused(f"it has no {name}")
            return self._held[name]

    def names(self, prefix: str) -> list[str]:
        """Those that begin so, in order."""
        _check_name(prefix)
        with self._lock:
            return sorted(name for name in self._held if name.startswith(prefix))

    def drop(self, prefix: str) -> int:
        """Forget all that begin so; how many there were."""
        names = self.names(prefix)
        with self._lock:
            for name in names:
                self._taken -= self._size(name)
                self._held.pop(name, None)
        return len(names)

    def _size(self, name: str) -> int:
        return len(self._held[name][0]) if name in self._held else 0


def _check_name(name: str) -> None:
    if not _PLAIN.fullmatch(name) or ".." in name:
        raise Refused(
            f"{name[:MOST_NAME]!r} is no plain name: those have up to {MOST_NAME} of a-z, 0-9, "
            "'.', '/' and '-', and no '..'"
        )
