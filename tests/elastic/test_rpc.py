"""Channels: frames between processes that know the secret; strangers disturb nobody."""

import contextlib
import gc
import json
import socket
import struct
import threading
import time

import pytest

from ftmesh.distributed import handshake
from ftmesh.distributed.handshake import MAGIC, MAX_HANDSHAKES, NONCE_BYTES, PROOF_BYTES, proof
from ftmesh.elastic import rpc as module
from ftmesh.elastic.rpc import Channel, ChannelClosed, Listener, connect, free_port
from ftmesh.errors import ArgumentError, FtmeshError
from tests.support.controllers import wait_until

SECRET = "5ec2e7"


def echo(channel):
    with channel, contextlib.suppress(ChannelClosed):
        while True:
            channel.send(*channel.receive())


@pytest.fixture
def listener():
    with Listener(echo, secret=SECRET) as listener:
        yield listener


@pytest.fixture
def good(listener):
    with connect(listener.address, SECRET, timeout=10) as channel:
        yield channel


@pytest.fixture
def pair():
    """A raw connection, and a channel at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = socket.create_connection(server.getsockname())
        taken, _ = server.accept()
    with other, Channel(taken, max_data=100) as channel:
        yield other, channel


def raw(listener):
    host, port = listener.address.split(":")
    return socket.create_connection((host, int(port)), 10)


def is_closed(connection):
    """Whether the other end closes the connection."""
    connection.settimeout(10)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(100):
            pass
    return True


def frame(header, data=b"", *, length=None, size=None):
    lengths = (len(header) if length is None else length, len(data) if size is None else size)
    return struct.pack(">IQ", *lengths) + header + data


class TestFrames:
    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 40_000])
    def test_round_trip(self, good, data):
        message = {"step": 3, "text": "κόσμος", "list": [1.5, None, {"a": True}]}
        good.send(message, data)
        assert good.receive(10) == (message, data)
        good.send({}, memoryview(data))
        assert good.receive() == ({}, data)

    def test_receive_times_out(self, good):
        begin = time.monotonic()
        assert good.receive(0.1) is None
        assert 0.09 < time.monotonic() - begin < 5
        assert good.receive(0) is None

    def test_frames_of_several_threads_do_not_mix(self, good):
        """Every frame is longer than the buffer of the socket."""
        body = {sender: bytes([sender]) * 12_000_000 for sender in range(4)}
        senders = [
            threading.Thread(target=good.send, args=({"from": sender}, data))
            for sender, data in body.items()
        ]
        for sender in senders:
            sender.start()
        received = {message["from"]: data for message, data in (good.receive(10) for _ in body)}
        assert received == body

    def test_a_frame_that_is_too_long_is_not_sent(self, pair):
        _, channel = pair
        with pytest.raises(
            ArgumentError, match=r"101 bytes of data is too long for .*: at most .* 100"
        ):
            channel.send({}, bytes(101))
        with pytest.raises(ArgumentError, match="is too long"):
            channel.send({"text": "x" * module.MAX_HEADER_BYTES})

    @pytest.mark.parametrize(
        "sent",
        [
            b"GET / HTTP/1.1\r\n\r\n",
            frame(b"{}", size=101),
            frame(b"{}", size=2**63),
            frame(b"{}", length=2**32 - 1),
            frame(b"[1]"),
            frame(b"no json"),
            frame(b"\xff\xfe"),
            frame(b"[" * 100_000),
            frame(b""),
        ],
    )
    def test_an_invalid_frame_closes_the_channel(self, pair, sent):
        other, channel = pair
        other.sendall(sent)
        with pytest.raises(ChannelClosed, match="has sent an invalid frame"):
            channel.receive(10)
        assert is_closed(other)
        with pytest.raises(ChannelClosed):
            channel.receive(10)
        with pytest.raises(ChannelClosed):
            channel.send({})

    def test_the_longest_frame(self, pair):
        other, channel = pair
        other.sendall(frame(b'{"a": 1}', bytes(100)))
        assert channel.receive(10) == ({"a": 1}, bytes(100))

    def test_half_a_frame(self, pair):
        other, channel = pair
        other.sendall(frame(b'{"a": 1}', b"data")[:-1])
        other.close()
        with pytest.raises(ChannelClosed, match="is gone: the connection was closed"):
            channel.receive(10)

    def test_a_sender_that_stalls(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            other = socket.create_connection(server.getsockname())
            taken, _ = server.accept()
        with other, Channel(taken, stall=0.2) as channel:
            other.sendall(b"\0\0")
            with pytest.raises(ChannelClosed, match="is gone: timed out"):
                channel.receive()
            assert is_closed(other)

    def test_a_receiver_that_stalls(self):
        """The other end does not read, and the buffers fill up."""
        silent = threading.Event()
        with (
            Listener(lambda channel: (silent.wait(30), channel.close()), secret=SECRET) as deaf,
            connect(deaf.address, SECRET, timeout=5, stall=0.2, max_data=10**9) as channel,
        ):
            with pytest.raises(ChannelClosed, match="cannot be sent to: timed out"):
                channel.send({}, bytes(10**8))
            silent.set()

    def test_a_close_wakes_the_receiver(self, good):
        threading.Timer(0.1, good.close).start()
        with pytest.raises(ChannelClosed):
            good.receive(30)
        with pytest.raises(ChannelClosed):
            good.receive(30)
        with pytest.raises(ChannelClosed):
            good.send({})
        good.close()

    def test_a_close_wakes_the_sender(self):
        done = threading.Event()

        def does_not_read(channel):
            with channel:
                done.wait(30)

        with (
            Listener(does_not_read, secret=SECRET) as listener,
            connect(listener.address, SECRET, timeout=10, max_data=10**9) as channel,
        ):
            threading.Timer(0.2, channel.close).start()
            with pytest.raises(ChannelClosed, match="cannot be sent to"):
                channel.send({}, bytes(10**8))
            done.set()

    def test_socket_options(self, good):
        options = [
            good._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY),
            good._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        ]
        assert all(options)


class TestConnecting:
    def test_nothing_answers(self):
        with Listener(echo, secret=SECRET) as listener:
            pass
        begin = time.monotonic()
        with pytest.raises(ChannelClosed, match=f"nothing answers at {listener.address}: "):
            connect(listener.address, SECRET, timeout=60)
        assert time.monotonic() - begin < 30

    def test_another_secret(self, listener):
        with pytest.raises(OSError, match=f"{listener.address} is not a listener that knows"):
            connect(listener.address, "other", timeout=10)

    def test_a_listener_that_does_not_know_the_secret(self):
        """It admits anyone, and sends back the proof it received."""

        def pretend(server):
            with server.accept()[0] as taken:
                taken.sendall(MAGIC + bytes(NONCE_BYTES))
                said = taken.recv(len(MAGIC) + NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
                taken.sendall(said[-PROOF_BYTES:])
                taken.recv(1)

        with socket.create_server(("127.0.0.1", 0)) as server:
            thread = threading.Thread(target=pretend, args=(server,))
            thread.start()
            with pytest.raises(FtmeshError, match="it does not know the secret"):
                connect(f"127.0.0.1:{server.getsockname()[1]}", SECRET, timeout=10)
            thread.join()

    @pytest.mark.parametrize(("data", "error"), [(b"", "timed out"), (b"HTTP/1.1 400", "protocol")])
    def test_another_protocol(self, data, error):
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
            held = []

            def answer():
                held.append(server.accept()[0])
                held[0].sendall(data)

            other = threading.Thread(target=answer)
            other.start()
            with pytest.raises(ChannelClosed, match=error):
                connect(address, SECRET, timeout=10 if data else 0.5)
            other.join()
            held[0].close()

    @pytest.mark.parametrize(
        "address", ["", "here", ":", "127.0.0.1:x", "127.0.0.1", "h:٨", "h:123456"]
    )
    def test_invalid_addresses(self, address):
        with pytest.raises(ArgumentError, match="give host:port and a secret"):
            connect(address, SECRET, timeout=1)

    def test_an_invalid_port(self):
        with pytest.raises(ChannelClosed, match=r"nothing answers at 127\.0\.0\.1:99999"):
            connect("127.0.0.1:99999", SECRET, timeout=1)

    def test_a_secret_is_needed(self):
        with pytest.raises(ArgumentError, match="would admit anyone"):
            Listener(echo, secret="")
        with pytest.raises(ArgumentError, match="and a secret"):
            connect("127.0.0.1:1", "", timeout=1)


class TestStrangers:
    """None is admitted, and a good caller works meanwhile."""

    @pytest.fixture(autouse=True)
    def good_caller_still_works(self, good, listener):
        yield
        good.send({"still": "there"})
        assert good.receive(10) == ({"still": "there"}, b"")
        with connect(listener.address, SECRET, timeout=10) as another:
            another.send({})
            assert another.receive(10) == ({}, b"")

    @pytest.mark.parametrize(
        "says",
        [
            b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
            bytes(72),
            b"\xff" * 1_000_000,
            MAGIC + bytes(NONCE_BYTES + PROOF_BYTES),
            MAGIC + bytes(NONCE_BYTES) + frame(json.dumps({"a": 1}).encode()) * 10,
        ],
    )
    def test_garbage(self, listener, says):
        with raw(listener) as stranger:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(says)
            assert is_closed(stranger)

    @pytest.mark.parametrize(
        "says", [b"", MAGIC, MAGIC + bytes(NONCE_BYTES), MAGIC + bytes(NONCE_BYTES + 31)]
    )
    def test_an_incomplete_handshake(self, listener, says, monkeypatch):
        with monkeypatch.context() as soon, raw(listener) as stranger:
            soon.setattr(handshake, "HANDSHAKE_SECONDS", 0.2)
            stranger.sendall(says)
            assert is_closed(stranger)

    def test_a_slow_handshake(self, listener, monkeypatch):
        """The timeout is for the whole handshake, not for a byte."""
        with monkeypatch.context() as soon:
            soon.setattr(handshake, "HANDSHAKE_SECONDS", 0.3)
            with raw(listener) as stranger, contextlib.suppress(ConnectionError):
                for byte in MAGIC * 9:
                    stranger.sendall(bytes([byte]))
                    time.sleep(0.05)
                pytest.fail("the slow handshake was read to its end")

    def test_a_replayed_handshake(self, listener):
        with raw(listener) as first:
            theirs = first.recv(len(MAGIC) + NONCE_BYTES, socket.MSG_WAITALL)[len(MAGIC) :]
            ours = bytes(NONCE_BYTES)
            says = MAGIC + ours + proof(SECRET, b"caller", theirs, ours)
            first.sendall(says)
            assert len(first.recv(PROOF_BYTES, socket.MSG_WAITALL)) == PROOF_BYTES
        with raw(listener) as again:
            again.sendall(says)
            again.recv(len(MAGIC) + NONCE_BYTES, socket.MSG_WAITALL)
            with contextlib.suppress(ConnectionResetError):
                assert again.recv(PROOF_BYTES) == b""

    def test_the_proof_of_the_other_role(self, listener):
        """The proof of a listener is not accepted from a caller."""
        with raw(listener) as stranger:
            theirs = stranger.recv(len(MAGIC) + NONCE_BYTES, socket.MSG_WAITALL)[len(MAGIC) :]
            stranger.sendall(
                MAGIC + bytes(NONCE_BYTES) + proof(SECRET, b"listener", theirs, bytes(NONCE_BYTES))
            )
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(PROOF_BYTES) == b""

    def test_a_flood(self, listener, good, monkeypatch):
        """The oldest strangers are dropped, a late caller is admitted, and threads stay few."""
        monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 600)  # so that none times out
        before = threading.active_count()
        flood = [raw(listener) for _ in range(3 * MAX_HANDSHAKES)]
        with connect(listener.address, SECRET, timeout=10) as late:
            late.send({"late": 1})
            assert late.receive(10) == ({"late": 1}, b"")
        assert is_closed(flood[0])
        good.send({})
        assert good.receive(10) == ({}, b"")
        wait_until(lambda: threading.active_count() - before <= MAX_HANDSHAKES + 3)
        for stranger in flood:
            stranger.close()


class TestListener:
    def test_the_address(self, listener):
        host, port = listener.address.split(":")
        assert host == "127.0.0.1"
        assert 20_000 <= int(port) < 30_000  # not given to outgoing connections

    def test_a_port_that_is_taken(self, listener):
        with pytest.raises(OSError, match="in use"):
            Listener(echo, secret=SECRET, port=int(listener.address.split(":")[1]))

    def test_the_same_port_again(self):
        with Listener(echo, secret=SECRET) as first, connect(first.address, SECRET, timeout=5):
            pass
        port = int(first.address.split(":")[1])
        with (
            Listener(echo, secret=SECRET, port=port) as second,
            connect(second.address, SECRET, timeout=5) as channel,
        ):
            channel.send({"a": 2})
            assert channel.receive(5) == ({"a": 2}, b"")

    def test_channels_outlive_the_listener(self):
        with (
            Listener(echo, secret=SECRET) as listener,
            connect(listener.address, SECRET, timeout=5) as channel,
        ):
            channel.send({"a": 1})
            assert channel.receive(5) == ({"a": 1}, b"")
            listener.close()
            channel.send({"a": 2})
            assert channel.receive(5) == ({"a": 2}, b"")

    def test_nothing_stays_open(self):
        """Python warns of a socket that is not closed, and warnings are errors here."""
        with Listener(echo, secret=SECRET) as listener, raw(listener):
            pass
        gc.collect()


def test_a_port_in_use_is_not_returned(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        other = free_port()
        monkeypatch.setattr(module, "PORTS", range(taken, taken + 1))
        with pytest.raises(ArgumentError, match="no port from"):
            free_port()
    assert other != taken
