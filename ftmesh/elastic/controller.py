"""The steward: decides who takes part, commits steps, and notices who is gone or stuck.

Every process has a line to it, on which it says what it is doing. A step is committed when all who
take part have its results; then all are told. When one of them is lost there is a new epoch: the
others are told who is left and which step was the last to be committed, and go on from there in
place; where they cannot, the verdict is a restart. One decides for all, so that no two processes
ever believe different things. It is a place for notes, too, by which processes agree.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from ftmesh.elastic.events import Recovery
from ftmesh.elastic.heartbeats import WAITING, Deadlines
from ftmesh.elastic.kv_store import Notes
from ftmesh.elastic.member import Member, Verdict
from ftmesh.elastic.rpc import Channel, ChannelClosed
from ftmesh.errors import NOT_FOUND, PROVED_WRONG, REFUSED, USAGE

CLOSED = 0.5  # seconds between the end of a line and being taken for lost, unless it is seen to end
_LEARNED = ("start", "plan", "compile", "restore", "save", "evaluate", "examine")

# Statuses of a process that was told nonsense: to try again would not help.
REFUSALS = {USAGE, REFUSED, PROVED_WRONG, NOT_FOUND}

Say = Callable[..., None]


class Steward:
    """Of the processes of one start. `say` is given events; `stop` kills a process.

    With `in_place` survivors go on as they are, once all processes have joined each other.
    """

    def __init__(
        self,
        members: Iterable[Member],
        *,
        epoch: int,
        deadlines: Deadlines,
        say: Say,
        stop: Callable[[int], None],
        in_place: bool = True,
        masked: str = "",
        highest: int = 0,
        recovery: Recovery | None = None,
    ) -> None:
        self.members = {member.process: member for member in members}
        self.everyone = dict(self.members)
        self.start = self.epoch = epoch  # processes of this start have its number
        self.in_place = in_place
        self.committed, self.highest = 0, highest
        self.verdict: Verdict | None = None
        self.masked = masked  # chips that were found to be sick, as blocks
        self.epoch_began = time.monotonic()
        self._say, self._stop = say, stop
        self._deadlines = deadlines
        self._lock = threading.RLock()
        self._notes = Notes()
        self._ready: dict[int, set[int]] = {}
        self._joined: set[int] = set()
        self._told: tuple[int, dict[str, Any]] = 0, {}  # by the last who joined
        self._is_joined = False  # all of this start have been together
        self._pausing, self._why_paused = False, ""
        self._told_to_leave = False
        self.recovery = recovery or Recovery()

    # Lines ------------------------------------------------------------------------------------

    def serve(self, channel: Channel) -> None:
        """Hear one process out, in a thread of its own."""
        member = None
        try:
            while True:
                found = channel.receive()
                if found is None:
                    continue
                message, data = found
                with self._lock:
                    if member is None:
                        member = self._greet(channel, message)
                    elif member.process in self.members or member.has_left:
                        self._hear(member, message, data)
        except (ChannelClosed, AttributeError, KeyError, OverflowError, TypeError, ValueError):
            pass  # gone, or what it says makes no sense
        finally:
            channel.close()
            if member is not None:
                with self._lock:
                    member.closed_at = time.monotonic()

    def _greet(self, channel: Channel, message: dict[str, Any]) -> Member:
        member = self.everyone[int(message["hello"])]
        if member.channel is not None or message["start"] != self.start:
            raise ValueError("one more, or one of an earlier start")
        member.channel, member.pid = channel, int(message["pid"])
        self._enter(member, "agree", 0)  # from here on it waits for those who have not come
        channel.send({"welcome": self.epoch, "masked": self.masked})
        return member

    def _hear(self, member: Member, message: dict[str, Any], data: bytes) -> None:
        member.heard = time.monotonic()
        if "failing" in message:
            member.error = str(message["failing"])
        elif "leave" in message:
            self._leave(member)
        elif int(message.get("epoch", self.epoch)) != self.epoch:
            pass  # it has not heard of this one yet
        elif "call" in message:
            for who, reply, note in self._notes.asked(member.process, message, data):
                self.everyone[who].tell(reply, note)
        elif "at" in message:
            phase, step = str(message["at"]), int(message["step"])
            if (phase, step) != (member.phase, member.step):
                self._enter(member, phase, step, ago=float(message.get("for", 0)))
        elif "ready" in message:
            self._enter(member, "commit", int(message["ready"]))
            self._vote(member, int(message["ready"]))
        elif "joined" in message:
            self._join(member, int(message["joined"]), message)
        elif "failed" in message:
            member.error = str(message["failed"])
            self._enter(member, "failed", member.step)
        elif "mask" in message:
            self._mask(member, str(message["mask"]), str(message["why"]))
        elif "end" in message:
            self._over("end", f"{member}: {message['end']}")
        elif "restart" in message:
            self._over("restart", f"{member}: {message['restart']}")
        elif "idle" in message:
            member.is_idle = True
            self._enter(member, "commit", 0)
            self._begin_if_all()  # the others may have come before
            for step in sorted(self._ready):
                self._commit_if_all(step)
        elif "say" in message:
            self._say(str(message["say"]), epoch=self.epoch, **message["facts"])

    def _enter(self, member: Member, phase: str, step: int, ago: float = 0.0) -> None:
        others = [each.phase for each in self.members.values() if each is not member]
        for before, part in (("over", "noticed"), ("start", "started")):
            if member.phase == before != phase and before not in others:
                self.recovery.reach(part)
        now = time.monotonic() - ago
        if member.phase in _LEARNED and phase not in ("over", "failed"):
            self._deadlines.took(member.phase, now - member.since)
        member.phase, member.step, member.since = phase, step, now
        member.stacks_at = None

    # Steps ------------------------------------------------------------------------------------

    def _vote(self, member: Member, step: int) -> None:
        """A process has the results of a step; with the last of them it is committed."""
        self._ready.setdefault(step, set()).add(member.process)
        self._commit_if_all(step)

    def _commit_if_all(self, step: int) -> None:
        if not self._ready.get(step, set()) >= self._working:
            return
        now = time.monotonic()
        self._ready.clear()
        self.committed = step
        self.highest = max(self.highest, step)
        then = "leave" if self._pausing else "go on"
        self._told_to_leave = self._pausing
        for each in self.members.values():
            each.tell({"commit": step, "then": then})
            if each.phase == "commit" and not each.is_idle:
                self._enter(each, "read", step + 1)
        clock, usual = self.recovery, self._deadlines.usual_step
        if clock.failed_at is not None:
            self._say("goes on", epoch=self.epoch, step=step, **clock.end(now, usual))
        elif clock.last_commit is not None:
            self._deadlines.took("step", now - clock.last_commit)
        clock.last_commit = now

    def _join(self, member: Member, step: int, told: dict[str, Any]) -> None:
        """A process is ready for the first step of an epoch, from the state after `step`."""
        self._joined.add(member.process)
        self.recovery.took(told.get("parts", {}))
        self._enter(member, "read", step)
        self._told = step, told
        self._begin_if_all()

    def _begin_if_all(self) -> None:
        if self._joined and self._joined >= self._working:
            step, told = self._told
            self.recovery.repeated = max(self.highest - step, 0)
            self.committed, self._is_joined = step, True
            self._say(
                "epoch",
                epoch=self.epoch,
                in_place=self.epoch != self.start,
                hosts=sorted(each.host for each in self.members.values()),
                failed=told.get("less", ""),
                live=told.get("live", 0),
                from_step=step,
                repeated=self.recovery.repeated,
                source=told.get("source", "start"),
                parts=self.recovery.parts,
            )

    @property
    def _working(self) -> set[int]:
        """Those who have chips to train on."""
        return {number for number, each in self.members.items() if not each.is_idle}

    # Who is there -----------------------------------------------------------------------------

    def ended(self, process: int, how: str, status: int) -> None:
        """A process has ended."""
        with self._lock:
            member = self.everyone[process]
            if member.has_left or process not in self.members:
                return
            if member.error:
                how = f"{how}: {member.error}"
            if status == 0:
                self._leave(member)  # without a word: it may know nothing of a steward
                return
            if status in REFUSALS and self.committed == 0 and self.start == 1:
                self._over("end", f"{member} {how}")
            self._lose({process: how})

    def service_ended(self, how: str) -> None:
        """JAX's coordination service has: no process outlives that."""
        with self._lock:
            self._over("restart", f"JAX's coordination service {how}")

    def tick(self) -> None:
        """Look for those who are gone or stuck; to be called a few times a second."""
        with self._lock:
            if self.verdict is not None:
                return
            now = time.monotonic()
            gone = {
                each.process: "has closed its line"
                for each in self.members.values()
                if each.closed_at is not None
                and not each.has_left
                and now - each.closed_at > CLOSED
            }
            if gone:
                self._lose(gone)
                return
            for each in self.everyone.values():
                if each.has_left and each.seen(now).seconds > self._deadlines.of("leave"):
                    self._stop(each.process)  # it is done, and hangs where it should end
            working = {k: each for k, each in self.members.items() if not each.has_left}
            stuck = self._deadlines.stuck({k: each.seen(now) for k, each in working.items()})
            stuck |= {k for k, each in working.items() if self._is_silent(each, now)}
            self._see_to(stuck, now)
            failed = [each for each in working.values() if each.phase == "failed"]
            if failed and all(each.phase in WAITING for each in working.values()) and not stuck:
                longest = max(each.seen(now).seconds for each in failed)
                if longest > CLOSED:
                    why = f"a collective failed and all are there: {failed[0].error}"
                    self._over("restart", why)

    def _see_to(self, stuck: set[int], now: float) -> None:
        """First the stacks, then the end; nobody can tell who it is where all are stuck."""
        for process, member in self.members.items():
            if process not in stuck:
                member.stacks_at = None
        for process in stuck:
            member = self.members[process]
            if member.stacks_at is None:
                member.stacks_at = now
                member.write_stacks()
        due = {
            process: f"is stuck: alive, and {self._seconds(process, now):.0f} s in phase "
            f"{self.members[process].phase!r} of step {self.members[process].step}"
            f"{', without a sign of life' * self._is_silent(self.members[process], now)}"
            for process in stuck
            if now - (self.members[process].stacks_at or now) > CLOSED
        }
        if not due:
            return
        if len(stuck) > 1 and stuck >= self._working:
            if due.keys() >= stuck:  # the last of them, too, has had its time
                self._over("restart", "all processes are stuck, and nobody can tell who began")
            return
        self._lose(due)

    def _is_silent(self, member: Member, now: float) -> bool:
        """Whether not even its second thread is heard of, which says several words a second."""
        return member.channel is not None and now - member.heard > self._deadlines.silence

    def _seconds(self, process: int, now: float) -> float:
        return self.members[process].seen(now).seconds

    def _lose(self, lost: dict[int, str]) -> None:
        """Some are lost: a new epoch without them, in place or not."""
        if self.verdict is not None:
            return
        left = any(each.has_left and each.channel for each in self.members.values())
        if left and not self._told_to_leave:
            for process in lost:  # all is done; nothing depends on it any more
                self._stop(process)
                self._leave(self.members[process])
            return
        hosts = []
        now = time.monotonic()
        signs = min(self.members[process].since for process in lost)
        for process, how in lost.items():
            member = self.members.pop(process)
            hosts.append(member.host)
            self._say(
                "failed",
                epoch=self.epoch,
                host=member.host,
                process=process,
                chips=member.chips,
                how=how,
                step=member.step,
                phase=member.phase,
            )
            self._stop(process)
        if not self.members:
            self._over("restart", "no process is left")
        elif left or not (self.in_place and self._is_joined):
            early = "" if self.in_place else ", and it is not to go on in place"
            self._over("restart", f"host {hosts[0]} is lost{early}")
        else:
            why = "; ".join(f"process {p} {how}" for p, how in lost.items())
            stuck = any(how.startswith("is stuck") for how in lost.values())
            self._next_epoch(why, noticed=now - signs if stuck else 0.0)

    def _mask(self, member: Member, blocks: str, why: str) -> None:
        """Chips are sick: the same processes go on without them."""
        known = list(filter(None, self.masked.split(";")))
        new = [block for block in blocks.split(";") if block not in known]
        if not new:
            return
        self.masked = ";".join([*known, *new])
        self._say("masked", epoch=self.epoch, chips=blocks, why=why, process=member.process)
        if self.in_place and self._is_joined:
            self._next_epoch(f"chips {blocks} are sick: {why}", noticed=0.0)
        else:
            self._over("restart", f"chips {blocks} are sick: {why}")

    def _next_epoch(self, why: str, *, noticed: float) -> None:
        self.epoch_began = time.monotonic()
        self.epoch += 1
        self._ready.clear()
        self._joined.clear()
        self._notes = Notes()
        self.recovery.begin(noticed)
        for each in self.members.values():
            each.error, each.is_idle = "", False
            if each.phase in (*WAITING, "read", "step"):
                self._enter(each, "over", each.step)
            each.tell(
                {
                    "epoch": self.epoch,
                    "members": sorted(self.members),
                    "masked": self.masked,
                    "committed": self.committed,
                    "why": why,
                }
            )

    def _over(self, what: str, why: str) -> None:
        if self.verdict is None:
            self.verdict = Verdict(what, why)
            for each in self.members.values():
                each.tell({"over": what, "why": why})

    # The end ----------------------------------------------------------------------------------

    def give_up(self, why: str) -> None:
        """End all processes."""
        with self._lock:
            self._over("end", why)

    def pause(self, why: str) -> None:
        """Have all processes leave at the next commit, their states kept."""
        with self._lock:
            self._pausing = True
            self._why_paused = why

    def _leave(self, member: Member) -> None:
        member.has_left = True
        self._enter(member, "leave", member.step)
        if all(self.members[number].has_left for number in self._working):
            if self.verdict is None:
                what = ("restart", self._why_paused) if self._told_to_leave else ("end", "")
                self.verdict = Verdict(*what, is_well=True)
            for each in self.members.values():
                each.tell({"left": True})
