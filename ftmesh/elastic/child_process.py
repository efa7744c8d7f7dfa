"""One process of an emulated pod with all that it starts, and the warden that outlives the pod."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from ftmesh.elastic import reaper
from ftmesh.elastic.pod_environment import Environment

PIECE = 65_536
SOON = 0.01  # seconds between killing what is left and looking whether it has gone

# The command waits for a line, so that the warden knows of it first; without a line it never runs.
GATE = 'read -r go && exec "$@" </dev/null'


class Process:
    """A command in a session of its own: signals reach all that it starts, and a terminal's none.

    `status` is the command's, once it has ended, as shells count: 128 + n where signal n ended it.
    `told` is the first signal that the pod sent it while it ran. `is_gone` when nothing is left.
    """

    def __init__(
        self, number: int, command: Sequence[str], env: Environment, *, kill_after: float
    ) -> None:
        self.number = number
        self._kill_after = kill_after
        self.status: int | None = None
        self.told: signal.Signals | None = None
        self.is_gone = False
        self._kill_at = float("inf")
        self._popen = subprocess.Popen(
            ["/bin/sh", "-c", GATE, "sh", *command],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        self.pid = self._popen.pid
        self.ended_fd = _ended_fd(self.pid)
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self._gate = self._popen.stdin
        self.streams = {1: self._popen.stdout, 2: self._popen.stderr}
        for stream in self.streams.values():
            os.set_blocking(stream.fileno(), False)

    def go(self) -> None:
        """Let the command run."""
        with contextlib.suppress(BrokenPipeError):  # it was killed at the gate
            self._gate.write(b"\n")
        self._gate.close()

    def end(self, signum: signal.Signals) -> None:
        """Tell it to end; `kill_if_due` kills what has not ended `kill_after` seconds later."""
        if self.is_gone:
            return
        if self.status is None:
            self.told = self.told or signum
        wait = 0 if signum == signal.SIGKILL else self._kill_after
        self._kill_at = min(self._kill_at, time.monotonic() + wait)
        reaper.send(self.pid, signum, signal.SIGCONT)  # what is stopped would not hear it

    def kill_if_due(self) -> None:
        """Kill it if it was told to end long enough ago, again and again while anything is left."""
        if not self.is_gone and time.monotonic() >= self._kill_at:
            reaper.send(self.pid, signal.SIGKILL)

    def look(self) -> bool:
        """Note what has become of it; whether the command has ended since the last look."""
        ended = self.status is None and self._popen.poll() is not None
        if ended:
            code = self._popen.returncode
            self.status = code if code >= 0 else 128 - code
        if self.status is not None and not reaper.groups_of(self.pid):
            self.is_gone = True
        elif ended:
            self.end(signal.SIGTERM)  # workers that it left
        return ended

    def must_be_asked(self) -> bool:
        """Whether nothing wakes the pod when the next thing happens to it."""
        return not self.is_gone and (self.status is not None or self.ended_fd is None)

    def seconds_to_kill(self) -> float:
        """How long until `kill_if_due` has something to do."""
        return float("inf") if self.is_gone else max(self._kill_at - time.monotonic(), SOON)

    def read(self, stream: int) -> bytes | None:
        """The next piece of its output: empty at the end, None where there is none yet."""
        return self.streams[stream].read(PIECE)

    def close(self) -> None:
        """Kill it, wait for it and leave nothing open."""
        self.end(signal.SIGKILL)
        self._gate.close()
        self._popen.wait()
        if not self.is_gone:
            reaper.kill({self.pid})
        self.look()
        for stream in self.streams.values():
            stream.close()
        if self.ended_fd is not None:
            os.close(self.ended_fd)
            self.ended_fd = None


class Warden:
    """Kills the processes put in its care if this process ends without doing so."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    def watch(self, process: Process) -> None:
        """Take a process into care."""
        self._tell(f"+{process.pid}\n")

    def forget(self, process: Process) -> None:
        """Its number may soon be another's."""
        self._tell(f"-{process.pid}\n")

    def close(self) -> None:
        """Kill what is still in its care."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._popen.wait()

    def _tell(self, line: str) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # someone killed the warden: go on without
            self._popen.stdin.write(line.encode())


def _ended_fd(pid: int) -> int | None:
    """What becomes readable when the process ends, on Linux."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:  # a sandbox that does not allow it
        return None
