"""Workers as the controller sees them, and its verdict on a run."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from ftmesh.elastic.heartbeats import Activity
from ftmesh.elastic.rpc import Channel


@dataclass
class Member:
    """A worker. Times are those of `time.monotonic`."""

    process: int
    host: int
    chips: str  # its block of the mesh
    channel: Channel | None = None
    pid: int | None = None
    phase: str = "start"
    step: int = 0
    since: float = field(default_factory=time.monotonic)  # when the phase began
    last_heard: float = field(default_factory=time.monotonic)
    closed_at: float | None = None  # when its connection closed
    error: str = ""
    has_left: bool = False  # it is done
    is_idle: bool = False  # it has no chip in the program
    stacks_at: float | None = None  # when its stacks were written

    def activity(self, now: float) -> Activity:
        """Return what it was last seen doing."""
        return Activity(self.phase, now - self.since, self.step)

    def send(self, message: dict[str, Any], data: bytes = b"") -> None:
        """Send it a message. A closed connection is noticed elsewhere."""
        if self.channel is not None:
            with contextlib.suppress(OSError):
                self.channel.send(message, data)

    def write_stacks(self) -> None:
        """Have it write the stacks of its threads; `faulthandler` does that without Python."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGUSR1)

    def __str__(self) -> str:
        return f"host {self.host} (process {self.process}, chips {self.chips})"


@dataclass(frozen=True)
class Verdict:
    """What happens to all workers: "restart" or "end"."""

    action: str
    reason: str
    is_orderly: bool = False  # the workers exit by themselves
