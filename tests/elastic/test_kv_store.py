"""Notes: put up once, waited for, looked at; and who meets whom."""

import pytest

from ftmesh.elastic.kv_store import Notes


class Board:
    """The notes, and the number of the next call."""

    def __init__(self):
        self.notes, self.calls = Notes(), 0

    def ask(self, process, do, key, note=b"", **more):
        """To whom there are replies: what, and with which note."""
        self.calls += 1
        message = {"call": self.calls, "do": do, "key": key, **more}
        replies = self.notes.asked(process, message, note)
        return [(who, {**reply}, data) for who, reply, data in replies]


@pytest.fixture
def board():
    return Board()


def test_what_is_put_up_is_there_for_all(board):
    assert board.ask(0, "put", "a", b"one") == [(0, {"reply": 1, "is_new": True}, b"one"[:0])]
    assert board.ask(1, "get", "a") == [(1, {"reply": 2, "found": True}, b"one")]
    assert board.ask(2, "look", "a") == [(2, {"reply": 3, "found": True}, b"one")]


def test_the_first_note_stays(board):
    board.ask(0, "put", "a", b"one")
    assert board.ask(1, "put", "a", b"two") == [(1, {"reply": 2, "is_new": False}, b"")]
    assert board.ask(1, "look", "a")[0][2] == b"one"


def test_an_empty_note_is_one(board):
    board.ask(0, "put", "a", b"")
    assert board.ask(1, "look", "a") == [(1, {"reply": 2, "found": True}, b"")]


def test_who_waits_is_told_when_it_comes(board):
    assert board.ask(1, "get", "a") == []
    assert board.ask(2, "get", "a") == []
    assert board.ask(0, "put", "a", b"one") == [
        (0, {"reply": 3, "is_new": True}, b""),
        (1, {"reply": 1, "found": True}, b"one"),
        (2, {"reply": 2, "found": True}, b"one"),
    ]
    assert board.ask(0, "put", "a", b"one") == [(0, {"reply": 4, "is_new": False}, b"")]


def test_who_looks_does_not_wait(board):
    assert board.ask(1, "look", "a") == [(1, {"reply": 1, "found": False}, b"")]
    assert len(board.ask(0, "put", "a", b"one")) == 1


def test_all_below_a_key(board):
    for key in ("k/0", "k/12", "k", "kk/1", "other/k/1"):
        board.ask(0, "put", key, key.encode())
    assert board.ask(1, "of", "k") == [(1, {"reply": 6, "sizes": {"0": 3, "12": 4}}, b"k/0k/12")]
    assert board.ask(1, "of", "none") == [(1, {"reply": 7, "sizes": {}}, b"")]


class TestMeeting:
    def test_the_last_one_frees_all(self, board):
        assert board.ask(0, "meet", "m", who=[0, 2, 5]) == []
        assert board.ask(5, "meet", "m", who=[0, 2, 5]) == []
        assert sorted(who for who, _, _ in board.ask(2, "meet", "m", who=[0, 2, 5])) == [0, 2, 5]

    def test_each_hears_of_its_own_call(self, board):
        board.ask(0, "meet", "m", who=[0, 1])
        assert board.ask(1, "meet", "m", who=[0, 1]) == [
            (0, {"reply": 1}, b""),
            (1, {"reply": 2}, b""),
        ]

    def test_again_at_the_same_place(self, board):
        for _ in range(2):
            assert board.ask(0, "meet", "m", who=[0, 1]) == []
            assert len(board.ask(1, "meet", "m", who=[0, 1])) == 2

    def test_one_twice_is_not_two(self, board):
        assert board.ask(0, "meet", "m", who=[0, 1]) == []
        assert board.ask(0, "meet", "m", who=[0, 1]) == []

    def test_one_who_was_not_asked_stands_in_for_nobody(self, board):
        assert board.ask(7, "meet", "m", who=[0, 1]) == []
        assert board.ask(0, "meet", "m", who=[0, 1]) == []
        assert len(board.ask(1, "meet", "m", who=[0, 1])) == 3

    def test_alone(self, board):
        assert board.ask(3, "meet", "m", who=[3]) == [(3, {"reply": 1}, b"")]


@pytest.mark.parametrize("message", [{}, {"call": 1, "do": "burn", "key": "a"}, {"call": "x"}])
def test_what_makes_no_sense(message):
    with pytest.raises((KeyError, ValueError)):
        Notes().asked(0, message, b"")
