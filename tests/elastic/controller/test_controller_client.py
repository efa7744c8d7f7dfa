"""Connections to the controller: the key-value store, strangers and invalid messages."""

import contextlib
import socket
from functools import partial

import pytest

from ftmesh.distributed.handshake import MAGIC, MAX_HANDSHAKES, NONCE_BYTES, PROOF_BYTES, proof
from ftmesh.elastic.rpc import ChannelClosed, connect
from tests.support.controllers import SECRET, TIMEOUT


class TestKvStore:
    def test_entries_are_visible_to_all(self, four):
        four.workers[0].send(b"value", call=1, operation="put", key="1/a")
        assert four.workers[0].receive("reply", "is_new") == (1, True)
        four.workers[3].send(call=5, operation="get", key="1/a")
        assert four.workers[3].channel.receive(TIMEOUT) == ({"reply": 5, "exists": True}, b"value")

    def test_entries_end_with_their_generation(self, four):
        four.workers[0].send(b"value", call=1, operation="put", key="a")
        four.workers[0].receive("reply")
        four.lose(3)
        four.workers[1].send(call=2, operation="try_get", key="a")
        assert four.workers[1].receive("reply", "exists") == (2, False)


def raw(harness):
    host, port = harness.listener.address.split(":")
    return socket.create_connection((host, int(port)), TIMEOUT)


def claim(harness, **hello):
    """Whether the controller closes the connection of one that knows the secret."""
    channel = connect(harness.listener.address, SECRET, timeout=TIMEOUT)
    try:
        channel.send(hello)
        return channel.receive(TIMEOUT) is None
    except ChannelClosed:
        return True
    finally:
        channel.close()


class TestStrangers:
    """Whatever they do, the run continues, and no connection is lost."""

    @pytest.fixture(autouse=True)
    def run_continues(self, four):
        four.commit(1)
        yield
        four.commit(2)
        four.controller.poll()
        assert four.controller.verdict is None
        assert (four.events_named("failed"), four.killed) == ([], [])
        assert sorted(four.controller.members) == [0, 1, 2, 3]

    def test_another_secret(self, four):
        with pytest.raises(ChannelClosed, match="is not a listener that knows the secret"):
            connect(four.listener.address, "another", timeout=TIMEOUT)

    @pytest.mark.parametrize("says", [bytes(1000), b"GET / HTTP/1.1\r\n\r\n", MAGIC * 100])
    def test_garbage(self, four, says):
        with raw(four) as stranger:
            stranger.sendall(says)
            with contextlib.suppress(ConnectionResetError):
                assert b"".join(iter(partial(stranger.recv, 1000), b"")).startswith(MAGIC)

    def test_a_replayed_handshake(self, four):
        with raw(four) as first:
            theirs = first.recv(len(MAGIC) + NONCE_BYTES, socket.MSG_WAITALL)[len(MAGIC) :]
            says = MAGIC + bytes(NONCE_BYTES) + proof(SECRET, b"caller", theirs, bytes(NONCE_BYTES))
            first.sendall(says)
            assert len(first.recv(PROOF_BYTES, socket.MSG_WAITALL)) == PROOF_BYTES
        with raw(four) as again:
            again.sendall(says)
            again.recv(len(MAGIC) + NONCE_BYTES, socket.MSG_WAITALL)
            with contextlib.suppress(ConnectionResetError):
                assert again.recv(PROOF_BYTES) == b""

    def test_a_flood(self, four):
        flood = [raw(four) for _ in range(2 * MAX_HANDSHAKES)]
        four.commit(1)
        for stranger in flood:
            stranger.close()

    @pytest.mark.parametrize(
        "hello",
        [
            {"hello": 1, "pid": 1, "start": 1},  # it is connected already
            {"hello": 1, "pid": 1, "start": 2},
            {"hello": 9, "pid": 1, "start": 1},
            {"hello": -1, "pid": 1, "start": 1},
            {"hello": "you", "pid": 1, "start": 1},
            {"hello": float("inf"), "pid": 1, "start": 1},
            {"hello": None},
            {"ready": 2, "generation": 1},
            {},
        ],
    )
    def test_an_invalid_hello(self, four, hello):
        assert claim(four, **hello)


class TestInvalidMessages:
    """A worker that sends an invalid message counts as lost; nothing else happens."""

    @pytest.mark.parametrize(
        "message",
        [
            {"ready": "soon"},
            {"ready": float("inf")},
            {"phase": "read"},
            {"phase": "read", "step": None},
            {"joined": 1, "parts": [1, 2]},
            {"call": 1, "operation": "burn", "key": "a"},
            {"call": 1},
            {"generation": "x", "ready": 1},
        ],
    )
    def test_the_worker_counts_as_lost(self, four, message):
        four.commit(1)
        four.workers[2].channel.send({"generation": 1, **message})
        assert four.workers.pop(2).is_closed()
        four.poll_until(lambda: four.controller.generation > 1)
        assert four.receive_generation()[:4] == (2, [0, 1, 3], "", 1)
        four.join(1).commit(2)

    def test_unknown_messages_are_ignored(self, four):
        four.workers[2].send(hum=1)
        four.settle().commit(1)

    def test_messages_of_a_lost_worker_are_ignored(self, four):
        four.commit(1)
        worker = four.workers.pop(2)
        four.controller.process_ended(2, "ended by SIGKILL", 137)
        four.receive_generation()
        with contextlib.suppress(ChannelClosed):  # the controller closes it
            worker.send(generation=2, ready=2)
            worker.send(generation=2, restart="from the grave")
        worker.channel.close()
        four.join(1).commit(2)
        assert four.controller.verdict is None
