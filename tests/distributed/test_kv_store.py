"""The key-value store of the controller: entries and barriers."""

import pytest

from ftmesh.distributed.kv_store import KvStore


class Caller:
    """A store, and the id of the next call."""

    def __init__(self):
        self.store, self.calls = KvStore(), 0

    def call(self, process, operation, key, value=b"", **arguments):
        """Return the replies: process, message and data."""
        self.calls += 1
        message = {"call": self.calls, "operation": operation, "key": key, **arguments}
        return self.store.handle(process, message, value)


@pytest.fixture
def kv():
    return Caller()


def test_an_entry_is_visible_to_all(kv):
    assert kv.call(0, "put", "a", b"one") == [(0, {"reply": 1, "is_new": True}, b"one"[:0])]
    assert kv.call(1, "get", "a") == [(1, {"reply": 2, "exists": True}, b"one")]
    assert kv.call(2, "try_get", "a") == [(2, {"reply": 3, "exists": True}, b"one")]


def test_the_first_value_stays(kv):
    kv.call(0, "put", "a", b"one")
    assert kv.call(1, "put", "a", b"two") == [(1, {"reply": 2, "is_new": False}, b"")]
    assert kv.call(1, "try_get", "a")[0][2] == b"one"


def test_an_empty_value(kv):
    kv.call(0, "put", "a", b"")
    assert kv.call(1, "try_get", "a") == [(1, {"reply": 2, "exists": True}, b"")]


def test_a_get_waits_for_the_entry(kv):
    assert kv.call(1, "get", "a") == []
    assert kv.call(2, "get", "a") == []
    assert kv.call(0, "put", "a", b"one") == [
        (0, {"reply": 3, "is_new": True}, b""),
        (1, {"reply": 1, "exists": True}, b"one"),
        (2, {"reply": 2, "exists": True}, b"one"),
    ]
    assert kv.call(0, "put", "a", b"one") == [(0, {"reply": 4, "is_new": False}, b"")]


def test_a_try_get_does_not_wait(kv):
    assert kv.call(1, "try_get", "a") == [(1, {"reply": 1, "exists": False}, b"")]
    assert len(kv.call(0, "put", "a", b"one")) == 1


def test_entries_by_process(kv):
    for key in ("k/0", "k/12", "k", "kk/1", "other/k/1"):
        kv.call(0, "put", key, key.encode())
    assert kv.call(1, "get_by_process", "k") == [
        (1, {"reply": 6, "sizes": {"0": 3, "12": 4}}, b"k/0k/12")
    ]
    assert kv.call(1, "get_by_process", "none") == [(1, {"reply": 7, "sizes": {}}, b"")]


class TestBarrier:
    def test_the_last_arrival_releases_all(self, kv):
        assert kv.call(0, "barrier", "m", processes=[0, 2, 5]) == []
        assert kv.call(5, "barrier", "m", processes=[0, 2, 5]) == []
        assert sorted(who for who, _, _ in kv.call(2, "barrier", "m", processes=[0, 2, 5])) == [
            0,
            2,
            5,
        ]

    def test_replies_carry_the_call_ids(self, kv):
        kv.call(0, "barrier", "m", processes=[0, 1])
        assert kv.call(1, "barrier", "m", processes=[0, 1]) == [
            (0, {"reply": 1}, b""),
            (1, {"reply": 2}, b""),
        ]

    def test_the_same_key_again(self, kv):
        for _ in range(2):
            assert kv.call(0, "barrier", "m", processes=[0, 1]) == []
            assert len(kv.call(1, "barrier", "m", processes=[0, 1])) == 2

    def test_a_process_counts_once(self, kv):
        assert kv.call(0, "barrier", "m", processes=[0, 1]) == []
        assert kv.call(0, "barrier", "m", processes=[0, 1]) == []

    def test_other_processes_do_not_count(self, kv):
        assert kv.call(7, "barrier", "m", processes=[0, 1]) == []
        assert kv.call(0, "barrier", "m", processes=[0, 1]) == []
        assert len(kv.call(1, "barrier", "m", processes=[0, 1])) == 3

    def test_a_single_process(self, kv):
        assert kv.call(3, "barrier", "m", processes=[3]) == [(3, {"reply": 1}, b"")]


@pytest.mark.parametrize(
    "message", [{}, {"call": 1, "operation": "burn", "key": "a"}, {"call": "x"}]
)
def test_invalid_calls(message):
    with pytest.raises((KeyError, ValueError)):
        KvStore().handle(0, message, b"")
