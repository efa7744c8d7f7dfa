"""The supervisor: runs a command as a pod, and goes on when hosts of it fail.

Within one start of the processes the steward decides, and survivors go on in place. Where they
cannot, what is left of them is ended and all are started anew, on the hosts that are good for it.
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

from ftmesh.elastic import sidecars
from ftmesh.elastic.child_process import Process
from ftmesh.elastic.controller import Steward
from ftmesh.elastic.events import Events, Recovery
from ftmesh.elastic.heartbeats import Deadlines
from ftmesh.elastic.local_pod import TIMED_OUT, OnOutput, Pod
from ftmesh.elastic.member import Member, Verdict
from ftmesh.elastic.pod_environment import Place
from ftmesh.elastic.rpc import Listener

TURN = 0.1  # seconds between two looks at everything
TO_END = 2.0  # for what is left of an epoch, before it is killed
TO_LEAVE = 60.0  # for processes that are done
MOST_BACKOFF = 60.0
GAVE_UP = 1

# Collectives of CPU devices wait for half an hour as XLA has it.
_FLAGS = (
    "--xla_cpu_collective_timeout_seconds={limit} "
    "--xla_cpu_collective_call_terminate_timeout_seconds={more}"
)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When to go on, and how. Times are in seconds."""

    failures: int = 10  # the most to go on after
    in_place: bool = True  # in the same processes, where that is possible
    limit: float = 30.0  # for a collective; a step that takes much longer has failed
    limits: Mapping[str, float] = field(default_factory=dict)  # of phases, see `watch`
    strikes: int = 3  # a host that fails so often stays out
    backoff: float = 1.0  # before a restart; twice as much after each that led to no step
    grow_back: float | None = None  # have hosts back after so long without them


class Supervisor:
    """Runs `command` in a process for each host until it is done. `run` gives its exit status."""

    def __init__(
        self,
        command: Sequence[str],
        place: Place,
        policy: Policy,
        events: Events,
        run_dir: Path,
        *,
        on_output: OnOutput | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._command, self._place, self._policy = list(command), place, policy
        self._events, self._run_dir = events, run_dir
        self._on_output: OnOutput = on_output or (lambda host, stream, piece: None)
        self._env = dict(env or {})
        self._secret = secrets.token_hex(32)
        self._own = {"FTMESH_SECRET": self._secret, "FTMESH_RUN_DIR": str(run_dir)}
        self._strikes: Counter[int] = Counter()
        self._pod: Pod | None = None
        self._received: list[signal.Signals] = []
        self._epoch, self._highest, self._masked = 1, 0, ""
        self._recovery = Recovery()
        self._nonstarter = ""  # how all processes of the first start ended before they joined
        self._until = float("inf")
        self._deadlines = Deadlines(policy.limit, policy.limits)
        (run_dir / "pids").mkdir(parents=True, exist_ok=True)

    def run(self, timeout: float | None = None) -> int:
        """Start, and start again, until all is done, nothing helps or time is up."""
        self._until = float("inf") if timeout is None else time.monotonic() + timeout
        everyone = range(len(self._place.blocks))
        fruitless = 0
        with closing(sidecars.KeeperProcesses(self._own, self._note_pid)) as keepers:
            while True:
                hosts = [host for host in everyone if not self._is_out(host)]
                before = self._highest
                keepers.have(hosts)
                steward, status = self._start(hosts, keepers)
                verdict = steward.verdict or Verdict("end", "")
                if self._received or (verdict.what == "end" and not verdict.why):
                    break
                status = status or GAVE_UP
                fruitless = 0 if self._highest > before else fruitless + 1
                why = self._why_not(verdict, everyone, fruitless)
                if why:
                    self._events.say("gives up", epoch=self._epoch, why=why)
                    break
                status = 0
                delay = min(self._policy.backoff * 2 ** max(fruitless - 1, 0), MOST_BACKOFF)
                self._events.say(
                    "restart",
                    epoch=self._epoch,
                    why=verdict.why,
                    seconds=delay,
                    hosts=[host for host in everyone if not self._is_out(host)],
                )
                self._wait(delay)
                if self._received:
                    break
        if self._received:
            status = 128 + self._received[0]
        elif time.monotonic() > self._until:
            status = TIMED_OUT
        self._events.done(status, self._highest)
        return status

    def _is_out(self, host: int) -> bool:
        return self._strikes[host] >= self._policy.strikes

    def _why_not(self, verdict: Verdict, everyone: Sequence[int], fruitless: int) -> str:
        """Why not to try again; empty where it is worth it."""
        if verdict.what == "end":
            return verdict.why
        if self._nonstarter:
            return f"before they joined each other, all processes {self._nonstarter}"
        if self._events.failures > self._policy.failures:
            return f"{self._events.failures} failures; the last: {verdict.why}"
        if fruitless > self._policy.failures:
            return f"{fruitless} starts led to no step; the last: {verdict.why}"
        if all(map(self._is_out, everyone)):
            return f"every host has failed {self._policy.strikes} times; the last: {verdict.why}"
        return ""

    def _wait(self, seconds: float) -> None:
        until = min(time.monotonic() + seconds, self._until)
        while time.monotonic() < until and not self._received:
            time.sleep(min(TURN, seconds))

    # One start of the processes ---------------------------------------------------------------

    def _start(
        self, hosts: Sequence[int], keepers: sidecars.KeeperProcesses
    ) -> tuple[Steward, int]:
        policy, blocks = self._policy, self._place.blocks
        steward = Steward(
            [Member(number, host, str(blocks[host])) for number, host in enumerate(hosts)],
            epoch=self._epoch,
            deadlines=self._deadlines,
            say=self._say,
            stop=lambda process: pod.processes[process].end(signal.SIGKILL),
            in_place=policy.in_place,
            masked=self._masked,
            highest=self._highest,
            recovery=self._recovery,
        )
        self._say("started", epoch=self._epoch, hosts=list(hosts))
        with (
            Listener(steward.serve, secret=self._secret) as listener,
            closing(sidecars.Service(len(hosts), self._own, self._note_pid)) as service,
        ):
            shared = {
                **self._env,
                **self._own,
                "FTMESH_COORDINATOR": service.address,
                "FTMESH_STEWARD": listener.address,
                "FTMESH_KEEPERS": keepers.addresses,
                "FTMESH_EPOCH": str(self._epoch),
                "FTMESH_MESH": self._place.mesh,
                "FTMESH_BLOCKS": ";".join(str(blocks[host]) for host in hosts),
            }
            pod = Pod(
                self._command,
                hosts=len(hosts),
                devices_per_host=len(blocks[0].coords()),
                env=[{**shared, "FTMESH_HOST": str(host)} for host in hosts],
                flags=_FLAGS.format(limit=round(policy.limit), more=round(2 * policy.limit + 30)),
                on_output=lambda number, *rest: self._on_output(hosts[number], *rest),
            )
            with pod:
                self._pod = pod
                if self._received:  # before there was a pod to tell
                    pod.end(self._received[-1])
                for process in pod.processes:
                    self._note_pid("worker", hosts[process.number], process.pid)
                self._watch(pod, steward, service)
                status = self._end(pod, steward)
                self._nonstarter = _nonstarter(pod, steward)
                self._pod = None
        self._epoch = steward.epoch + 1
        self._highest, self._masked = steward.highest, steward.masked
        failed_at = steward.recovery.failed_at or time.monotonic()
        self._recovery = Recovery(failed_at, steward.recovery.last_commit)
        return steward, status

    def _watch(self, pod: Pod, steward: Steward, service: sidecars.Service) -> None:
        """Until there is a verdict."""
        while steward.verdict is None and not self._received:
            ended = pod.poll(TURN)
            if service.has_ended:
                steward.service_ended("has ended")
            for process in ended if not self._received else ():
                steward.ended(process.number, _how(process), process.status or 0)
            steward.tick()
            if self._events.failures > self._policy.failures:
                steward.give_up(f"{self._events.failures} failures are more than it may have")
            if time.monotonic() > self._until:
                steward.give_up("time is up")
            if self._may_grow(steward):
                steward.pause("hosts that were missing come back")

    def _may_grow(self, steward: Steward) -> bool:
        """Whether a host is missing that is good."""
        wait = self._policy.grow_back
        if wait is None or time.monotonic() - steward.epoch_began < wait:
            return False
        here = {member.host for member in steward.members.values()}
        everyone = range(len(self._place.blocks))
        return any(host not in here and not self._is_out(host) for host in everyone)

    def _end(self, pod: Pod, steward: Steward) -> int:
        """See the processes out, or end what is left of them; the status of one that failed."""
        is_well = self._received or (steward.verdict is not None and steward.verdict.is_well)
        pod.wait(TO_LEAVE if is_well else TO_END)
        failed = pod.first_failed
        pod.kill()
        pod.wait(TO_END)
        return failed.status or 0 if failed is not None and not is_well else 0

    def _say(self, event: str, **facts: Any) -> None:
        self._events.say(event, **facts)
        if event == "failed":
            host = facts["host"]
            self._strikes[host] += 1
            if self._is_out(host):
                times = self._policy.strikes
                self._events.say("struck out", epoch=facts["epoch"], host=host, times=times)

    def _note_pid(self, kind: str, host: int, pid: int) -> None:
        """Leave a note of a process, for people and for tests."""
        name = kind if kind == "service" else f"{kind}-{host}"
        note = {"kind": kind, "host": host, "pid": pid}
        (self._run_dir / "pids" / f"{name}.json").write_text(json.dumps(note))

    # Signals ----------------------------------------------------------------------------------

    def end(self, signum: signal.Signals) -> None:
        """End all."""
        self._received.append(signum)
        if self._pod is not None:
            self._pod.end(signum)

    def enforce(self) -> None:
        """As `Pod.enforce`, for an `on_output` that has to wait."""
        if self._pod is not None:
            self._pod.enforce()


def _nonstarter(pod: Pod, steward: Steward) -> str:
    """How all processes of the first start ended where the command itself cannot run, or empty.

    They ended alike, by themselves, by no signal, and none had come as far as to join: a module
    that is not there, or a mistake in the program. To try again would not help.
    """
    if steward.start != 1 or any(member.channel for member in steward.everyone.values()):
        return ""
    ended = [process for process in pod.processes if process.told is None]
    alike = {process.status or 0 for process in ended}
    return _how(ended[0]) if len(ended) > 1 == len(alike) and 0 < min(alike) < 128 else ""


def _how(process: Process) -> str:
    status = process.status or 0
    if status - 128 in {*signal.Signals}:
        return f"ended by {signal.Signals(status - 128).name}"
    return f"ended with status {status}"
