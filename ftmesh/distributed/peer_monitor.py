"""Peer monitor: processes notice which other processes are lost.

The connections of the roll call stay open, and carry a heartbeat a second both ways. A process that
ends closes its connections at once; one that is stopped, or whose host is cut off, falls silent.
Process 0 monitors all others and reports lost ones to the rest; each of the others monitors
process 0. JAX would abort: at once after the end of process 0, minutes after other losses.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Self

HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 10.0  # without a heartbeat, after which a process is lost
_GATHER_SECONDS = 0.3  # in process 0, for others that are lost at the same time
_MAX_NAMED = 8  # processes that a message lists
_BEAT, _GOODBYE = b"\n", b'"bye"\n'
_READ_BYTES = 1 << 16
_LOOPBACK = "127.0.0.1"
_RETRY_SECONDS = 0.1  # between two attempts to reach JAX's service

OnLost = Callable[[frozenset[int], str], None]


class PeerMonitor:
    """Watches the connections of one process to its peers, in a thread."""

    def __init__(
        self,
        process: int,
        connections: dict[int, socket.socket],
        on_lost: OnLost,
        *,
        silence: float = SILENCE_SECONDS,
    ) -> None:
        """Make a monitor; `start` starts it.

        Args:
            process: Index of this process.
            connections: To all peers in process 0, to process 0 in the others.
            on_lost: Called once, with the lost processes and what happened, in one line.
            silence: Seconds without a heartbeat after which a peer is lost, once `expect_beats`
                was called.
        """
        self.on_lost = on_lost
        self._process, self._silence = process, silence
        self._expects_beats = False
        self._stopped = threading.Event()
        self._peers = dict(connections)
        self._heard = dict.fromkeys(connections, time.monotonic())
        self._unread = dict.fromkeys(connections, b"")
        self._selector = selectors.DefaultSelector()
        for peer, connection in connections.items():
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(connection, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._watch, name="ftmesh peers", daemon=True)

    def start(self) -> Self:
        """Start to send heartbeats and to notice peers that end."""
        self._thread.start()
        return self

    def expect_beats(self) -> None:
        """From now on a silent peer is lost. Before, JAX may block an interpreter for long."""
        self._heard = dict.fromkeys(self._heard, time.monotonic())
        self._expects_beats = True

    def stop(self) -> None:
        """Say goodbye to the peers, which then do not take this process for lost."""
        self._stopped.set()
        self._send(_GOODBYE)

    def _watch(self) -> None:
        last_beat = last_look = time.monotonic()
        while not self._stopped.is_set() and self._peers:
            ready = self._selector.select(HEARTBEAT_SECONDS / 2)
            now = time.monotonic()
            if now - last_look > self._silence / 2:  # this process was stopped itself
                self._heard = dict.fromkeys(self._heard, now)
            last_look = now
            ended = {key.data for key, _ in ready if not self._read(key.data, now)}
            if ended and self._process == 0:  # others may end at the same time
                time.sleep(_GATHER_SECONDS)
                ready = self._selector.select(0)
                ended |= {key.data for key, _ in ready if not self._read(key.data, now)}
            if ended & self._peers.keys():
                self._lose(ended & self._peers.keys(), "the connection was closed")
            if now - last_beat >= HEARTBEAT_SECONDS:
                last_beat = now
                self._send(_BEAT)
            silent = {peer for peer in self._peers if now - self._heard[peer] > self._silence}
            if silent and self._expects_beats:
                self._lose(silent, f"no heartbeat for {self._silence:g} s")

    def _read(self, peer: int, now: float) -> bool:
        """Read what a peer has sent. Returns False if it is gone."""
        try:
            data = self._peers[peer].recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        self._heard[peer] = now
        *lines, self._unread[peer] = (self._unread[peer] + data).split(b"\n")
        for line in filter(None, lines):
            message = json.loads(line)
            if message == "bye":
                self._selector.unregister(self._peers.pop(peer))
                return True
            if not self._stopped.is_set():
                self._report(frozenset(message["lost"]), str(message["how"]))
        return bool(data)

    def _lose(self, lost: Iterable[int], how: str) -> None:
        processes = frozenset(lost)
        if not self._stopped.is_set():
            self._send(json.dumps({"lost": sorted(processes), "how": how}).encode() + b"\n")
            self._report(processes, how)

    def _report(self, lost: frozenset[int], how: str) -> None:
        self._stopped.set()
        if self._process in lost:  # it was stopped, and the others have gone since
            self.on_lost(lost | {0}, f"the others counted this process as lost: {how}")
            return
        was = "was" if len(lost) == 1 else "were"
        self.on_lost(lost, f"{format_processes(lost)} {was} lost: {how}")

    def _send(self, data: bytes) -> None:
        for connection in list(self._peers.values()):
            with contextlib.suppress(OSError):  # it is gone, or reads nothing: noticed elsewhere
                connection.send(data)


def forward_to_service(address: tuple[str, int]) -> str:
    """Return a local address that leads to JAX's service at process 0, for JAX's client.

    The client ends its process within milliseconds once its connection closes, without the reason
    and before anything can be saved. This one stays open when process 0 is gone.
    """
    server = socket.create_server((_LOOPBACK, 0))

    def accept() -> None:
        while True:
            local, _ = server.accept()
            threading.Thread(target=connect, args=(local,), daemon=True).start()

    def connect(local: socket.socket) -> None:
        while True:
            try:
                remote = socket.create_connection(address, timeout=_RETRY_SECONDS * 10)
                break
            except OSError:  # the service is not there yet
                time.sleep(_RETRY_SECONDS)
        remote.settimeout(None)
        for end in (local, remote):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=copy, args=(remote, local), daemon=True).start()
        copy(local, remote)
        with contextlib.suppress(OSError):
            remote.shutdown(socket.SHUT_RDWR)

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_READ_BYTES):
                target.sendall(data)

    threading.Thread(target=accept, name="ftmesh forwarder", daemon=True).start()
    return f"{_LOOPBACK}:{server.getsockname()[1]}"


def format_processes(processes: Iterable[int]) -> str:
    """Name processes in a message.

    >>> format_processes([3]), format_processes([2, 0, 1])
    ('process 3', 'processes 0, 1 and 2')
    """
    numbers = sorted(processes)
    if len(numbers) == 1:
        return f"process {numbers[0]}"
    if len(numbers) > _MAX_NAMED:
        named = ", ".join(map(str, numbers[:_MAX_NAMED]))
        return f"processes {named} and {len(numbers) - _MAX_NAMED} more"
    return f"processes {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
