"""The line of a process to the steward: what it is doing goes up, commits and epochs come down.

Whatever the process waits for here, a new epoch ends the wait with `EpochOver`; so nobody waits for
one that is gone. When the steward is, or says that all is over, the process ends at once.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from ftmesh.distributed.wording import in_seconds
from ftmesh.elastic.rpc import Channel, ChannelClosed, connect
from ftmesh.errors import ClusterError

RESTARTS = 75  # the status of a process that ends so that all may be started anew
_PARTS = {"agree": "agreed", "plan": "planned", "compile": "compiled", "restore": "restored"}
BEAT = 0.2  # seconds between two signs of life
OFTEN = ("read", "step")  # phases of every step
LAST_WORD = 7200.0  # seconds for the steward to decide what a failed collective means


class Paused(Exception):  # noqa: N818
    """All processes end after a step, so that more of them can be started."""


class EpochOver(Exception):  # noqa: N818
    """Who takes part has changed: what was begun cannot be finished, and is to be begun again."""


@dataclass(frozen=True)
class News:
    """An epoch: who takes part, without which chips, and the last step that counts."""

    epoch: int
    members: tuple[int, ...]
    masked: str = ""
    committed: int = 0
    why: str = ""


class Line:
    """A process's line to the steward. `end` is called where all is over, with the reason."""

    def __init__(self, channel: Channel, news: News, *, end: Callable[[str], NoReturn]) -> None:
        self.news = news  # of the epoch that this process is in
        self.start = news.epoch  # the first one
        self.held: Any = None  # what the process takes with it into the next
        self._channel, self._end = channel, end
        self._next: News | None = None
        self._committed, self._then = 0, "go on"
        self._has_left = False
        self._calls = itertools.count()
        self._replies: dict[int, tuple[dict[str, Any], bytes]] = {}
        self._changed = threading.Condition()
        self._saying = threading.RLock()  # a beat must not say late what was before
        self._phase, self._since = ("", 0), time.monotonic()
        self._took: dict[str, float] = {}  # seconds in each phase of the epoch
        self._thread = threading.Thread(target=self._listen, name="ftmesh line", daemon=True)
        self._thread.start()
        threading.Thread(target=self._beats, name="ftmesh beats", daemon=True).start()

    @staticmethod
    def to(
        address: str,
        secret: str,
        process: int,
        start: int,
        num_processes: int,
        *,
        limit: float,
        end: Callable[[str], NoReturn],
    ) -> Line:
        """The line of a process of the start with this number, to the steward at an address."""
        channel = connect(address, secret, timeout=limit)
        channel.send({"hello": process, "pid": os.getpid(), "start": start})
        found = channel.receive(limit)
        if found is None or "welcome" not in found[0]:
            raise ClusterError(f"the steward at {address} does not know process {process}")
        epoch, masked = int(found[0]["welcome"]), str(found[0]["masked"])
        return Line(channel, News(epoch, tuple(range(num_processes)), masked), end=end)

    # What goes up -----------------------------------------------------------------------------

    def at(self, phase: str, step: int = 0) -> None:
        """Say what this process is doing from now on; `ftmesh.elastic.heartbeats` has the words.

        What comes with every step is said by the next beat, and costs a step nothing.
        """
        self.check()
        if (phase, step) != self._phase:
            self._enter(phase, step)
            if phase not in OFTEN:
                self._beat()

    def _beat(self) -> None:
        with self._saying:
            (phase, step), since = self._phase, self._since
            if phase and phase != "commit":
                self._send({"at": phase, "step": step, "for": time.monotonic() - since})
            else:
                self._send({"beat": True})

    def _beats(self) -> None:
        while not self._has_left:
            time.sleep(BEAT)
            self._beat()

    def _enter(self, phase: str, step: int = 0) -> None:
        now = time.monotonic()
        before = self._phase[0]
        self._took[before] = self._took.get(before, 0.0) + now - self._since
        self._phase, self._since = (phase, step), now

    def commit(self, step: int) -> str:
        """The results of a step are here: wait until they are everywhere; what to do then."""
        with self._saying:
            self._enter("commit", step)
            self._send({"ready": step})
        with self._changed:
            self._changed.wait_for(lambda: self._committed >= step or self._next)
            if self._committed >= step:
                return self._then
        self.check()
        raise AssertionError("neither a commit nor an epoch")

    def joined(self, step: int, **facts: Any) -> None:
        """Be ready for the first step of the epoch, from the state after `step`."""
        self.check()
        with self._changed:
            self._committed = step
        self._enter("read", step)
        parts = {name: self._took.get(phase, 0.0) for phase, name in _PARTS.items()}
        self._send({"joined": step, "parts": parts, **facts})

    def failed(self, error: BaseException) -> NoReturn:
        """A collective has failed here: the steward finds out whose fault that is."""
        self._enter("failed", self._phase[1])
        self._send({"failed": " ".join(str(error).split())[:500]})
        with self._changed:
            self._changed.wait_for(lambda: self._next, LAST_WORD)
        self.check()
        raise ClusterError(f"no word from the steward in {in_seconds(LAST_WORD)}") from error

    def mask(self, blocks: str, why: str) -> NoReturn:
        """Chips are sick: go on without them, in another epoch."""
        self._send({"mask": blocks, "why": why})
        with self._changed:
            self._changed.wait_for(lambda: self._next, LAST_WORD)
        self.check()
        raise ClusterError(f"no word from the steward in {in_seconds(LAST_WORD)}")

    def say(self, event: str, **facts: Any) -> None:
        """Have an event told."""
        self._send({"say": event, "facts": facts})

    def restart(self, why: str) -> NoReturn:
        """Have all processes started anew: this one cannot go on in place."""
        self._send({"restart": why})
        time.sleep(LAST_WORD)  # the end comes in between
        raise ClusterError(f"no word from the steward in {in_seconds(LAST_WORD)}")

    def end(self, why: str) -> NoReturn:
        """End the run: to begin again would not help."""
        self._send({"end": why})
        time.sleep(LAST_WORD)  # the end comes in between
        raise ClusterError(f"no word from the steward in {in_seconds(LAST_WORD)}")

    def failing(self, reason: str) -> None:
        """Say that this process is about to end because of an error."""
        self._send({"failing": reason[:500]})

    def stand_by(self) -> None:
        """Wait until all is done, or for another epoch: there is no chip here to train on."""
        self._send({"idle": True})
        with self._changed:
            self._changed.wait_for(lambda: self._has_left or self._next)
        self.check()

    def leave(self, limit: float) -> None:
        """All is done here: wait until it is everywhere."""
        self._enter("leave")
        self._send({"leave": True})
        with self._changed:
            self._changed.wait_for(lambda: self._has_left, limit)
            self._has_left = True
        self._channel.close()

    def call(
        self, do: str, key: str, note: bytes = b"", *, limit: float, **more: Any
    ) -> tuple[dict[str, Any], bytes] | None:
        """The steward's reply to a call of `ftmesh.elastic.kv_store`; None where time is up."""
        self.check()
        call = next(self._calls)
        self._send({"call": call, "do": do, "key": f"{self.news.epoch}/{key}", **more}, note)
        with self._changed:
            self._changed.wait_for(lambda: call in self._replies or self._next, limit)
            found = self._replies.pop(call, None)
        if found is None:
            self.check()
        return found

    def check(self) -> None:
        """`EpochOver` where there is a new epoch."""
        if self._next is not None:
            raise EpochOver(self._next.why)

    def next_epoch(self) -> News:
        """Take note of the new epoch, and be in it."""
        with self._saying, self._changed:
            self._enter("")  # before a beat could say of the new epoch what was in the old one
            self._took.clear()
            if self._next is not None:
                self.news, self._next = self._next, None
                self._replies.clear()
                self._committed, self._then = 0, "go on"
        return self.news

    def _send(self, message: dict[str, Any], data: bytes = b"") -> None:
        try:
            self._channel.send({**message, "epoch": self.news.epoch}, data)
        except ChannelClosed:
            if not self._has_left:
                self._end("the steward is gone")

    # What comes down --------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while True:
                found = self._channel.receive()
                if found is not None:
                    self._hear(*found)
        except ChannelClosed:
            if not self._has_left:
                self._end("the steward is gone")

    def _hear(self, message: dict[str, Any], data: bytes) -> None:
        if "over" in message:
            self._end(str(message["why"]))
        with self._changed:
            if "reply" in message:
                self._replies[int(message["reply"])] = (message, data)
            elif "commit" in message:
                self._committed, self._then = int(message["commit"]), str(message["then"])
            elif "epoch" in message:
                members = tuple(map(int, message["members"]))
                self._next = News(
                    int(message["epoch"]),
                    members,
                    str(message["masked"]),
                    int(message["committed"]),
                    str(message["why"]),
                )
            elif "left" in message:
                self._has_left = True
            self._changed.notify_all()
