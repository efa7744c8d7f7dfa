"""LineSplitter from pieces of output, and how they are printed."""

import os
import sys

import pytest

from ftmesh.elastic import output_lines
from ftmesh.elastic.output_lines import LineSplitter, OutputPrinter


def feed_all(*pieces):
    splitter = LineSplitter()
    return [splitter.feed(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"one\ntwo\n"], [[b"one", b"two"]]),
        ([b"o", b"ne\ntw", b"o\n"], [[], [b"one"], [b"two"]]),
        ([b"no newline", b""], [[], [b"no newline"]]),
        ([b"\n\n", b""], [[b"", b""], []]),
        ([b"windows\r\n", b"and torn\r", b"\n"], [[b"windows"], [], [b"and torn"]]),
        ([b"\xff\x00\n"], [[b"\xff\x00"]]),
        ([b"\r10%", b"\r20", b"%\r30%", b"\n"], [[], [], [], [b"30%"]]),
        ([b"10%\r", b"20%\r", b""], [[], [], [b"20%"]]),
    ],
)
def test_lines(pieces, lines):
    assert feed_all(*pieces) == lines


def test_a_long_progress_bar_is_shown_now_and_then(monkeypatch):
    now = 100.0
    monkeypatch.setattr(output_lines.time, "monotonic", lambda: now)
    splitter, shown = LineSplitter(), []
    for percent in range(100):
        shown += splitter.feed(f"\r{percent}%".encode())
        now += 0.5
    assert shown == [b"19%", b"39%", b"59%", b"79%"]  # the last complete state
    assert splitter.feed(b"\n") == [b"99%"]


def test_long_lines_are_split(monkeypatch):
    monkeypatch.setattr(output_lines, "MAX_LINE_BYTES", 10)
    assert feed_all(b"a" * 25, b"b\n") == [[b"a" * 10, b"a" * 10], [b"aaaaab"]]
    bar = LineSplitter()
    for _ in range(1000):
        assert bar.feed(b"\rstate") == []
    assert bar.feed(b"\n") == [b"state"]


@pytest.mark.parametrize(
    ("env", "shown"),
    [
        ({"TERM": "xterm"}, b"\033[35m[ 2]\033[0m step\r\n"),
        ({"TERM": "xterm", "NO_COLOR": "1"}, b"[ 2] step\r\n"),
        ({"TERM": "dumb"}, b"[ 2] step\r\n"),
    ],
)
def test_colours_on_a_terminal(monkeypatch, env, shown):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    master, slave = os.openpty()
    with open(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        OutputPrinter(11, lambda: None)(2, 1, b"step\n")
        assert os.read(master, 100) == shown
    os.close(master)
