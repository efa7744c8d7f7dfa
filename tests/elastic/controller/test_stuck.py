"""The steward: who is stuck is named, asked where it is, and stopped."""

import re
import subprocess
import time

import pytest

from ftmesh.elastic import controller, heartbeats
from tests.support.controllers import SOON, Line, wait_until


class TestStuck:
    def test_it_is_named_asked_and_stopped(self, four, stacks):
        four.commit(1)
        four.commit(2)
        for process in (0, 1, 3):
            four.lines[process].say(at="step", step=3)
        four.lines[2].say(at="read", step=3)
        four.settled().tick_until(lambda: four.of("failed"))
        (failed,) = four.of("failed")
        assert (failed["host"], failed["chips"], failed["phase"]) == (12, "2x2@4,0", "read")
        assert failed["step"] == 3
        says = "is stuck: alive, and [0-9] s in phase 'read' of step 3"
        assert re.fullmatch(says, failed["how"])
        assert four.stopped == [2]
        four.lines.pop(2).channel.close()
        assert four.heard_of_epoch()[:2] == (2, [0, 1, 3])
        assert len(stacks) == 1

    def test_stacks_come_before_the_end(self, four, stacks, monkeypatch):
        monkeypatch.setattr(controller, "CLOSED", SOON)
        four.commit(1)
        four.commit(2)
        four.lines[2].say(at="read", step=3)
        four.settled().tick_until(lambda: stacks)
        assert four.stopped == []

    def test_one_that_moves_on_after_all_is_spared(self, four, stacks, monkeypatch):
        monkeypatch.setattr(controller, "CLOSED", SOON)  # so that none is stopped before it has
        four.commit(1)
        four.commit(2)
        four.lines[2].say(at="read", step=3)
        four.settled().tick_until(lambda: stacks)
        assert four.steward.members[2].stacks_at is not None
        four.lines[2].say(at="step", step=3)
        four.settled()
        assert four.steward.members[2].stacks_at is None
        four.deadlines.limit = SOON  # for the step that it is in now
        monkeypatch.setattr(controller, "CLOSED", 0.0)
        four.steward.tick()
        assert four.stopped == []

    def test_nobody_can_tell_where_all_are(self, four, stacks):
        four.commit(1)
        four.commit(2)
        for line in four.lines.values():
            line.say(at="step", step=3)
        four.settled().tick_until(lambda: four.steward.verdict)
        assert four.steward.verdict.what == "restart"
        assert "all processes are stuck" in four.steward.verdict.why
        assert (four.stopped, four.of("failed")) == ([], [])
        assert len(stacks) == 4

    def test_the_first_of_all_is_not_to_blame_because_it_is_the_first(self, four, stacks):
        four.commit(1)
        four.commit(2)
        four.lines[0].say(at="step", step=3)
        time.sleep(0.15)  # for several turns less than it has
        for line in list(four.lines.values())[1:]:
            line.say(at="step", step=3)
        four.settled().tick_until(lambda: four.steward.verdict)
        assert "all processes are stuck" in four.steward.verdict.why
        assert four.stopped == []

    def test_all_is_all_who_work(self, make, stacks):
        found = make(hosts=3).come()
        found.lines[2].say(idle=True)
        found.settled().joined(processes=[0, 1])
        for step in (1, 2):
            for process in (0, 1):
                found.lines[process].say(ready=step)
            assert [line.hear("commit") for line in found.lines.values()] == [(step,)] * 3
        for process in (0, 1):
            found.lines[process].say(at="step", step=3)
        wait_until(lambda: found.steward.members[1].phase == "step")
        found.tick_until(lambda: found.steward.verdict)
        assert "all processes are stuck" in found.steward.verdict.why
        assert found.of("failed") == []

    def test_one_that_waits_is_not_blamed(self, four, stacks):
        four.commit(1)
        four.commit(2)
        for process in (0, 1, 3):
            four.lines[process].say(ready=3)
        four.lines[2].say(at="save", step=3)
        four.deadlines.given = {"save": 0.01}
        four.settled().tick_until(lambda: four.of("failed"))
        assert [event["host"] for event in four.of("failed")] == [12]

    def test_where_a_collective_has_failed(self, four, stacks):
        four.commit(1)
        for process in (0, 1, 3):
            four.lines[process].say(failed="gloo: timed out")
        four.lines[2].say(at="save", step=1)  # of which the deadline is far away
        four.settled().tick_until(lambda: four.of("failed"))
        assert [event["host"] for event in four.of("failed")] == [12]

    def test_what_is_said_again_does_not_begin_again(self, four):
        four.lines[2].say(at="save", step=1, **{"for": 40.0})
        since = four.settled().steward.members[2].since
        assert time.monotonic() - since == pytest.approx(40, abs=2)
        four.lines[2].say(at="save", step=1, **{"for": 0.0})
        assert four.settled().steward.members[2].since == since
        four.lines[2].say(at="save", step=2, **{"for": 0.0})
        assert four.settled().steward.members[2].since > since

    def test_one_without_a_sign_of_life(self, four, monkeypatch):
        """It was to wait for others, which it may for ever, and says nothing any more."""
        monkeypatch.setattr(heartbeats, "SILENCE", 0.1)
        four.commit(1)
        for line in four.lines.values():
            line.say(ready=2) if line.process else line.say(at="save", step=2)
        four.settled()

        def beat():
            for process in (0, 1, 3):
                four.lines[process].say(beat=True)
            return four.of("failed")

        four.tick_until(beat)
        (failed,) = four.of("failed")
        assert (failed["host"], failed["phase"]) == (12, "commit")
        assert failed["how"].endswith("of step 2, without a sign of life")

    def test_a_process_that_never_comes(self, make, stacks):
        found = make(given={"start": 0.1}).come(0, 1, 2)
        for line in found.lines.values():
            line.say(at="agree", step=0)
        found.settled().tick_until(lambda: found.steward.verdict)
        assert [event["host"] for event in found.of("failed")] == [13]
        assert stacks == []  # nobody knows its number

    def test_the_number_of_one_that_is_gone(self, make):
        gone = subprocess.Popen(["true"])
        gone.wait()
        found = make(hosts=2)
        found.lines = {
            0: Line(found.listener.address, 0),
            1: Line(found.listener.address, 1, pid=gone.pid),
        }
        for line in found.lines.values():
            line.hear("welcome")
        found.joined().commit(1)
        found.commit(2)
        found.lines[0].say(at="step", step=3)
        found.lines[1].say(at="save", step=3)
        found.deadlines.given = {"save": 0.01}
        found.settled().tick_until(lambda: found.of("failed"))
        assert found.stopped == [1]
