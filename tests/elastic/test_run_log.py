"""The events of a run, and the output of its processes."""

import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from ftmesh.elastic import run_log
from ftmesh.elastic.run_log import EventLog, LineSplitter, OutputPrinter, describe_event

GENERATION = {
    "epoch": 3,
    "in_place": True,
    "hosts": [0, 1, 3],
    "failed": "2x2@0,2",
    "live": 12,
    "from_step": 19,
    "repeated": 0,
    "source": "devices",
}
DONE = {"status": 0, "steps": 60, "failures": 2, "seconds": 50, "seconds_lost": 5, "goodput": 0.9}


@pytest.fixture
def lines():
    return []


@pytest.fixture
def file(tmp_path):
    return tmp_path / "events.jsonl"


@pytest.fixture
def events(lines, file):
    log = EventLog(lines.append, file)
    yield log
    log.close()


def read(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("event", "facts", "text"),
    [
        ("started", {"epoch": 1, "hosts": [0, 1]}, ""),
        ("fault", {"text": "kill -9"}, ""),
        (
            "failed",
            {"host": 2, "process": 1, "chips": "2x2@0,2", "how": "ended by SIGKILL"},
            "host 2 is lost (process 1, chips 2x2@0,2): it ended by SIGKILL",
        ),
        ("epoch", {**GENERATION, "epoch": 1}, ""),
        (
            "epoch",
            GENERATION,
            "generation 3: continues in place with 12 chips without 2x2@0,2, from step 19 by the "
            "state on the devices; no steps to repeat",
        ),
        (
            "epoch",
            {**GENERATION, "in_place": False, "failed": "", "source": "host memory", "repeated": 1},
            "generation 3: continues in new processes with 12 chips, from step 19 by the in-memory "
            "checkpoint; 1 step to repeat",
        ),
        (
            "epoch",
            {**GENERATION, "source": "checkpoint", "repeated": 4},
            "generation 3: continues in place with 12 chips without 2x2@0,2, from step 19 by a "
            "checkpoint; 4 steps to repeat",
        ),
        (
            "epoch",
            {**GENERATION, "source": "start", "from_step": 0},
            "generation 3: continues in place with 12 chips without 2x2@0,2, from step 0 by the "
            "beginning; no steps to repeat",
        ),
        (
            "goes on",
            {"step": 20, "seconds": 6.21, "parts": {"noticed": 5.02, "first_step": 0.18}},
            "step 20 committed 6.2 s after the failure (noticed 5.0, first step 0.2)",
        ),
        (
            "restart",
            {"why": "host 2 is lost", "seconds": 2.0, "hosts": [0, 3]},
            "restarts with hosts 0, 3 in 2 s: host 2 is lost",
        ),
        (
            "masked",
            {"chips": "1x1@2,0", "why": "it computes wrong"},
            "chips 1x1@2,0 are quarantined: it computes wrong",
        ),
        ("struck out", {"host": 2, "times": 3}, "host 2 has failed 3 times and is excluded"),
        ("gives up", {"why": "11 failures"}, "gives up: 11 failures"),
        ("done", {**DONE, "failures": 0}, ""),
        (
            "done",
            DONE,
            "60 steps, 2 failures, 5.0 of 50.0 s lost: goodput 90.0%",
        ),
        (
            "done",
            {**DONE, "failures": 1},
            "60 steps, 1 failure, 5.0 of 50.0 s lost: goodput 90.0%",
        ),
        (
            "done",
            {**DONE, "failures": 1, "steps": 0},
            "1 failure in 50.0 s; no step was reported",
        ),
    ],
)
def test_lines_for_people_and_in_a_file(event, facts, text, events, lines, file):
    assert describe_event(event, facts) == text
    before = time.time()
    events.log(event, **{"lost": 0.0, **facts})
    assert lines == ([text] if text else [])
    (line,) = read(file)
    assert line.pop("event") == event
    assert before - 1 < line.pop("time") < time.time() + 1
    assert {key: line[key] for key in facts} == facts


def test_without_a_file(lines):
    events = EventLog(lines.append)
    events.log("gives up", why="nothing helps")
    events.close()
    assert lines == ["gives up: nothing helps"]


def test_a_full_disk_does_not_end_a_run(lines):
    events = EventLog(lines.append, Path("/dev/full"))
    events.log("gives up", why="nothing helps")
    events.close()
    assert lines[0] == "gives up: nothing helps"


def test_a_second_log_appends_to_the_file(events, lines, file):
    events.log("started", hosts=[0])
    second = EventLog(lines.append, file)
    second.log("started", hosts=[1])
    second.close()
    assert [line["hosts"] for line in read(file)] == [[0], [1]]


class TestGoodput:
    def test_from_the_time_lost(self, events, file):
        events._started -= 100
        failed = {"host": 0, "process": 0, "chips": "", "how": "ended"}
        for lost in (10.0, 15.0):
            events.log("failed", **failed)
            events.log("goes on", step=1, seconds=1.0, lost=lost, parts={})
        events.done(0, 60)
        done = read(file)[-1]
        assert (done["failures"], done["seconds_lost"], done["steps"]) == (2, 25.0, 60)
        assert done["seconds"] == pytest.approx(100, abs=5)
        assert done["goodput"] == pytest.approx(0.75, abs=0.02)

    def test_without_failures(self, events, file):
        events.done(0, 60)
        assert read(file)[-1]["goodput"] == 1

    def test_it_is_not_negative(self, events, file):
        events.log("goes on", step=1, seconds=1.0, lost=1e6, parts={})
        events.done(1, 1)
        assert read(file)[-1]["goodput"] == 0


def test_lines_of_several_threads_are_complete(events, file):
    def log(number):
        for _ in range(50):
            events.log("started", hosts=[number] * 100)

    threads = [threading.Thread(target=log, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line["hosts"][99] for line in read(file)) == sorted([*range(4)] * 50)


# The output of processes ------------------------------------------------------------------------


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
    monkeypatch.setattr(run_log.time, "monotonic", lambda: now)
    splitter, shown = LineSplitter(), []
    for percent in range(100):
        shown += splitter.feed(f"\r{percent}%".encode())
        now += 0.5
    assert shown == [b"19%", b"39%", b"59%", b"79%"]  # the last complete state
    assert splitter.feed(b"\n") == [b"99%"]


def test_long_lines_are_split(monkeypatch):
    monkeypatch.setattr(run_log, "MAX_LINE_BYTES", 10)
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


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_reported_once(monkeypatch, capfd):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        printer = OutputPrinter(1, lambda: None)
        for _ in range(3):
            printer(0, 1, b"step\n")
    assert capfd.readouterr().err == "ftmesh: output is lost: No space left on device\n"


def test_a_closed_stream(monkeypatch, capfd):
    monkeypatch.setattr(sys, "stderr", None)
    printer = OutputPrinter(1, lambda: None)
    printer(0, 2, b"dropped\n")
    printer(0, 1, b"step\n")
    assert capfd.readouterr() == ("[0] step\n", "")


def test_output_that_nobody_reads_is_dropped_at_the_end(monkeypatch):
    """A signal must end the program whose output it is."""
    read, write = os.pipe()
    calls = []
    with open(read, "rb"), open(write, "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        printer = OutputPrinter(
            1, lambda: calls.append("blocked"), is_ending=lambda: len(calls) > 1
        )
        for _ in range(300):  # more than the pipe holds
            printer(0, 1, b"x" * 1000 + b"\n")
            if len(calls) > 1:
                break
        assert calls == ["blocked", "blocked"]
