"""Supervisor: runs workers through the agents of all hosts, and restarts them when hosts fail.

Between restarts the controller decides, and survivors continue in place. If they cannot, the
supervisor ends the remaining workers and starts all again on the hosts that are not excluded. It
sends its own state to all agents, so that one of them can take over.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftmesh.elastic.agent_pool import AgentPool, RemotePod
from ftmesh.elastic.child_process import CoordinationService, HostLayout, record_pid
from ftmesh.elastic.controller import Controller
from ftmesh.elastic.heartbeats import Member, ProgressMonitor, Verdict
from ftmesh.elastic.local_pod import TIMED_OUT
from ftmesh.elastic.rpc import Listener
from ftmesh.elastic.run_log import EventLog, Recovery
from ftmesh.errors import OUT_OF_HOSTS, RESTART

POLL_SECONDS = 0.1
END_SECONDS = 2.0  # for workers to exit before they are killed
MAX_BACKOFF = 60.0
GAVE_UP = 1  # exit status
QUORUM_SECONDS = 15.0  # for hosts to find a controller that has taken over
SETTLE_SECONDS = 2.0  # for the last of them
REJOIN_SECONDS = 30.0  # for hosts of an earlier run


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
        min_hosts: Fewest hosts to run with; None for all at the first start and any number later.
        join_timeout: For all hosts to join at the start.
    """

    failures: int = 10
    in_place: bool = True
    collective_timeout: float = 30.0
    phase_timeouts: Mapping[str, float] = field(default_factory=dict)
    strikes: int = 3
    backoff: float = 1.0
    grow_back: float | None = None
    min_hosts: int | None = None
    join_timeout: float = 300.0

    @property
    def xla_flags(self) -> str:
        """Flags for CPU devices, whose collectives have a timeout of half an hour by default."""
        seconds = round(self.collective_timeout)
        return (
            f"--xla_cpu_collective_timeout_seconds={seconds} "
            f"--xla_cpu_collective_call_terminate_timeout_seconds={2 * seconds + 30}"
        )


class Supervisor:
    """Runs workers, one on each host, until they are done.

    Args:
        pool: The agents that run them.
        layout: The mesh and the block of each host; None if devices know their coordinates.
        run_dir: Folder for stacks and process ids.
        env: Variables to add to the environment of the workers.
        record: The state of a lost supervisor, whose run this one continues.
        has_successors: Agents take over if this supervisor is lost. It then needs at least half of
            the hosts, since the others may have taken over.
    """

    def __init__(
        self,
        pool: AgentPool,
        layout: HostLayout | None,
        policy: Policy,
        events: EventLog,
        run_dir: Path,
        *,
        env: Mapping[str, str] | None = None,
        record: Mapping[str, Any] | None = None,
        has_successors: bool = False,
    ) -> None:
        self._pool, self._layout, self._policy = pool, layout, policy
        self._events, self._run_dir = events, run_dir
        self._env, self._has_successors = dict(env or {}), has_successors
        self._pod: RemotePod | None = None
        self._signals: list[signal.Signals] = []
        self._roster: list[int] = []  # hosts of the last start or generation
        self._start_failure = ""  # how all workers of the first start ended before they joined
        self._deadline = float("inf")
        self._monitor = ProgressMonitor(policy.collective_timeout, policy.phase_timeouts)
        self._recovery = Recovery()
        self._generation, self._highest_step, self._quarantined = 1, 0, ""
        self._strikes: Counter[int] = Counter()
        self._takes_over = bool(record)
        self.hands_over = False  # its host is shut down, and another one continues
        if record:
            self._continue_from(record)
        (run_dir / "pids").mkdir(parents=True, exist_ok=True)

    def _continue_from(self, record: Mapping[str, Any]) -> None:
        self._generation = int(record["generation"]) + 1
        self._highest_step = int(record["highest_step"])
        self._quarantined = str(record["quarantined"])
        self._strikes.update({int(host): n for host, n in record["strikes"].items()})
        self._roster = [int(host) for host in record["roster"]]
        self._events.failures = int(record["failures"])
        self._recovery = Recovery(time.monotonic())

    def run(self, timeout: float | None = None) -> int:
        """Run until the command is done, a restart cannot help, or `timeout` seconds are over.

        Returns:
            The exit status: 0, that of a worker, 128 + n after signal n, 124 after the timeout, 75
            without a majority of the hosts, 77 with fewer than `Policy.min_hosts`.
        """
        self._deadline = float("inf") if timeout is None else time.monotonic() + timeout
        status = self._gather()
        if not status and not self._signals:
            status = self._run_starts()
        if self._signals:
            status = 128 + self._signals[0]
        elif status and time.monotonic() > self._deadline:
            status = TIMED_OUT
        if not self.hands_over:
            self._events.done(status, self._highest_step)
        return status

    def end(self, signum: signal.Signals) -> None:
        """End the run as by a signal."""
        self._signals.append(signum)
        if self._pod is not None:
            self._pod.end(signum)

    def _gather(self) -> int:
        """Wait for the hosts; return the exit status if too few come."""
        pool, begin = self._pool, time.monotonic()
        if self._takes_over:
            while not self._has_majority(takes_over=True):
                if time.monotonic() - begin > QUORUM_SECONDS or self._signals:
                    self.hands_over = True  # agents may find another controller
                    return self._give_up("cut off from most hosts", RESTART)
                time.sleep(POLL_SECONDS)
            until = time.monotonic() + SETTLE_SECONDS
            while time.monotonic() < until and not set(pool.present) >= set(self._roster):
                time.sleep(POLL_SECONDS)
            self._events.log("takes over", epoch=self._generation, hosts=pool.present)
            for process, host in enumerate(self._roster):
                if host not in pool.present:
                    who = {"host": host, "process": process, "chips": self._chips(host)}
                    what = {"how": "was lost with the controller", "step": 0, "phase": ""}
                    self._log_event("failed", epoch=self._generation - 1, **who, **what)
            return 0
        # If an earlier run with this folder had all hosts, those that are missing have failed.
        is_first = pool.known_nodes < pool.num_hosts
        wait = min(self._policy.join_timeout, float("inf") if is_first else REJOIN_SECONDS)
        while len(present := pool.present) < pool.num_hosts and not self._signals:
            missing = [str(h) for h in range(pool.num_hosts) if h not in present]
            hosts = f"host{'s' * (len(missing) > 1)} {', '.join(missing)}"
            if time.monotonic() > self._deadline:
                return self._give_up(f"--timeout reached: {hosts} did not join", TIMED_OUT)
            if time.monotonic() > begin + wait:
                # Fewer than half might train twice: another host may have taken over the run.
                default = pool.num_hosts if is_first else pool.num_hosts // 2 + 1
                if len(pool.present) >= (self._policy.min_hosts or default):
                    break
                return self._give_up(f"{hosts} did not join within {wait:g} s", OUT_OF_HOSTS)
            self._end_if_all_leave()
            time.sleep(POLL_SECONDS)
        if pool.newest_record:  # agents outlived their controller, and none has taken over
            self._continue_from(pool.newest_record)
        return 0

    def _end_if_all_leave(self) -> bool:
        """End the run if all hosts have received a signal: the engine ends it."""
        signum = self._pool.ended_by
        if signum is not None:
            self.end(signum)
        return signum is not None

    def _give_up(self, reason: str, status: int) -> int:
        self._events.log("gives up", epoch=self._generation, why=reason)
        return status

    def _run_starts(self) -> int:
        """Start the workers, again after failures; return the exit status."""
        fruitless = 0  # starts in a row that led to no step
        while True:
            hosts = self._good_hosts()
            if len(hosts) < (least := self._policy.min_hosts or 1):
                return self._give_up(f"hosts left: {len(hosts)}, needed: {least}", OUT_OF_HOSTS)
            before = self._highest_step
            controller, status = self._start(hosts)
            verdict = controller.verdict or Verdict("end", "")
            if self._signals or (verdict.action == "end" and not verdict.reason):
                return status
            if not self._has_majority():
                return self._give_up(verdict.reason, RESTART)
            if self._dismiss_leaving():
                return RESTART
            fruitless = 0 if self._highest_step > before else fruitless + 1
            reason = self._reason_to_give_up(verdict, fruitless)
            if reason:
                return self._give_up(reason, status or GAVE_UP)
            delay = min(self._policy.backoff * 2 ** max(fruitless - 1, 0), MAX_BACKOFF)
            facts = {"seconds": delay, "hosts": self._good_hosts()}
            self._events.log("restart", epoch=self._generation, why=verdict.reason, **facts)
            self._sleep(delay)
            if self._signals:
                return 0

    def _dismiss_leaving(self) -> bool:
        """Release hosts that are being shut down; return True if this one is among them."""
        leaving = self._pool.leaving
        for host in leaving:
            self.hands_over |= self._pool.agent(host).address == self._pool.host
            self._pool.send(host, {"over": 128 + signal.SIGTERM})
        return self.hands_over

    def _has_majority(self, *, takes_over: bool = False) -> bool:
        """True if no other supervisor can have the hosts of the last roster."""
        if not self._has_successors or not self._roster:
            return True
        here = 2 * len(set(self._roster) & {*self._pool.present, *self._pool.leaving})
        return here > len(self._roster) if takes_over else here >= len(self._roster)

    def _announce(self, roster: Sequence[int], generation: int) -> None:
        """Send agents the state that another supervisor would need."""
        self._roster = list(roster)
        self._pool.announce(
            {
                "generation": generation,
                "roster": self._roster,
                "highest_step": self._highest_step,
                "quarantined": self._quarantined,
                "strikes": self._strikes,
                "failures": self._events.failures,
            }
        )

    def _good_hosts(self) -> list[int]:
        present = self._pool.present
        return [host for host in present if self._strikes[host] < self._policy.strikes]

    def _reason_to_give_up(self, verdict: Verdict, fruitless: int) -> str:
        """Return why another start would not help; empty if it may."""
        if verdict.action == "end":
            return verdict.reason
        if self._start_failure:
            return f"all processes {self._start_failure} before they joined"
        if self._events.failures > self._policy.failures:
            return f"{self._events.failures} failures; the last: {verdict.reason}"
        if fruitless > self._policy.failures:
            return f"{fruitless} starts led to no step; the last: {verdict.reason}"
        if not self._good_hosts() and self._pool.present:
            return f"every host has failed {self._policy.strikes} times; the last: {verdict.reason}"
        return ""

    def _sleep(self, seconds: float) -> None:
        until = min(time.monotonic() + seconds, self._deadline)
        while time.monotonic() < until and not self._signals:
            time.sleep(min(POLL_SECONDS, seconds))

    # One start of the workers -----------------------------------------------------------------

    def _start(self, hosts: Sequence[int]) -> tuple[Controller, int]:
        """Run the workers until there is a verdict; return the status of one that failed."""
        pod = RemotePod(self._pool, self._generation, hosts)
        controller = Controller(
            [Member(process, host, self._chips(host)) for process, host in enumerate(hosts)],
            generation=self._generation,
            monitor=self._monitor,
            log_event=self._log_event,
            kill=lambda process: pod.processes[process].end(signal.SIGKILL),
            write_stacks=lambda process, pid: pod.processes[process].write_stacks(pid),
            in_place=self._policy.in_place,
            quarantined=self._quarantined,
            highest_step=self._highest_step,
            recovery=self._recovery,
        )
        self._log_event("started", epoch=self._generation, hosts=list(hosts))
        self._announce(hosts, self._generation)
        run_env = {"FTMESH_RUN_DIR": str(self._run_dir)}
        with (
            Listener(controller.serve, secret=self._pool.secret, host=self._pool.host) as listener,
            closing(CoordinationService(len(hosts), run_env, self._pool.host)) as service,
        ):
            record_pid(self._run_dir, "service", 0, service.pid)
            self._pod = pod
            pod.release(self._environments(hosts, listener.address, service.address))
            if self._signals:  # received before there was a pod
                pod.end(self._signals[-1])
            self._watch(pod, controller, service)
            status = self._end_workers(pod, controller)
            has_joined = any(member.channel for member in controller.started.values())
            is_first = controller.first_generation == 1 and not has_joined
            self._start_failure = pod.how_all_failed if is_first else ""
            self._pod = None
        self._generation = controller.generation + 1
        self._highest_step = controller.highest_step
        self._quarantined = controller.quarantined
        failed_at = controller.recovery.failed_at or time.monotonic()
        self._recovery = Recovery(failed_at, controller.recovery.last_commit)
        return controller, status

    def _chips(self, host: int) -> str:
        return str(self._layout.blocks[host]) if self._layout is not None else ""

    def _environments(
        self, hosts: Sequence[int], controller: str, coordinator: str
    ) -> list[dict[str, str]]:
        """Return the variables of each worker."""
        stores = [f"{host}={self._pool.agent(host).store}" for host in self._pool.present]
        shared = {
            **self._env,
            "FTMESH_COORDINATOR": coordinator,
            "FTMESH_NUM_PROCESSES": str(len(hosts)),
            "FTMESH_STEWARD": controller,
            "FTMESH_KEEPERS": ",".join(stores),
            "FTMESH_EPOCH": str(self._generation),
        }
        if self._layout is not None:
            shared["FTMESH_MESH"] = self._layout.mesh
            shared["FTMESH_BLOCKS"] = ";".join(str(self._layout.blocks[host]) for host in hosts)
        return [
            {
                **shared,
                "FTMESH_HOST": str(host),
                "FTMESH_PROCESS_ID": str(process),
                "FTMESH_ADDRESS": self._pool.agent(host).address,
            }
            for process, host in enumerate(hosts)
        ]

    def _watch(self, pod: RemotePod, controller: Controller, service: CoordinationService) -> None:
        while controller.verdict is None and not self._signals:
            ended = pod.poll(POLL_SECONDS)
            if not self._has_majority():
                controller.decide("end", "cut off from most hosts, which may continue without this")
            if service.has_exited:
                controller.decide("restart", "JAX's coordination service has ended")
            for worker in ended if not self._signals else ():
                controller.process_ended(worker.number, worker.how, worker.status or 0)
            controller.poll()
            failures, allowed = self._events.failures, self._policy.failures
            if failures > allowed:
                controller.decide("end", f"{failures} failures, and {allowed} are allowed")
            if time.monotonic() > self._deadline:
                controller.decide("end", "--timeout reached")
            leaving = self._pool.leaving
            if leaving and not self._end_if_all_leave():
                controller.pause(f"host {leaving[0]} is being shut down")
            elif self._can_grow_back(controller):
                controller.pause("lost hosts come back")
            if controller.generation != self._generation and controller.verdict is None:
                self._generation = controller.generation
                self._announce([m.host for m in controller.members.values()], self._generation)

    def _can_grow_back(self, controller: Controller) -> bool:
        wait = self._policy.grow_back
        if wait is None or time.monotonic() - controller.generation_began < wait:
            return False
        present = {member.host for member in controller.members.values()}
        return not present.issuperset(self._good_hosts())

    def _end_workers(self, pod: RemotePod, controller: Controller) -> int:
        """Wait for the workers to exit, or kill them; return the status of one that failed."""
        verdict = controller.verdict
        is_orderly = self._signals or (verdict is not None and verdict.is_orderly)
        pod.wait(self._monitor.timeout("leave") if is_orderly else END_SECONDS)
        failed = pod.first_failed
        pod.end(signal.SIGKILL)
        pod.wait(END_SECONDS)
        if not is_orderly:
            return failed.status or 0 if failed is not None else 0
        done = (w for w in pod.processes if controller.started[w.number].has_left)
        return next(filter(None, (worker.error_status for worker in done)), 0)

    def _log_event(self, event: str, **facts: Any) -> None:
        self._events.log(event, **facts)
        if event == "failed":
            host, times = facts["host"], self._policy.strikes
            self._strikes[host] += 1
            if self._strikes[host] >= times:
                self._events.log("struck out", epoch=facts["epoch"], host=host, times=times)
