"""Members: processes that take part, as the steward sees them, and what is to become of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from ftmesh.elastic.heartbeats import Seen
from ftmesh.elastic.rpc import Channel


@dataclass
class Member:
    """A process that takes part."""

    process: int
    host: int
    chips: str  # in words
    channel: Channel | None = None
    pid: int | None = None
    phase: str = "start"
    step: int = 0
    since: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    closed_at: float | None = None
    error: str = ""
    has_left: bool = False
    is_idle: bool = False  # has no chip to train on
    stacks_at: float | None = None

    def seen(self, now: float) -> Seen:
        """What it was last seen doing."""
        return Seen(self.phase, now - self.since, self.step)

    def tell(self, message: dict[str, Any], data: bytes = b"") -> None:
        """Send it a message; one that is gone will be noticed elsewhere."""
        if self.channel is not None:
            with contextlib.suppress(OSError):
                self.channel.send(message, data)

    def write_stacks(self) -> None:
        """Have it write where its threads are: a handler of its own does, without Python."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGUSR1)

    def __str__(self) -> str:
        return f"host {self.host} (process {self.process}, chips {self.chips})"


@dataclass(frozen=True)
class Verdict:
    """What is to become of all processes: a "restart", or the "end", well or not."""

    what: str
    why: str
    is_well: bool = False  # all processes leave by themselves
