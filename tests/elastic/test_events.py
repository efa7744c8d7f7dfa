"""EventLog: a line for people, a line of JSON for programs, and what failures cost."""

import json
import threading
import time
from pathlib import Path

import pytest

from ftmesh.elastic.events import EventLog, describe_event

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
