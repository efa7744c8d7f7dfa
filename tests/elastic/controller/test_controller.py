"""The controller: who takes part, which steps are committed, and what happens after a loss."""

import time

import pytest

from ftmesh.elastic import controller as module
from ftmesh.elastic.heartbeats import Verdict
from ftmesh.elastic.run_log import Recovery
from tests.support.controllers import TIMEOUT, wait_until


class TestCommits:
    def test_a_step_is_committed_when_all_have_voted(self, four):
        for process in (3, 0, 2):
            four.workers[process].send(ready=1)
            four.settle()
            assert four.controller.committed == 0
        four.workers[1].send(ready=1)
        for worker in four.workers.values():
            assert worker.receive("commit", "then") == (1, "go on")
        assert four.controller.committed == 1

    def test_a_second_vote_does_not_count(self, four):
        for process in (0, 1, 2, 2):
            four.workers[process].send(ready=1)
        four.settle()
        assert four.controller.committed == 0

    def test_votes_count_per_step(self, four):
        for process, step in ((0, 1), (1, 1), (2, 2), (3, 2)):
            four.workers[process].send(ready=step)
        four.settle()
        assert four.controller.committed == 0

    def test_consecutive_steps(self, four):
        for step in range(1, 6):
            four.commit(step)
        assert (four.controller.committed, four.controller.highest_step) == (5, 5)
        assert four.monitor.typical_step > 0

    def test_idle_members_have_no_vote(self, make):
        harness = make(hosts=3).connect()
        harness.workers[2].send(idle=True)
        harness.settle().join(processes=[0, 1])
        harness.workers[0].send(ready=1)
        harness.workers[1].send(ready=1)
        assert [harness.workers[process].receive("commit") for process in (0, 1, 2)] == [(1,)] * 3

    def test_a_late_idle_message_holds_up_nobody(self, make):
        harness = make(hosts=3).connect()
        harness.join(processes=[0, 1], live=8, source="devices")
        harness.workers[0].send(ready=1)
        harness.workers[1].send(ready=1)
        harness.settle()
        assert harness.controller.committed == 0
        assert harness.events_named("epoch") == []
        harness.workers[2].send(idle=True)
        assert [harness.workers[process].receive("commit") for process in (0, 1, 2)] == [(1,)] * 3
        (event,) = harness.events_named("epoch")
        assert (event["live"], event["source"]) == (8, "devices")


class TestGenerations:
    def test_the_event_of_a_generation(self, make):
        harness = (
            make(start=3, highest_step=9)
            .connect()
            .join(7, live=16, failed_chips="1x1@0,0", source="start")
        )
        expected = {
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
        (event,) = harness.events
        assert {key: event[key] for key in expected} == expected
        assert (harness.controller.committed, harness.controller.highest_step) == (7, 9)

    def test_a_lost_worker(self, four):
        four.commit(1)
        four.commit(2)
        four.workers[3].send(phase="step", step=3)
        four.settle()
        generation, members, quarantined, committed, reason = four.lose(3)
        assert (generation, members, quarantined, committed) == (2, [0, 1, 2], "", 2)
        assert reason == "process 3 ended by SIGKILL"
        (failed,) = four.events_named("failed")
        assert (failed["host"], failed["process"], failed["chips"]) == (13, 3, "2x2@6,0")
        assert (failed["epoch"], failed["phase"], failed["step"]) == (1, "step", 3)
        assert four.killed == [3]  # with everything it has started
        assert four.controller.verdict is None

    def test_a_loss_between_votes(self, four):
        """Three have voted for step 2 and the fourth is lost: step 2 is repeated."""
        four.commit(1)
        for process in (0, 1, 2):
            four.workers[process].send(ready=2)
        four.settle()
        assert four.lose(3)[3] == 1
        four.join(1)
        four.workers[0].send(ready=2)
        four.workers[1].send(ready=2)
        four.settle()
        assert four.controller.committed == 1  # old votes do not count
        four.workers[2].send(ready=2)
        assert [worker.receive("commit") for worker in four.workers.values()] == [(2,)] * 3

    def test_a_loss_after_the_last_vote(self, four):
        """All have voted, and receive the commit before the generation: no step is repeated."""
        for worker in four.workers.values():
            worker.send(ready=1)
        wait_until(lambda: four.controller.committed == 1)
        lost = four.workers.pop(2)
        four.controller.process_ended(2, "ended by SIGKILL", 137)
        lost.channel.close()
        for worker in four.workers.values():
            assert worker.receive("commit") == (1,)
            assert worker.receive("generation", "committed") == (2, 1)

    def test_no_step_is_committed_twice(self, four):
        four.commit(1)
        four.lose(0)
        for worker in four.workers.values():
            worker.send(ready=1, generation=1)  # as if it had not received it
        four.settle().join(1)
        assert four.controller.committed == 1
        four.commit(2)

    def test_messages_of_an_old_generation_are_ignored(self, four):
        four.commit(1)
        four.lose(3)
        for worker in four.workers.values():
            worker.send(generation=1, phase="save", step=9)
            worker.send(generation=1, joined=9)
            worker.send(generation=1, ready=9)
            worker.send(generation=1, failed="gloo")
            worker.send(generation=1, quarantine="1x1@0,0", reason="unhealthy")
            worker.send(generation=1, restart="it says so")
            worker.send(generation=1, idle=True)
            worker.send(generation=1, call=1, operation="put", key="a")
        four.settle()
        assert (
            four.controller.generation,
            four.controller.committed,
            four.controller.quarantined,
        ) == (2, 1, "")
        assert four.controller.verdict is None
        assert {member.phase for member in four.controller.members.values()} <= {"commit", "over"}
        assert not any(member.is_idle for member in four.controller.members.values())

    def test_two_losses_in_a_row(self, four):
        four.commit(1)
        four.lose(1)
        generation, members, _, committed, reason = four.lose(2)
        assert (generation, members, committed) == (3, [0, 3], 1)
        assert "process 2" in reason
        four.join(1).commit(2)
        assert [event["hosts"] for event in four.events_named("epoch")][-1] == [10, 13]
        assert four.events_named("epoch")[-1]["in_place"]

    def test_two_connections_that_close_together(self, four, monkeypatch):
        monkeypatch.setattr(module, "CLOSED_SECONDS", TIMEOUT)
        four.commit(1)
        for process in (1, 2):
            four.workers.pop(process).channel.close()
        wait_until(
            lambda: sum(m.closed_at is not None for m in four.controller.members.values()) == 2
        )
        assert four.controller.generation == 1
        monkeypatch.setattr(module, "CLOSED_SECONDS", 0.0)
        four.poll_until(lambda: four.controller.generation > 1)
        assert four.receive_generation()[:2] == (2, [0, 3])
        assert [event["how"] for event in four.events_named("failed")] == [
            "has closed its connection"
        ] * 2
        assert sorted(four.killed) == [1, 2]

    def test_loss_of_the_last_worker(self, four):
        for process in range(3):
            four.lose(process)
        four.controller.process_ended(3, "ended with status 1", 1)
        assert four.controller.verdict == Verdict("restart", "no worker is left")

    def test_recovery_time(self, four):
        four.commit(1)
        four.lose(3)
        four.join(1, parts={"compiled": 0.5})
        four.commit(2)
        (resumed,) = four.settle().events_named("goes on")
        assert (resumed["epoch"], resumed["step"], resumed["repeated"]) == (2, 2, 0)
        assert resumed["parts"]["compiled"] == 0.5
        assert 0 < resumed["seconds"] < TIMEOUT
        assert resumed["lost"] >= resumed["seconds"]  # from the last commit on
        four.commit(3)
        assert len(four.settle().events_named("goes on")) == 1

    def test_a_worker_reports_why_it_exits(self, four):
        four.workers[1].send(exiting="the disk is full")
        four.settle()
        four.lose(1, "ended with status 1", 1)
        assert four.events_named("failed")[0]["how"] == "ended with status 1: the disk is full"


class TestRestarts:
    def test_lost_time_counts_from_the_last_commit_of_the_previous_start(self, make):
        now = time.monotonic()
        options = {"start": 2, "highest_step": 3, "recovery": Recovery(now - 20, now - 50)}
        harness = make(hosts=1, **options).connect().join(1)
        harness.monitor.record("step", 2.0)
        harness.commit(2)
        (resumed,) = harness.settle().events_named("goes on")
        assert resumed["seconds"] == pytest.approx(20, abs=2)
        # Less the step that was under way, and with the two that are repeated.
        assert resumed["lost"] == pytest.approx(50 - 2 + 2 * 2, abs=2)

    def test_a_loss_before_all_have_joined(self, make):
        harness = make().connect().join(processes=[0, 1, 2])
        harness.controller.process_ended(3, "ended with status 1", 1)
        assert harness.controller.verdict == Verdict("restart", "host 13 is lost")
        assert [harness.workers[process].receive("over") for process in range(3)] == [
            ("restart",)
        ] * 3

    def test_without_in_place(self, make):
        harness = make(in_place=False).connect().join()
        harness.controller.process_ended(3, "ended with status 1", 1)
        assert harness.controller.verdict.action == "restart"
        assert harness.controller.verdict.reason.endswith("and workers do not continue in place")

    def test_a_worker_requests_a_restart(self, four):
        four.workers[2].send(restart="it cannot be")
        wait_until(lambda: four.controller.verdict)
        assert four.controller.verdict.reason == "host 12 (process 2, chips 2x2@4,0): it cannot be"

    def test_a_failed_collective_without_a_lost_worker(self, four):
        for worker in four.workers.values():
            worker.send(failed="gloo: a connection was reset")
        four.settle().poll_until(lambda: four.controller.verdict)
        assert four.controller.verdict.action == "restart"
        assert "no worker is lost: gloo: a connection was reset" in four.controller.verdict.reason
        assert four.events_named("failed") == []

    def test_bad_arguments_end_the_run(self, make):
        harness = make().connect()
        harness.controller.process_ended(1, "ended with status 2", 2)
        assert harness.controller.verdict.action == "end"
        assert harness.controller.verdict.reason.endswith("ended with status 2")
        assert harness.workers[0].receive("over", "reason")[0] == "end"

    def test_but_not_after_a_committed_step(self, four):
        four.commit(1)
        assert four.lose(1, "ended with status 2", 2)[0] == 2

    def test_nor_in_a_later_start(self, make):
        harness = make(start=2).connect()
        harness.controller.process_ended(1, "ended with status 2", 2)
        assert harness.controller.verdict.action == "restart"

    def test_the_first_verdict_stays(self, four):
        four.controller.decide("end", "time is up")
        four.controller.decide("restart", "JAX's coordination service has ended")
        four.controller.process_ended(0, "ended", 1)
        assert four.controller.verdict == Verdict("end", "time is up")
        assert four.workers[0].receive("over", "reason") == ("end", "time is up")
        assert four.events[1:] == []


class TestQuarantine:
    def test_the_same_workers_continue_without_the_chips(self, four):
        four.commit(1)
        for worker in four.workers.values():  # all have harness it
            worker.send(quarantine="1x1@2,0", reason="it differs")
        assert four.receive_generation()[:4] == (2, [0, 1, 2, 3], "1x1@2,0", 1)
        (masked,) = four.events_named("masked")
        assert (masked["chips"], masked["why"], masked["epoch"]) == ("1x1@2,0", "it differs", 1)
        assert four.settle().events_named("failed") == []

    def test_more_chips(self, four):
        four.workers[0].send(quarantine="1x1@2,0;1x1@3,3", reason="they differ")
        four.receive_generation()
        four.join()
        four.workers[0].send(quarantine="1x1@0,1", reason="it differs")
        assert four.receive_generation()[:3] == (3, [0, 1, 2, 3], "1x1@2,0;1x1@3,3;1x1@0,1")

    def test_known_chips_change_nothing(self, four):
        four.workers[0].send(quarantine="1x1@2,0;1x1@3,3", reason="they differ")
        four.receive_generation()
        four.workers[1].send(quarantine="1x1@3,3;1x1@2,0", reason="they differ")
        four.workers[1].send(quarantine="1x1@3,3", reason="it differs")
        assert four.settle().controller.generation == 2
        assert len(four.events_named("masked")) == 1

    def test_without_in_place(self, make):
        harness = make(in_place=False, quarantined="1x1@0,0").connect().join()
        harness.workers[0].send(quarantine="1x1@2,0", reason="it differs")
        wait_until(lambda: harness.controller.verdict)
        assert harness.controller.verdict.action == "restart"
        assert harness.controller.quarantined == "1x1@0,0;1x1@2,0"


class TestLeaving:
    def test_all_leave_together(self, four):
        four.commit(1)
        for process in (2, 0, 3):
            four.workers[process].send(leave=True)
        four.settle()
        assert four.controller.verdict is None
        four.workers[1].send(leave=True)
        assert [worker.receive("left") for worker in four.workers.values()] == [(True,)] * 4
        assert four.controller.verdict == Verdict("end", "", is_orderly=True)

    def test_a_loss_while_leaving(self, four):
        """The run is done, so nothing depends on the worker."""
        four.commit(1)
        for process in (0, 1, 2):
            four.workers[process].send(leave=True)
        four.settle()
        four.controller.process_ended(3, "ended by SIGSEGV", 139)
        assert four.controller.verdict == Verdict("end", "", is_orderly=True)
        assert [four.workers[process].receive("left") for process in (0, 1, 2)] == [(True,)] * 3
        assert four.events_named("failed") == []

    def test_a_worker_that_hangs_in_its_exit_is_killed(self, make):
        harness = make(phase_timeouts={"leave": 0.05}).connect().join()
        harness.workers[1].send(leave=True)
        harness.settle().poll_until(lambda: harness.killed == [1] * len(harness.killed) != [])
        assert harness.controller.verdict is None

    def test_idle_members_leave_too(self, make):
        harness = make(hosts=2).connect()
        harness.workers[1].send(idle=True)
        harness.settle()
        harness.workers[0].send(leave=True)
        assert [worker.receive("left") for worker in harness.workers.values()] == [(True,)] * 2

    def test_programs_that_do_not_use_the_controller(self, make):
        harness = make(hosts=2)
        harness.controller.process_ended(0, "ended with status 0", 0)
        assert harness.controller.verdict is None
        harness.controller.process_ended(1, "ended with status 0", 0)
        assert harness.controller.verdict == Verdict("end", "", is_orderly=True)

    def test_status_0_of_a_worker_that_is_not_done(self, four):
        """A shell that runs `python train.py | tee log` has the status of tee."""
        four.commit(1)
        lost = four.lose(2, "ended with status 0", 0)
        assert lost[:2] == (2, [0, 1, 3])
        (event,) = four.events_named("failed")
        assert event["how"] == "ended with status 0 before the end of the run"
        four.join(1).commit(2)
        four.lose(3)  # others count as before
        assert four.controller.verdict is None

    def test_status_0_of_a_worker_that_is_done(self, four):
        four.workers[2].send(leave=True)
        four.settle()
        four.controller.process_ended(2, "ended with status 0", 0)
        assert four.controller.verdict is None
        assert four.events_named("failed") == []

    def test_such_a_program_fails_after_another_has_ended(self, make):
        harness = make(hosts=2)
        harness.controller.process_ended(0, "ended with status 0", 0)
        harness.controller.process_ended(1, "ended with status 3", 3)
        assert harness.controller.verdict == Verdict("restart", "host 11 is lost")
        assert [event["host"] for event in harness.events_named("failed")] == [11]

    def test_a_pause(self, four):
        four.commit(1)
        four.controller.pause("a host comes back")
        four.commit(2, then="leave")
        for worker in four.workers.values():
            worker.send(leave=True)
        wait_until(lambda: four.controller.verdict)
        verdict = four.controller.verdict
        assert (verdict.action, verdict.reason, verdict.is_orderly) == (
            "restart",
            "a host comes back",
            True,
        )

    def test_a_loss_in_a_pause(self, four):
        """One has left already and would not enter the generation: all are restarted."""
        four.controller.pause("a host comes back")
        four.commit(1, then="leave")
        four.workers[0].send(leave=True)
        four.settle()
        four.controller.process_ended(3, "ended by SIGKILL", 137)
        assert four.controller.verdict == Verdict("restart", "host 13 is lost")
        assert four.workers[1].receive("over") == ("restart",)
        assert [event["host"] for event in four.events_named("failed")] == [13]

    def test_a_loss_in_a_pause_before_any_has_left(self, four):
        four.controller.pause("a host comes back")
        four.commit(1, then="leave")
        assert four.lose(3)[:2] == (2, [0, 1, 2])
