"""Stuck workers write their stacks, are logged and are killed."""

import re
import subprocess
import time

import pytest

from ftmesh.elastic import controller, heartbeats
from tests.support.controllers import TIMEOUT, FakeWorker, wait_until


class TestStuck:
    def test_a_stuck_worker_writes_stacks_and_is_killed(self, four, stacks):
        four.commit(1)
        four.commit(2)
        for process in (0, 1, 3):
            four.workers[process].send(phase="step", step=3)
        four.workers[2].send(phase="read", step=3)
        four.settle().poll_until(lambda: four.events_named("failed"))
        (failed,) = four.events_named("failed")
        assert (failed["host"], failed["chips"], failed["phase"]) == (12, "2x2@4,0", "read")
        assert failed["step"] == 3
        expected = "is stuck: alive, and [0-9] s in phase 'read' of step 3"
        assert re.fullmatch(expected, failed["how"])
        assert four.killed == [2]
        four.workers.pop(2).channel.close()
        assert four.receive_generation()[:2] == (2, [0, 1, 3])
        assert len(stacks) == 1

    def test_stacks_come_before_the_kill(self, four, stacks, monkeypatch):
        monkeypatch.setattr(controller, "CLOSED_SECONDS", TIMEOUT)
        four.commit(1)
        four.commit(2)
        four.workers[2].send(phase="read", step=3)
        four.settle().poll_until(lambda: stacks)
        assert four.killed == []

    def test_a_worker_that_moves_on_is_spared(self, four, stacks, monkeypatch):
        monkeypatch.setattr(
            controller, "CLOSED_SECONDS", TIMEOUT
        )  # so that none is killed before it moves on
        four.commit(1)
        four.commit(2)
        four.workers[2].send(phase="read", step=3)
        four.settle().poll_until(lambda: stacks)
        assert four.controller.members[2].stacks_at is not None
        four.workers[2].send(phase="step", step=3)
        four.settle()
        assert four.controller.members[2].stacks_at is None
        four.monitor.collective_timeout = TIMEOUT  # for the step that it is in now
        monkeypatch.setattr(controller, "CLOSED_SECONDS", 0.0)
        four.controller.poll()
        assert four.killed == []

    def test_all_are_stuck(self, four, stacks):
        four.commit(1)
        four.commit(2)
        for worker in four.workers.values():
            worker.send(phase="step", step=3)
        four.settle().poll_until(lambda: four.controller.verdict)
        assert four.controller.verdict.action == "restart"
        assert "all workers are stuck" in four.controller.verdict.reason
        assert (four.killed, four.events_named("failed")) == ([], [])
        assert len(stacks) == 4

    def test_the_first_to_be_late_is_not_to_blame_if_all_are(self, four, stacks):
        four.commit(1)
        four.commit(2)
        four.workers[0].send(phase="step", step=3)
        time.sleep(0.15)  # several polls less than it has
        for worker in list(four.workers.values())[1:]:
            worker.send(phase="step", step=3)
        four.settle().poll_until(lambda: four.controller.verdict)
        assert "all workers are stuck" in four.controller.verdict.reason
        assert four.killed == []

    def test_idle_members_do_not_count_as_all(self, make, stacks):
        harness = make(hosts=3).connect()
        harness.workers[2].send(idle=True)
        harness.settle().join(processes=[0, 1])
        for step in (1, 2):
            for process in (0, 1):
                harness.workers[process].send(ready=step)
            assert [worker.receive("commit") for worker in harness.workers.values()] == [
                (step,)
            ] * 3
        for process in (0, 1):
            harness.workers[process].send(phase="step", step=3)
        wait_until(lambda: harness.controller.members[1].phase == "step")
        harness.poll_until(lambda: harness.controller.verdict)
        assert "all workers are stuck" in harness.controller.verdict.reason
        assert harness.events_named("failed") == []

    def test_a_waiting_worker_is_not_to_blame(self, four, stacks):
        four.commit(1)
        four.commit(2)
        for process in (0, 1, 3):
            four.workers[process].send(ready=3)
        four.workers[2].send(phase="save", step=3)
        four.monitor.phase_timeouts = {"save": 0.01}
        four.settle().poll_until(lambda: four.events_named("failed"))
        assert [event["host"] for event in four.events_named("failed")] == [12]

    def test_after_a_failed_collective(self, four, stacks):
        four.commit(1)
        for process in (0, 1, 3):
            four.workers[process].send(failed="gloo: timed out")
        four.workers[2].send(phase="save", step=1)  # whose timeout is far away
        four.settle().poll_until(lambda: four.events_named("failed"))
        assert [event["host"] for event in four.events_named("failed")] == [12]

    def test_a_repeated_phase_does_not_start_again(self, four):
        four.workers[2].send(phase="save", step=1, **{"for": 40.0})
        since = four.settle().controller.members[2].since
        assert time.monotonic() - since == pytest.approx(40, abs=2)
        four.workers[2].send(phase="save", step=1, **{"for": 0.0})
        assert four.settle().controller.members[2].since == since
        four.workers[2].send(phase="save", step=2, **{"for": 0.0})
        assert four.settle().controller.members[2].since > since

    def test_a_worker_without_heartbeats(self, four, monkeypatch):
        """It waits for others, which it may for ever, and sends no heartbeat."""
        monkeypatch.setattr(heartbeats, "SILENCE_SECONDS", 0.1)
        four.commit(1)
        for worker in four.workers.values():
            worker.send(ready=2) if worker.process else worker.send(phase="save", step=2)
        four.settle()

        def beat():
            for process in (0, 1, 3):
                four.workers[process].send(heartbeat=True)
            return four.events_named("failed")

        four.poll_until(beat)
        (failed,) = four.events_named("failed")
        assert (failed["host"], failed["phase"]) == (12, "commit")
        assert failed["how"].endswith("of step 2, without a heartbeat")

    def test_a_worker_that_never_connects(self, make, stacks):
        harness = make(phase_timeouts={"start": 0.1}).connect(0, 1, 2)
        for worker in harness.workers.values():
            worker.send(phase="agree", step=0)
        harness.settle().poll_until(lambda: harness.controller.verdict)
        assert [event["host"] for event in harness.events_named("failed")] == [13]
        assert stacks == []  # its pid is not known

    def test_the_pid_of_a_process_that_is_gone(self, make):
        gone = subprocess.Popen(["true"])
        gone.wait()
        harness = make(hosts=2)
        harness.workers = {
            0: FakeWorker(harness.listener.address, 0),
            1: FakeWorker(harness.listener.address, 1, pid=gone.pid),
        }
        for worker in harness.workers.values():
            worker.receive("welcome")
        harness.join().commit(1)
        harness.commit(2)
        harness.workers[0].send(phase="step", step=3)
        harness.workers[1].send(phase="save", step=3)
        harness.monitor.phase_timeouts = {"save": 0.01}
        harness.settle().poll_until(lambda: harness.events_named("failed"))
        assert harness.killed == [1]
