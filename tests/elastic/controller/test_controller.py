"""The steward: who takes part, which steps count, and what becomes of those who are left."""

import time

import pytest

from ftmesh.elastic import controller as module
from ftmesh.elastic.events import Recovery
from ftmesh.elastic.member import Verdict
from tests.support.controllers import SOON, wait_until


class TestCommits:
    def test_only_when_all_have_voted(self, four):
        for process in (3, 0, 2):
            four.lines[process].say(ready=1)
            four.settled()
            assert four.steward.committed == 0
        four.lines[1].say(ready=1)
        for line in four.lines.values():
            assert line.hear("commit", "then") == (1, "go on")
        assert four.steward.committed == 1

    def test_one_that_votes_twice_is_not_two(self, four):
        for process in (0, 1, 2, 2):
            four.lines[process].say(ready=1)
        four.settled()
        assert four.steward.committed == 0

    def test_each_step_has_its_own_votes(self, four):
        for process, step in ((0, 1), (1, 1), (2, 2), (3, 2)):
            four.lines[process].say(ready=step)
        four.settled()
        assert four.steward.committed == 0

    def test_step_after_step(self, four):
        for step in range(1, 6):
            four.commit(step)
        assert (four.steward.committed, four.steward.highest) == (5, 5)
        assert four.deadlines.usual_step > 0

    def test_idle_members_have_no_vote(self, make):
        found = make(hosts=3).come()
        found.lines[2].say(idle=True)
        found.settled().joined(processes=[0, 1])
        found.lines[0].say(ready=1)
        found.lines[1].say(ready=1)
        assert [found.lines[process].hear("commit") for process in (0, 1, 2)] == [(1,)] * 3

    def test_one_that_says_late_that_it_is_idle_holds_up_nobody(self, make):
        found = make(hosts=3).come()
        found.joined(processes=[0, 1], live=8, source="devices")
        found.lines[0].say(ready=1)
        found.lines[1].say(ready=1)
        found.settled()
        assert found.steward.committed == 0
        assert found.of("epoch") == []
        found.lines[2].say(idle=True)
        assert [found.lines[process].hear("commit") for process in (0, 1, 2)] == [(1,)] * 3
        (epoch,) = found.of("epoch")
        assert (epoch["live"], epoch["source"]) == (8, "devices")


class TestEpochs:
    def test_what_is_said_of_one(self, make):
        found = make(start=3, highest=9).come().joined(7, live=16, less="1x1@0,0", source="start")
        wanted = {
            "event": "epoch",
            "epoch": 3,
            "in_place": False,
            "hosts": [10, 11, 12, 13],
            "failed": "1x1@0,0",
            "live": 16,
            "from_step": 7,
            "repeated": 2,
            "source": "start",
        }
        (said,) = found.events
        assert {key: said[key] for key in wanted} == wanted
        assert (found.steward.committed, found.steward.highest) == (7, 9)

    def test_a_lost_process(self, four):
        four.commit(1)
        four.commit(2)
        four.lines[3].say(at="step", step=3)
        four.settled()
        epoch, members, masked, committed, why = four.lose(3)
        assert (epoch, members, masked, committed) == (2, [0, 1, 2], "", 2)
        assert why == "process 3 ended by SIGKILL"
        (failed,) = four.of("failed")
        assert (failed["host"], failed["process"], failed["chips"]) == (13, 3, "2x2@6,0")
        assert (failed["epoch"], failed["phase"], failed["step"]) == (1, "step", 3)
        assert four.stopped == [3]  # with all that it has started
        assert four.steward.verdict is None

    def test_a_death_between_votes(self, four):
        """Three have voted for step 2; the fourth dies. Step 2 was not: it is done again."""
        four.commit(1)
        for process in (0, 1, 2):
            four.lines[process].say(ready=2)
        four.settled()
        assert four.lose(3)[3] == 1
        four.joined(1)
        four.lines[0].say(ready=2)
        four.lines[1].say(ready=2)
        four.settled()
        assert four.steward.committed == 1  # the votes of before do not count
        four.lines[2].say(ready=2)
        assert [line.hear("commit") for line in four.lines.values()] == [(2,)] * 3

    def test_a_death_after_the_last_vote(self, four):
        """All have voted, and hear of it before they hear of the epoch: no step is repeated."""
        for line in four.lines.values():
            line.say(ready=1)
        wait_until(lambda: four.steward.committed == 1)
        lost = four.lines.pop(2)
        four.steward.ended(2, "ended by SIGKILL", 137)
        lost.channel.close()
        for line in four.lines.values():
            assert line.hear("commit") == (1,)
            assert line.hear("epoch", "committed") == (2, 1)

    def test_nobody_commits_twice(self, four):
        four.commit(1)
        four.lose(0)
        for line in four.lines.values():
            line.say(ready=1, epoch=1)  # as if it had not heard
        four.settled().joined(1)
        assert four.steward.committed == 1
        four.commit(2)

    def test_messages_of_a_stale_epoch(self, four):
        four.commit(1)
        four.lose(3)
        for line in four.lines.values():
            line.say(epoch=1, at="save", step=9)
            line.say(epoch=1, joined=9)
            line.say(epoch=1, ready=9)
            line.say(epoch=1, failed="gloo")
            line.say(epoch=1, mask="1x1@0,0", why="sick")
            line.say(epoch=1, restart="it says so")
            line.say(epoch=1, idle=True)
            line.say(epoch=1, call=1, do="put", key="a")
        four.settled()
        assert (four.steward.epoch, four.steward.committed, four.steward.masked) == (2, 1, "")
        assert four.steward.verdict is None
        assert {member.phase for member in four.steward.members.values()} <= {"commit", "over"}
        assert not any(member.is_idle for member in four.steward.members.values())

    def test_two_deaths_one_after_the_other(self, four):
        four.commit(1)
        four.lose(1)
        epoch, members, _, committed, why = four.lose(2)
        assert (epoch, members, committed) == (3, [0, 3], 1)
        assert "process 2" in why
        four.joined(1).commit(2)
        assert [event["hosts"] for event in four.of("epoch")][-1] == [10, 13]
        assert four.of("epoch")[-1]["in_place"]

    def test_two_that_close_their_lines_together(self, four, monkeypatch):
        monkeypatch.setattr(module, "CLOSED", SOON)
        four.commit(1)
        for process in (1, 2):
            four.lines.pop(process).channel.close()
        wait_until(lambda: sum(m.closed_at is not None for m in four.steward.members.values()) == 2)
        assert four.steward.epoch == 1
        monkeypatch.setattr(module, "CLOSED", 0.0)
        four.tick_until(lambda: four.steward.epoch > 1)
        assert four.heard_of_epoch()[:2] == (2, [0, 3])
        assert [event["how"] for event in four.of("failed")] == ["has closed its line"] * 2
        assert sorted(four.stopped) == [1, 2]

    def test_the_last_one(self, four):
        for process in range(3):
            four.lose(process)
        four.steward.ended(3, "ended with status 1", 1)
        assert four.steward.verdict == Verdict("restart", "no process is left")

    def test_what_it_took_until_it_went_on(self, four):
        four.commit(1)
        four.lose(3)
        four.joined(1, parts={"compiled": 0.5})
        four.commit(2)
        (went_on,) = four.settled().of("goes on")
        assert (went_on["epoch"], went_on["step"], went_on["repeated"]) == (2, 2, 0)
        assert went_on["parts"]["compiled"] == 0.5
        assert 0 < went_on["seconds"] < SOON
        assert went_on["lost"] >= went_on["seconds"]  # from the last commit on
        four.commit(3)
        assert len(four.settled().of("goes on")) == 1

    def test_a_reason_that_was_told_before(self, four):
        four.lines[1].say(failing="the disk is full")
        four.settled()
        four.lose(1, "ended with status 1", 1)
        assert four.of("failed")[0]["how"] == "ended with status 1: the disk is full"


class TestRestarts:
    def test_what_is_lost_counts_from_the_last_commit_of_the_start_before(self, make):
        now = time.monotonic()
        options = {"start": 2, "highest": 3, "recovery": Recovery(now - 20, now - 50)}
        found = make(hosts=1, **options).come().joined(1)
        found.deadlines.took("step", 2.0)
        found.commit(2)
        (went_on,) = found.settled().of("goes on")
        assert went_on["seconds"] == pytest.approx(20, abs=2)
        # Less the step that was under way, and with the two that are repeated.
        assert went_on["lost"] == pytest.approx(50 - 2 + 2 * 2, abs=2)

    def test_before_all_have_joined(self, make):
        found = make().come().joined(processes=[0, 1, 2])
        found.steward.ended(3, "ended with status 1", 1)
        assert found.steward.verdict == Verdict("restart", "host 13 is lost")
        assert [found.lines[process].hear("over") for process in range(3)] == [("restart",)] * 3

    def test_where_it_is_not_to_go_on_in_place(self, make):
        found = make(in_place=False).come().joined()
        found.steward.ended(3, "ended with status 1", 1)
        assert found.steward.verdict.what == "restart"
        assert found.steward.verdict.why.endswith("and it is not to go on in place")

    def test_the_service(self, four):
        four.steward.service_ended("has ended")
        assert four.steward.verdict.what == "restart"
        assert "coordination service has ended" in four.steward.verdict.why

    def test_one_that_cannot_go_on(self, four):
        four.lines[2].say(restart="it cannot be")
        wait_until(lambda: four.steward.verdict)
        assert four.steward.verdict.why == "host 12 (process 2, chips 2x2@4,0): it cannot be"

    def test_a_failed_collective_for_which_nobody_is_to_blame(self, four):
        for line in four.lines.values():
            line.say(failed="gloo: a connection was reset")
        four.settled().tick_until(lambda: four.steward.verdict)
        assert four.steward.verdict.what == "restart"
        assert "all are there: gloo: a connection was reset" in four.steward.verdict.why
        assert four.of("failed") == []

    def test_refused_arguments_are_the_end(self, make):
        found = make().come()
        found.steward.ended(1, "ended with status 2", 2)
        assert found.steward.verdict.what == "end"
        assert found.steward.verdict.why.endswith("ended with status 2")
        assert found.lines[0].hear("over", "why")[0] == "end"

    def test_but_not_once_a_step_has_counted(self, four):
        four.commit(1)
        assert four.lose(1, "ended with status 2", 2)[0] == 2

    def test_nor_in_a_later_start(self, make):
        found = make(start=2).come()
        found.steward.ended(1, "ended with status 2", 2)
        assert found.steward.verdict.what == "restart"

    def test_the_first_verdict_stays(self, four):
        four.steward.give_up("time is up")
        four.steward.service_ended("has ended")
        four.steward.ended(0, "ended", 1)
        assert four.steward.verdict == Verdict("end", "time is up")
        assert four.lines[0].hear("over", "why") == ("end", "time is up")
        assert four.events[1:] == []


class TestMasks:
    def test_the_same_processes_go_on_without_them(self, four):
        four.commit(1)
        for line in four.lines.values():  # all have found it
            line.say(mask="1x1@2,0", why="it differs")
        assert four.heard_of_epoch()[:4] == (2, [0, 1, 2, 3], "1x1@2,0", 1)
        (masked,) = four.of("masked")
        assert (masked["chips"], masked["why"], masked["epoch"]) == ("1x1@2,0", "it differs", 1)
        assert four.settled().of("failed") == []

    def test_more_of_them(self, four):
        four.lines[0].say(mask="1x1@2,0;1x1@3,3", why="they differ")
        four.heard_of_epoch()
        four.joined()
        four.lines[0].say(mask="1x1@0,1", why="it differs")
        assert four.heard_of_epoch()[:3] == (3, [0, 1, 2, 3], "1x1@2,0;1x1@3,3;1x1@0,1")

    def test_what_is_masked_already_changes_nothing(self, four):
        four.lines[0].say(mask="1x1@2,0;1x1@3,3", why="they differ")
        four.heard_of_epoch()
        four.lines[1].say(mask="1x1@3,3;1x1@2,0", why="they differ")
        four.lines[1].say(mask="1x1@3,3", why="it differs")
        assert four.settled().steward.epoch == 2
        assert len(four.of("masked")) == 1

    def test_where_it_is_not_to_go_on_in_place(self, make):
        found = make(in_place=False, masked="1x1@0,0").come().joined()
        found.lines[0].say(mask="1x1@2,0", why="it differs")
        wait_until(lambda: found.steward.verdict)
        assert found.steward.verdict.what == "restart"
        assert found.steward.masked == "1x1@0,0;1x1@2,0"


class TestLeaving:
    def test_all_leave_together(self, four):
        four.commit(1)
        for process in (2, 0, 3):
            four.lines[process].say(leave=True)
        four.settled()
        assert four.steward.verdict is None
        four.lines[1].say(leave=True)
        assert [line.hear("left") for line in four.lines.values()] == [(True,)] * 4
        assert four.steward.verdict == Verdict("end", "", is_well=True)

    def test_a_death_while_leaving(self, four):
        """All is done, so nothing depends on it."""
        four.commit(1)
        for process in (0, 1, 2):
            four.lines[process].say(leave=True)
        four.settled()
        four.steward.ended(3, "ended by SIGSEGV", 139)
        assert four.steward.verdict == Verdict("end", "", is_well=True)
        assert [four.lines[process].hear("left") for process in (0, 1, 2)] == [(True,)] * 3
        assert four.of("failed") == []

    def test_one_that_hangs_when_it_is_done_is_stopped(self, make):
        found = make(given={"leave": 0.05}).come().joined()
        found.lines[1].say(leave=True)
        found.settled().tick_until(lambda: found.stopped == [1] * len(found.stopped) != [])
        assert found.steward.verdict is None

    def test_idle_members_are_told(self, make):
        found = make(hosts=2).come()
        found.lines[1].say(idle=True)
        found.settled()
        found.lines[0].say(leave=True)
        assert [line.hear("left") for line in found.lines.values()] == [(True,)] * 2

    def test_programs_that_know_of_no_steward(self, make):
        found = make(hosts=2)
        found.steward.ended(0, "ended with status 0", 0)
        assert found.steward.verdict is None
        found.steward.ended(1, "ended with status 0", 0)
        assert found.steward.verdict == Verdict("end", "", is_well=True)

    def test_one_of_those_that_fails_after_another_has_ended(self, make):
        found = make(hosts=2)
        found.steward.ended(0, "ended with status 0", 0)
        found.steward.ended(1, "ended with status 3", 3)
        assert found.steward.verdict == Verdict("restart", "host 11 is lost")
        assert [event["host"] for event in found.of("failed")] == [11]

    def test_a_pause(self, four):
        four.commit(1)
        four.steward.pause("a host comes back")
        four.commit(2, then="leave")
        for line in four.lines.values():
            line.say(leave=True)
        wait_until(lambda: four.steward.verdict)
        verdict = four.steward.verdict
        assert (verdict.what, verdict.why, verdict.is_well) == (
            "restart",
            "a host comes back",
            True,
        )

    def test_a_death_in_a_pause(self, four):
        """One has left already, and hears of no epoch: so nobody can go on in place."""
        four.steward.pause("a host comes back")
        four.commit(1, then="leave")
        four.lines[0].say(leave=True)
        four.settled()
        four.steward.ended(3, "ended by SIGKILL", 137)
        assert four.steward.verdict == Verdict("restart", "host 13 is lost")
        assert four.lines[1].hear("over") == ("restart",)
        assert [event["host"] for event in four.of("failed")] == [13]

    def test_a_death_in_a_pause_before_anyone_has_left(self, four):
        four.steward.pause("a host comes back")
        four.commit(1, then="leave")
        assert four.lose(3)[:2] == (2, [0, 1, 2])
