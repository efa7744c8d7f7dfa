"""Supervisor: runs a command as a pod and restarts it when hosts fail.

Within one start of the workers the controller decides, and survivors continue in place. Where they
cannot, the supervisor ends what is left and starts all workers again on the hosts that are good.
"""

from __future__ import annotations

import json
import secrets
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftmesh.elastic.child_process import ChildProcess, CoordinationService, PeerStoreProcesses
from ftmesh.elastic.controller import Controller
from ftmesh.elastic.events import EventLog, Recovery
from ftmesh.elastic.heartbeats import Member, ProgressMonitor, Verdict
from ftmesh.elastic.local_pod import TIMED_OUT, OnOutput, Pod
from ftmesh.elastic.pod_environment import HostLayout
from ftmesh.elastic.rpc import Listener

POLL_SECONDS = 0.1
END_SECONDS = 2.0  # for workers to exit before they are killed
LEAVE_SECONDS = 60.0  # the same for workers that are done
MAX_BACKOFF = 60.0
GAVE_UP = 1  # exit status

# XLA's default timeout of collectives on CPU devices is half an hour.
_FLAGS = (
    "--xla_cpu_collective_timeout_seconds={timeout} "
    "--xla_cpu_collective_call_terminate_timeout_seconds={terminate}"
)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When to continue after failures, and how. Times are in seconds.

    Attributes:
        failures: Give up after more failures than this.
        in_place: Survivors keep their processes where possible.
        collective_timeout: A collective that takes longer has failed.
        phase_timeouts: By phase, see `ftmesh.elastic.heartbeats`.
        strikes: Exclude a host after this many failures.
        backoff: Wait before a restart; doubled after each restart that led to no step.
        grow_back: Restart with lost hosts after this time without them; None for never.
    """

    failures: int = 10
    in_place: bool = True
    collective_timeout: float = 30.0
    phase_timeouts: Mapping[str, float] = field(default_factory=dict)
    strikes: int = 3
    backoff: float = 1.0
    grow_back: float | None = None


class Supervisor:
    """Runs a command, one process for each host, until it is done.

    Args:
        command: What each worker runs.
        layout: The mesh and the block of each host.
        run_dir: Folder for stacks and process ids.
        on_output: As for `Pod`, with the host in place of the process.
        env: Variables to add to the environment of the workers.
    """

    def __init__(
        self,
        command: Sequence[str],
        layout: HostLayout,
        policy: Policy,
        events: EventLog,
        run_dir: Path,
        *,
        on_output: OnOutput | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._command, self._layout, self._policy = list(command), layout, policy
        self._events, self._run_dir = events, run_dir
        self._on_output: OnOutput = on_output or (lambda host, stream, data: None)
        self._env = dict(env or {})
        self._secret = secrets.token_hex(32)
        self._run_env = {"FTMESH_SECRET": self._secret, "FTMESH_RUN_DIR": str(run_dir)}
        self._hosts = range(len(layout.blocks))
        self._strikes: Counter[int] = Counter()
        self._pod: Pod | None = None
        self._signals: list[signal.Signals] = []
        self._generation, self._highest_step, self._quarantined = 1, 0, ""
        self._recovery = Recovery()
        self._start_failure = ""  # how all workers of the first start ended before they joined
        self._deadline = float("inf")
        self._monitor = ProgressMonitor(policy.collective_timeout, policy.phase_timeouts)
        (run_dir / "pids").mkdir(parents=True, exist_ok=True)

    def run(self, timeout: float | None = None) -> int:
        """Run until the command is done, a restart cannot help, or `timeout` seconds are over.

        Returns:
            The exit status: 0, that of a worker, 128 + n after signal n, 124 after the timeout.
        """
        self._deadline = float("inf") if timeout is None else time.monotonic() + timeout
        fruitless = 0  # starts in a row that led to no step
        with closing(PeerStoreProcesses(self._run_env, self._record_pid)) as stores:
            while True:
                hosts = self._good_hosts()
                before = self._highest_step
                stores.start_missing(hosts)
                controller, status = self._start(hosts, stores)
                verdict = controller.verdict or Verdict("end", "")
                if self._signals or (verdict.action == "end" and not verdict.reason):
                    break
                status = status or GAVE_UP
                fruitless = 0 if self._highest_step > before else fruitless + 1
                reason = self._reason_to_give_up(verdict, fruitless)
                if reason:
                    self._events.log("gives up", epoch=self._generation, why=reason)
                    break
                status = 0
                delay = min(self._policy.backoff * 2 ** max(fruitless - 1, 0), MAX_BACKOFF)
                facts = {"seconds": delay, "hosts": self._good_hosts()}
                self._events.log("restart", epoch=self._generation, why=verdict.reason, **facts)
                self._sleep(delay)
                if self._signals:
                    break
        if self._signals:
            status = 128 + self._signals[0]
        elif time.monotonic() > self._deadline:
            status = TIMED_OUT
        self._events.done(status, self._highest_step)
        return status

    def end(self, signum: signal.Signals) -> None:
        """End the run as by a signal."""
        self._signals.append(signum)
        if self._pod is not None:
            self._pod.end(signum)

    def enforce(self) -> None:
        """As `Pod.enforce`."""
        if self._pod is not None:
            self._pod.enforce()

    def _good_hosts(self) -> list[int]:
        return [host for host in self._hosts if self._strikes[host] < self._policy.strikes]

    def _reason_to_give_up(self, verdict: Verdict, fruitless: int) -> str:
        """Return why another start would not help; empty if it may."""
        if verdict.action == "end":
            return verdict.reason
        if self._start_failure:
            return f"before they joined each other, all processes {self._start_failure}"
        if self._events.failures > self._policy.failures:
            return f"{self._events.failures} failures; the last: {verdict.reason}"
        if fruitless > self._policy.failures:
            return f"{fruitless} starts led to no step; the last: {verdict.reason}"
        if not self._good_hosts():
            return f"every host has failed {self._policy.strikes} times; the last: {verdict.reason}"
        return ""

    def _sleep(self, seconds: float) -> None:
        until = min(time.monotonic() + seconds, self._deadline)
        while time.monotonic() < until and not self._signals:
            time.sleep(min(POLL_SECONDS, seconds))

    # One start of the workers -----------------------------------------------------------------

    def _start(self, hosts: Sequence[int], stores: PeerStoreProcesses) -> tuple[Controller, int]:
        """Run the workers until there is a verdict; return the status of one that failed."""
        policy, blocks = self._policy, self._layout.blocks
        controller = Controller(
            [Member(process, host, str(blocks[host])) for process, host in enumerate(hosts)],
            generation=self._generation,
            monitor=self._monitor,
            log_event=self._log_event,
            kill=lambda process: pod.processes[process].end(signal.SIGKILL),
            in_place=policy.in_place,
            quarantined=self._quarantined,
            highest_step=self._highest_step,
            recovery=self._recovery,
        )
        self._log_event("started", epoch=self._generation, hosts=list(hosts))
        with (
            Listener(controller.serve, secret=self._secret) as listener,
            closing(CoordinationService(len(hosts), self._run_env, self._record_pid)) as service,
        ):
            shared = {
                **self._env,
                **self._run_env,
                "FTMESH_COORDINATOR": service.address,
                "FTMESH_STEWARD": listener.address,
                "FTMESH_KEEPERS": stores.addresses,
                "FTMESH_EPOCH": str(self._generation),
                "FTMESH_MESH": self._layout.mesh,
                "FTMESH_BLOCKS": ";".join(str(blocks[host]) for host in hosts),
            }
            timeout = policy.collective_timeout
            pod = Pod(
                self._command,
                hosts=len(hosts),
                devices_per_host=len(blocks[0].coords()),
                env=[{**shared, "FTMESH_HOST": str(host)} for host in hosts],
                flags=_FLAGS.format(timeout=round(timeout), terminate=round(2 * timeout + 30)),
                on_output=lambda process, *output: self._on_output(hosts[process], *output),
            )
            with pod:
                self._pod = pod
                if self._signals:  # received before there was a pod
                    pod.end(self._signals[-1])
                for process in pod.processes:
                    self._record_pid("worker", hosts[process.number], process.pid)
                self._watch(pod, controller, service)
                status = self._end_workers(pod, controller)
                self._start_failure = _start_failure(pod, controller)
                self._pod = None
        self._generation = controller.generation + 1
        self._highest_step = controller.highest_step
        self._quarantined = controller.quarantined
        failed_at = controller.recovery.failed_at or time.monotonic()
        self._recovery = Recovery(failed_at, controller.recovery.last_commit)
        return controller, status

    def _watch(self, pod: Pod, controller: Controller, service: CoordinationService) -> None:
        while controller.verdict is None and not self._signals:
            exited = pod.poll(POLL_SECONDS)
            if service.has_exited:
                controller.decide("restart", "JAX's coordination service has ended")
            for process in exited if not self._signals else ():
                controller.process_ended(process.number, _how_ended(process), process.status or 0)
            controller.poll()
            failures, allowed = self._events.failures, self._policy.failures
            if failures > allowed:
                controller.decide("end", f"{failures} failures, and {allowed} are allowed")
            if time.monotonic() > self._deadline:
                controller.decide("end", "--timeout reached")
            if self._can_grow_back(controller):
                controller.pause("lost hosts come back")

    def _can_grow_back(self, controller: Controller) -> bool:
        wait = self._policy.grow_back
        if wait is None or time.monotonic() - controller.generation_began < wait:
            return False
        present = {member.host for member in controller.members.values()}
        return not present.issuperset(self._good_hosts())

    def _end_workers(self, pod: Pod, controller: Controller) -> int:
        """Wait for the workers to exit, or kill them; return the status of one that failed."""
        verdict = controller.verdict
        is_orderly = self._signals or (verdict is not None and verdict.is_orderly)
        pod.wait(LEAVE_SECONDS if is_orderly else END_SECONDS)
        failed = pod.first_failed
        pod.end(signal.SIGKILL)
        pod.wait(END_SECONDS)
        return failed.status or 0 if failed is not None and not is_orderly else 0

    def _log_event(self, event: str, **facts: Any) -> None:
        self._events.log(event, **facts)
        if event == "failed":
            host, times = facts["host"], self._policy.strikes
            self._strikes[host] += 1
            if self._strikes[host] >= times:
                self._events.log("struck out", epoch=facts["epoch"], host=host, times=times)

    def _record_pid(self, kind: str, host: int, pid: int) -> None:
        """Write the pid of a process to `run_dir`, for people and fault injection."""
        name = kind if kind == "service" else f"{kind}-{host}"
        record = {"kind": kind, "host": host, "pid": pid}
        (self._run_dir / "pids" / f"{name}.json").write_text(json.dumps(record))


def _start_failure(pod: Pod, controller: Controller) -> str:
    """Return how all workers of the first start ended if the command itself cannot run.

    They exited by themselves with the same status before any of them joined: a missing module.
    """
    if controller.first_generation != 1 or any(m.channel for m in controller.started.values()):
        return ""
    exited = [process for process in pod.processes if process.sent_signal is None]
    statuses = {process.status or 0 for process in exited}
    is_same = len(exited) > 1 == len(statuses)
    return _how_ended(exited[0]) if is_same and 0 < min(statuses) < 128 else ""


def _how_ended(process: ChildProcess) -> str:
    status = process.status or 0
    if status - 128 in {*signal.Signals}:
        return f"ended by {signal.Signals(status - 128).name}"
    return f"ended with status {status}"
