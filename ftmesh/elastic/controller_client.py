"""Controller client: a worker's control connection to the controller.

The worker reports what it is doing; the controller sends commits and generations. A new generation
ends every wait of the client with `GenerationChanged`, so no worker waits for a lost one. If the
controller is gone, or ends the run, the worker exits at once.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from ftmesh.elastic.rpc import Channel, ChannelClosed, connect
from ftmesh.errors import ClusterError

RESTART_STATUS = 75  # exit status of a worker that is to be started again
HEARTBEAT_SECONDS = 0.2
DECISION_TIMEOUT = 7200.0  # seconds for the controller to decide what a failed collective means
_PHASES_OF_EVERY_STEP = ("read", "step")
# Names of phases in the "goes on" event.
_PARTS = {"agree": "agreed", "plan": "planned", "compile": "compiled", "restore": "restored"}


class Paused(Exception):  # noqa: N818
    """All workers exit after a committed step, so that more of them can be started."""


class GenerationChanged(Exception):  # noqa: N818
    """The members have changed: start over with those that are left."""


@dataclass(frozen=True)
class Membership:
    """A generation: its members, the quarantined chips and the last committed step."""

    generation: int
    members: tuple[int, ...]
    quarantined: str = ""  # blocks of chips, as in "1x1@0,0;2x2@4,4"
    committed: int = 0
    reason: str = ""


class ControllerClient:
    """A worker's connection to the controller.

    `on_end` is called with the reason when the controller ends the run or is gone.
    """

    def __init__(
        self, channel: Channel, membership: Membership, *, on_end: Callable[[str], NoReturn]
    ) -> None:
        self.membership = membership
        self.first_generation = membership.generation
        self._channel, self._on_end = channel, on_end
        self._next: Membership | None = None
        self._committed, self._then = 0, "go on"
        self._has_left = False
        self._call_ids = itertools.count()
        self._replies: dict[int, tuple[dict[str, Any], bytes]] = {}
        self._changed = threading.Condition()
        self._reporting = threading.RLock()  # no heartbeat may report a phase that is over
        self._phase, self._since = ("", 0), time.monotonic()
        self._phase_seconds: dict[str, float] = {}  # in this generation
        self._thread = threading.Thread(target=self._listen, name="ftmesh controller", daemon=True)
        self._thread.start()
        threading.Thread(target=self._heartbeats, name="ftmesh heartbeats", daemon=True).start()

    @staticmethod
    def connect(
        address: str,
        secret: str,
        process: int,
        generation: int,
        num_processes: int,
        *,
        timeout: float,
        on_end: Callable[[str], NoReturn],
    ) -> ControllerClient:
        """Connect a worker that was started in `generation` to the controller at `address`."""
        channel = connect(address, secret, timeout=timeout)
        channel.send({"hello": process, "pid": os.getpid(), "start": generation})
        reply = channel.receive(timeout)
        if reply is None or "welcome" not in reply[0]:
            raise ClusterError(f"the controller at {address} does not know process {process}")
        current, quarantined = int(reply[0]["welcome"]), str(reply[0]["quarantined"])
        membership = Membership(current, tuple(range(num_processes)), quarantined)
        return ControllerClient(channel, membership, on_end=on_end)

    # To the controller ------------------------------------------------------------------------

    def report_phase(self, phase: str, step: int = 0) -> None:
        """Report the phase that this worker enters, one of `heartbeats.PHASE_TIMEOUTS`.

        Phases of each step are sent with the next heartbeat, and do not delay the step.
        """
        self.check_generation()
        if (phase, step) != self._phase:
            self._enter(phase, step)
            if phase not in _PHASES_OF_EVERY_STEP:
                self._heartbeat()

    def commit(self, step: int) -> str:
        """Wait until all members have the results of `step`. Returns "go on" or "leave"."""
        with self._reporting:
            self._enter("commit", step)
            self._send({"ready": step})
        with self._changed:
            self._changed.wait_for(lambda: self._committed >= step or self._next)
            if self._committed >= step:
                return self._then
        self.check_generation()
        raise AssertionError("neither a commit nor a generation")

    def report_joined(
        self, step: int, *, source: str = "start", live: int = 0, failed: str = ""
    ) -> None:
        """Report that this worker is ready, with the state after `step` and `live` chips.

        The state comes from "devices", "host memory", "checkpoint" or "start". Failed chips are
        given as blocks.
        """
        self.check_generation()
        with self._changed:
            self._committed = step
        self._enter("read", step)
        parts = {name: self._phase_seconds.get(p, 0.0) for p, name in _PARTS.items()}
        self._send(
            {"joined": step, "parts": parts, "source": source, "live": live, "failed_chips": failed}
        )

    def report_failure(self, error: BaseException) -> NoReturn:
        """Report that a collective failed here, and wait for the controller's decision."""
        self._enter("failed", self._phase[1])
        self._send({"failed": " ".join(str(error).split())[:500]})
        self._wait_for_generation()

    def quarantine(self, chips: str, reason: str) -> NoReturn:
        """Begin a generation without unhealthy chips, given as blocks."""
        self._send({"quarantine": chips, "reason": reason})
        self._wait_for_generation()

    def request_restart(self, reason: str) -> NoReturn:
        """Request a restart of all workers: this one cannot continue in place."""
        self._send({"restart": reason})
        self._wait_for_end()

    def request_end(self, reason: str) -> NoReturn:
        """Request the end of the run: a restart would not help."""
        self._send({"end": reason})
        self._wait_for_end()

    def report_exit(self, reason: str) -> None:
        """Report that this worker is about to exit because of an error."""
        self._send({"exiting": reason[:500]})

    def stand_by(self) -> None:
        """Wait for the end or the next generation: no chip of this worker is in the program."""
        self._send({"idle": True})
        with self._changed:
            self._changed.wait_for(lambda: self._has_left or self._next)
        self.check_generation()

    def leave(self, timeout: float) -> None:
        """Report that this worker is done, and wait up to `timeout` seconds for the others."""
        self._enter("leave")
        self._send({"leave": True})
        with self._changed:
            self._changed.wait_for(lambda: self._has_left, timeout)
            self._has_left = True
        self._channel.close()

    def call_kv(
        self, operation: str, key: str, value: bytes = b"", *, timeout: float, **arguments: Any
    ) -> tuple[dict[str, Any], bytes] | None:
        """Call the `KvStore` of the controller. Returns None after `timeout` seconds."""
        self.check_generation()
        call_id = next(self._call_ids)
        scoped = f"{self.membership.generation}/{key}"
        self._send({"call": call_id, "operation": operation, "key": scoped, **arguments}, value)
        with self._changed:
            self._changed.wait_for(lambda: call_id in self._replies or self._next, timeout)
            reply = self._replies.pop(call_id, None)
        if reply is None:
            self.check_generation()
        return reply

    def check_generation(self) -> None:
        """Raise `GenerationChanged` if a new generation has begun."""
        if self._next is not None:
            raise GenerationChanged(self._next.reason)

    def enter_next_generation(self) -> Membership:
        """Enter the new generation, if there is one, and return the current one."""
        with self._reporting, self._changed:
            self._enter("")  # before a heartbeat reports an old phase in the new generation
            self._phase_seconds.clear()
            if self._next is not None:
                self.membership, self._next = self._next, None
                self._replies.clear()
                self._committed, self._then = 0, "go on"
        return self.membership

    def _enter(self, phase: str, step: int = 0) -> None:
        now, last = time.monotonic(), self._phase[0]
        self._phase_seconds[last] = self._phase_seconds.get(last, 0.0) + now - self._since
        self._phase, self._since = (phase, step), now

    def _heartbeat(self) -> None:
        with self._reporting:
            phase, step = self._phase
            if phase and phase != "commit":
                self._send({"phase": phase, "step": step, "for": time.monotonic() - self._since})
            else:
                self._send({"heartbeat": True})

    def _heartbeats(self) -> None:
        while not self._has_left:
            time.sleep(HEARTBEAT_SECONDS)
            self._heartbeat()

    def _wait_for_generation(self) -> NoReturn:
        with self._changed:
            self._changed.wait_for(lambda: self._next, DECISION_TIMEOUT)
        self.check_generation()
        raise ClusterError(f"no decision from the controller in {DECISION_TIMEOUT:g} s")

    def _wait_for_end(self) -> NoReturn:
        time.sleep(DECISION_TIMEOUT)  # the controller ends this process in between
        raise ClusterError(f"no decision from the controller in {DECISION_TIMEOUT:g} s")

    def _send(self, message: dict[str, Any], data: bytes = b"") -> None:
        try:
            self._channel.send({**message, "generation": self.membership.generation}, data)
        except ChannelClosed:
            if not self._has_left:
                self._on_end("the controller is gone")

    # From the controller ----------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while frame := self._channel.receive():
                self._handle(*frame)
        except ChannelClosed:
            if not self._has_left:
                self._on_end("the controller is gone")

    def _handle(self, message: dict[str, Any], data: bytes) -> None:
        if "over" in message:
            self._on_end(str(message["reason"]))
        with self._changed:
            if "reply" in message:
                self._replies[int(message["reply"])] = (message, data)
            elif "commit" in message:
                self._committed, self._then = int(message["commit"]), str(message["then"])
            elif "generation" in message:
                self._next = Membership(**{**message, "members": tuple(message["members"])})
            elif "left" in message:
                self._has_left = True
            self._changed.notify_all()
