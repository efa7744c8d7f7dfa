"""The lines to the steward: notes, strangers, and what makes no sense."""

import contextlib
import socket
from functools import partial

import pytest

from ftmesh.elastic.rpc import MAGIC, MOST_HANDSHAKES, NONCE, PROOF, ChannelClosed, connect, proof
from tests.support.controllers import SECRET, SOON


class TestNotes:
    def test_they_are_there_for_all(self, four):
        four.lines[0].say(b"note", call=1, do="put", key="1/a")
        assert four.lines[0].hear("reply", "is_new") == (1, True)
        four.lines[3].say(call=5, do="get", key="1/a")
        assert four.lines[3].channel.receive(SOON) == ({"reply": 5, "found": True}, b"note")

    def test_those_of_an_epoch_go_with_it(self, four):
        four.lines[0].say(b"note", call=1, do="put", key="a")
        four.lines[0].hear("reply")
        four.lose(3)
        four.lines[1].say(call=2, do="look", key="a")
        assert four.lines[1].hear("reply", "found") == (2, False)

    def test_an_event_of_a_process(self, four):
        four.lines[1].say(say="examined", facts={"sick": []})
        four.settled()
        assert four.of("examined") == [{"event": "examined", "epoch": 1, "sick": []}]


def raw(stewarded):
    host, port = stewarded.listener.address.split(":")
    return socket.create_connection((host, int(port)), SOON)


def claim(stewarded, **hello):
    """One that knows the secret says who it is; whether it is sent away."""
    channel = connect(stewarded.listener.address, SECRET, timeout=SOON)
    try:
        channel.send(hello)
        return channel.receive(SOON) is None
    except ChannelClosed:
        return True
    finally:
        channel.close()


class TestStrangers:
    """Whatever they do, the run goes on, and no line is lost."""

    @pytest.fixture(autouse=True)
    def the_run_goes_on(self, four):
        four.commit(1)
        yield
        four.commit(2)
        four.steward.tick()
        assert four.steward.verdict is None
        assert (four.of("failed"), four.stopped) == ([], [])
        assert sorted(four.steward.members) == [0, 1, 2, 3]

    def test_one_of_another_secret(self, four):
        with pytest.raises(ChannelClosed, match="is no listener that knows the secret"):
            connect(four.listener.address, "another", timeout=SOON)

    @pytest.mark.parametrize("says", [bytes(1000), b"GET / HTTP/1.1\r\n\r\n", MAGIC * 100])
    def test_garbage(self, four, says):
        with raw(four) as stranger:
            stranger.sendall(says)
            with contextlib.suppress(ConnectionResetError):
                assert b"".join(iter(partial(stranger.recv, 1000), b"")).startswith(MAGIC)

    def test_one_that_plays_a_handshake_again(self, four):
        with raw(four) as first:
            theirs = first.recv(len(MAGIC) + NONCE, socket.MSG_WAITALL)[len(MAGIC) :]
            says = MAGIC + bytes(NONCE) + proof(SECRET, b"caller", theirs, bytes(NONCE))
            first.sendall(says)
            assert len(first.recv(PROOF, socket.MSG_WAITALL)) == PROOF
        with raw(four) as again:
            again.sendall(says)
            again.recv(len(MAGIC) + NONCE, socket.MSG_WAITALL)
            with contextlib.suppress(ConnectionResetError):
                assert again.recv(PROOF) == b""

    def test_a_flood(self, four):
        flood = [raw(four) for _ in range(2 * MOST_HANDSHAKES)]
        four.commit(1)
        for stranger in flood:
            stranger.close()

    @pytest.mark.parametrize(
        "hello",
        [
            {"hello": 1, "pid": 1, "start": 1},  # it is there already
            {"hello": 1, "pid": 1, "start": 2},
            {"hello": 9, "pid": 1, "start": 1},
            {"hello": -1, "pid": 1, "start": 1},
            {"hello": "you", "pid": 1, "start": 1},
            {"hello": float("inf"), "pid": 1, "start": 1},
            {"hello": None},
            {"ready": 2, "epoch": 1},
            {},
        ],
    )
    def test_one_that_knows_the_secret_and_claims_to_be_another(self, four, hello):
        assert claim(four, **hello)


class TestNonsense:
    """A process that says what makes no sense is taken for lost, and no more than that."""

    @pytest.mark.parametrize(
        "message",
        [
            {"ready": "soon"},
            {"ready": float("inf")},
            {"at": "read"},
            {"at": "read", "step": None},
            {"joined": 1, "parts": [1, 2]},
            {"call": 1, "do": "burn", "key": "a"},
            {"call": 1},
            {"say": "failed", "facts": {"epoch": 3}},
            {"say": "failed", "facts": 3},
            {"epoch": "x", "ready": 1},
        ],
    )
    def test_it_is_lost(self, four, message):
        four.commit(1)
        four.lines[2].channel.send({"epoch": 1, **message})
        assert four.lines.pop(2).is_closed()
        four.tick_until(lambda: four.steward.epoch > 1)
        assert four.heard_of_epoch()[:4] == (2, [0, 1, 3], "", 1)
        four.joined(1).commit(2)

    def test_words_it_does_not_know_are_passed_over(self, four):
        four.lines[2].say(hum=1)
        four.settled().commit(1)

    def test_one_that_is_lost_is_not_heard(self, four):
        four.commit(1)
        line = four.lines.pop(2)
        four.steward.ended(2, "ended by SIGKILL", 137)
        four.heard_of_epoch()
        line.say(epoch=2, ready=2)
        line.say(epoch=2, restart="from the grave")
        line.channel.close()
        four.joined(1).commit(2)
        assert four.steward.verdict is None
