"""Controller: decides who takes part, commits steps, and notices lost and stuck workers.

Every worker has a connection to it and reports what it does. A step is committed once all members
have its results. When a worker is lost a new generation begins: the others receive the members and
the last committed step, and continue from it in place; if they cannot, all are restarted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from ftmesh.distributed.kv_store import KvStore
from ftmesh.elastic.controller_client import Membership
from ftmesh.elastic.heartbeats import WAITING_PHASES, Member, ProgressMonitor, Verdict
from ftmesh.elastic.rpc import Channel, ChannelClosed
from ftmesh.elastic.run_log import Recovery
from ftmesh.errors import NOT_FOUND, UNAVAILABLE, USAGE, VERIFICATION_FAILED

CLOSED_SECONDS = 0.5  # from a closed connection to a lost worker; also to write stacks
_LEARNED_PHASES = ("start", "plan", "compile", "restore", "save", "evaluate", "examine")
_PERMANENT = {USAGE, UNAVAILABLE, VERIFICATION_FAILED, NOT_FOUND}  # a retry cannot cure these


class Controller:
    """The controller of one start of the workers, which begins `generation`.

    `log_event` is called with an event's name and facts, `kill` with the index of a process,
    `write_stacks` with that and the pid of a process that should write its stack traces. With
    `in_place`, survivors continue in their processes once all have joined. `quarantined` are
    unhealthy chips, as blocks.
    """

    def __init__(
        self,
        members: Iterable[Member],
        *,
        generation: int,
        monitor: ProgressMonitor,
        log_event: Callable[..., None],
        kill: Callable[[int], None],
        write_stacks: Callable[[int, int], None] = lambda process, pid: None,
        in_place: bool = True,
        quarantined: str = "",
        highest_step: int = 0,
        recovery: Recovery | None = None,
    ) -> None:
        self.members = {member.process: member for member in members}
        self.started = dict(self.members)  # the lost ones too
        self.first_generation = self.generation = generation
        self.in_place = in_place
        self.committed, self.highest_step = 0, highest_step
        self.verdict: Verdict | None = None
        self.quarantined = quarantined
        self.generation_began = time.monotonic()
        self.recovery = recovery or Recovery()
        self._log_event, self._kill, self._monitor = log_event, kill, monitor
        self._write_stacks = write_stacks
        self._lock = threading.RLock()
        self._kv = KvStore()
        self._ready: dict[int, set[int]] = {}  # step -> processes that have its results
        self._joined: set[int] = set()
        self._last_join: tuple[int, dict[str, Any]] = 0, {}
        self._all_joined = False  # at least once since this start
        self._pause_reason: str | None = None
        self._told_to_leave = False

    # Messages ---------------------------------------------------------------------------------

    def serve(self, channel: Channel) -> None:
        """Handle the connection of one worker, in a thread of its own."""
        member = None
        try:
            while frame := channel.receive():
                with self._lock:
                    if member is None:
                        member = self._greet(channel, frame[0])
                    elif member.process in self.members or member.has_left:
                        self._handle(member, *frame)
        except (ChannelClosed, AttributeError, KeyError, OverflowError, TypeError, ValueError):
            pass  # the worker is gone, or sends nonsense
        finally:
            channel.close()
            if member is not None:
                with self._lock:
                    member.closed_at = time.monotonic()

    def _greet(self, channel: Channel, message: dict[str, Any]) -> Member:
        member = self.started[int(message["hello"])]
        if member.channel is not None or message["start"] != self.first_generation:
            raise ValueError("a second connection, or a worker of an earlier start")
        member.channel, member.pid = channel, int(message["pid"])
        self._enter(member, "agree", 0)  # from here on it waits for the others
        channel.send({"welcome": self.generation, "quarantined": self.quarantined})
        return member

    def _handle(self, member: Member, message: dict[str, Any], data: bytes) -> None:
        member.last_heard = time.monotonic()
        if "exiting" in message:
            member.error = str(message["exiting"])
        elif "leave" in message:
            self._leave(member)
        elif int(message.get("generation", self.generation)) != self.generation:
            pass  # sent before it learned of this one
        elif "call" in message:
            for process, reply, value in self._kv.handle(member.process, message, data):
                self.started[process].send(reply, value)
        elif "phase" in message:
            phase, step = str(message["phase"]), int(message["step"])
            if (phase, step) != (member.phase, member.step):
                self._enter(member, phase, step, ago=float(message.get("for", 0)))
        elif "ready" in message:
            step = int(message["ready"])
            self._enter(member, "commit", step)
            self._ready.setdefault(step, set()).add(member.process)
            self._commit_if_all(step)
        elif "joined" in message:
            step = int(message["joined"])
            self._joined.add(member.process)
            self.recovery.record(message.get("parts", {}))
            self._enter(member, "read", step)
            self._last_join = step, message
            self._begin_if_all()
        elif "failed" in message:
            member.error = str(message["failed"])
            self._enter(member, "failed", member.step)
        elif "quarantine" in message:
            self._quarantine(member, str(message["quarantine"]), str(message["reason"]))
        elif "end" in message:
            self.decide("end", f"{member}: {message['end']}")
        elif "restart" in message:
            self.decide("restart", f"{member}: {message['restart']}")
        elif "idle" in message:
            member.is_idle = True
            self._enter(member, "commit", 0)
            self._begin_if_all()  # the others may be ready already
            for step in sorted(self._ready):
                self._commit_if_all(step)

    def _enter(self, member: Member, phase: str, step: int, ago: float = 0.0) -> None:
        other_phases = [other.phase for other in self.members.values() if other is not member]
        for last, part in (("over", "noticed"), ("start", "started")):
            if member.phase == last != phase and last not in other_phases:
                self.recovery.reach(part)
        began = time.monotonic() - ago
        if member.phase in _LEARNED_PHASES and phase not in ("over", "failed"):
            self._monitor.record(member.phase, began - member.since)
        member.phase, member.step, member.since = phase, step, began
        member.stacks_at = None

    # Steps ------------------------------------------------------------------------------------

    @property
    def _training(self) -> set[int]:
        """Members that have chips in the program."""
        return {process for process, member in self.members.items() if not member.is_idle}

    def _commit_if_all(self, step: int) -> None:
        if not self._ready.get(step, set()) >= self._training:
            return
        now = time.monotonic()
        self._ready.clear()
        self.committed = step
        self.highest_step = max(self.highest_step, step)
        self._told_to_leave = self._pause_reason is not None
        for member in self.members.values():
            member.send({"commit": step, "then": "leave" if self._told_to_leave else "go on"})
            if member.phase == "commit" and not member.is_idle:
                self._enter(member, "read", step + 1)
        recovery = self.recovery
        if recovery.failed_at is not None:
            facts = recovery.end(now, self._monitor.typical_step)
            self._log_event("goes on", epoch=self.generation, step=step, **facts)
        elif recovery.last_commit is not None:
            self._monitor.record("step", now - recovery.last_commit)
        recovery.last_commit = now

    def _begin_if_all(self) -> None:
        if self._joined and self._joined >= self._training:
            step, facts = self._last_join
            self.recovery.repeated_steps = max(self.highest_step - step, 0)
            self.committed, self._all_joined = step, True
            self._log_event(
                "epoch",
                epoch=self.generation,
                in_place=self.generation != self.first_generation,
                hosts=sorted(member.host for member in self.members.values()),
                failed=facts.get("failed_chips", ""),
                live=facts.get("live", 0),
                from_step=step,
                repeated=self.recovery.repeated_steps,
                source=facts.get("source", "start"),
                parts=self.recovery.parts,
            )

    # Lost and stuck workers -------------------------------------------------------------------

    def process_ended(self, process: int, how: str, status: int) -> None:
        """Handle the end of a process; `how` is "ended by SIGKILL" or the like."""
        with self._lock:
            member = self.started[process]
            if member.has_left or process not in self.members:
                return
            if status == 0 and member.channel is None:
                self._leave(member)  # it may be a program that knows of no controller
                return
            if status == 0:  # as of `python train.py | tee log`, whatever python's is
                how = f"{how} before the end of the run"
            if member.error:
                how = f"{how}: {member.error}"
            if status in _PERMANENT and self.committed == 0 and self.first_generation == 1:
                self.decide("end", f"{member} {how}")
            self._lose({process: how})

    def poll(self) -> None:
        """Look for lost and stuck workers. Call it a few times a second."""
        with self._lock:
            if self.verdict is not None:
                return
            now = time.monotonic()
            active = {p: member for p, member in self.members.items() if not member.has_left}
            closed = {
                process: "has closed its connection"
                for process, member in active.items()
                if member.closed_at is not None and now - member.closed_at > CLOSED_SECONDS
            }
            if closed:
                self._lose(closed)
                return
            for member in self.started.values():
                seconds = member.activity(now).seconds
                if member.has_left and seconds > self._monitor.timeout("leave"):
                    self._kill(member.process)  # it is done, and hangs in its exit
            stuck = self._monitor.find_stuck({p: m.activity(now) for p, m in active.items()})
            stuck |= {process for process, member in active.items() if self._is_silent(member, now)}
            self._handle_stuck(stuck, now)
            failed = [member for member in active.values() if member.phase == "failed"]
            all_wait = all(member.phase in WAITING_PHASES for member in active.values())
            longest = max((member.activity(now).seconds for member in failed), default=0.0)
            if longest > CLOSED_SECONDS and all_wait and not stuck:
                reason = f"a collective failed, but no worker is lost: {failed[0].error}"
                self.decide("restart", reason)

    def _handle_stuck(self, stuck: set[int], now: float) -> None:
        """Make stuck workers write their stack traces; shortly after, they count as lost."""
        for process, member in self.members.items():
            if process not in stuck:
                member.stacks_at = None
            elif member.stacks_at is None:
                member.stacks_at = now
                if member.pid is not None:
                    self._write_stacks(process, member.pid)
        due = {}
        for process in stuck:
            member = self.members[process]
            if now - (member.stacks_at or now) > CLOSED_SECONDS:
                silent = ", without a heartbeat" * self._is_silent(member, now)
                seconds = member.activity(now).seconds
                due[process] = (
                    f"is stuck: alive, and {seconds:.0f} s in phase {member.phase!r} of step "
                    f"{member.step}{silent}"
                )
        if len(stuck) > 1 and stuck >= self._training:
            if due.keys() >= stuck:  # the last of them is due, too
                self.decide("restart", "all workers are stuck; cannot tell which one stalled first")
        elif due:
            self._lose(due)

    def _is_silent(self, member: Member, now: float) -> bool:
        """True if not even heartbeats arrive."""
        silence = now - member.last_heard
        return member.channel is not None and silence > self._monitor.silence_timeout

    def _lose(self, lost: dict[int, str]) -> None:
        """Begin a generation without the lost workers, in place or by a restart."""
        if self.verdict is not None:
            return
        some_left = any(member.has_left and member.channel for member in self.members.values())
        if some_left and not self._told_to_leave:
            for process in lost:  # the run is done; nothing depends on it
                self._kill(process)
                self._leave(self.members[process])
            return
        now = time.monotonic()
        last_signs = min(self.members[process].since for process in lost)
        hosts = [self.members[process].host for process in lost]
        for process, how in lost.items():
            member = self.members.pop(process)
            who = {"host": member.host, "process": process, "chips": member.chips}
            what = {"how": how, "step": member.step, "phase": member.phase}
            self._log_event("failed", epoch=self.generation, **who, **what)
            self._kill(process)
            if member.channel is not None:
                member.channel.close()  # it exits, even if its agent does not end it
        if not self.members:
            self.decide("restart", "no worker is left")
        elif some_left or not (self.in_place and self._all_joined):
            restarts = "" if self.in_place else ", and workers do not continue in place"
            self.decide("restart", f"host {hosts[0]} is lost{restarts}")
        else:
            reason = "; ".join(f"process {p} {how}" for p, how in lost.items())
            stuck = any(how.startswith("is stuck") for how in lost.values())
            self._begin_generation(reason, noticed_after=now - last_signs if stuck else 0.0)

    def _quarantine(self, member: Member, chips: str, reason: str) -> None:
        """Begin a generation with the same workers, without unhealthy chips."""
        known = list(filter(None, self.quarantined.split(";")))
        new = [block for block in chips.split(";") if block not in known]
        if not new:
            return
        self.quarantined = ";".join([*known, *new])
        self._log_event(
            "masked", epoch=self.generation, chips=chips, why=reason, process=member.process
        )
        if self.in_place and self._all_joined:
            self._begin_generation(f"chips {chips} are unhealthy: {reason}", noticed_after=0.0)
        else:
            self.decide("restart", f"chips {chips} are unhealthy: {reason}")

    def _begin_generation(self, reason: str, *, noticed_after: float) -> None:
        self.generation_began = time.monotonic()
        self.generation += 1
        self._ready.clear()
        self._joined.clear()
        self._kv = KvStore()
        self.recovery.begin(noticed_after)
        members = tuple(sorted(self.members))
        generation = Membership(self.generation, members, self.quarantined, self.committed, reason)
        for member in self.members.values():
            member.error, member.is_idle = "", False
            if member.phase in (*WAITING_PHASES, "read", "step"):
                self._enter(member, "over", member.step)
            member.send(asdict(generation))

    # The end ----------------------------------------------------------------------------------

    def decide(self, action: str, reason: str) -> None:
        """Restart or end all workers."""
        with self._lock:
            if self.verdict is None:
                self.verdict = Verdict(action, reason)
                for member in self.members.values():
                    member.send({"over": action, "reason": reason})

    def pause(self, reason: str) -> None:
        """Make all workers save their state and exit at the next commit, to be restarted."""
        with self._lock:
            self._pause_reason = reason

    def _leave(self, member: Member) -> None:
        member.has_left = True
        self._enter(member, "leave", member.step)
        if all(self.members[process].has_left for process in self._training):
            if self.verdict is None and self._told_to_leave:
                self.verdict = Verdict("restart", self._pause_reason or "", is_orderly=True)
            elif self.verdict is None:
                self.verdict = Verdict("end", "", is_orderly=True)
            for other in self.members.values():
                other.send({"left": True})
