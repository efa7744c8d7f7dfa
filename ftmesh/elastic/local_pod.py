"""An emulated pod on this machine: processes that start, print and end together."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from ftmesh.elastic.child_process import (
    POLL_SECONDS,
    ChildProcess,
    Environment,
    Reaper,
    environments,
)
from ftmesh.errors import ArgumentError

GRACE_SECONDS = 30.0  # for the others to exit after one has failed
KILL_SECONDS = 15.0  # from SIGTERM to SIGKILL: trainers finish a checkpoint
TIMED_OUT = 124  # exit status, as of timeout(1)
READ_BYTES = 65_536
MAX_READS = 64  # after a process has exited: another may hold its pipe and go on writing

OnOutput = Callable[[int, int, bytes], None]


@dataclass(frozen=True)
class ProcessResult:
    r"""How a process ended and what it wrote; a byte that is not UTF-8 is written as ``\xff``."""

    status: int
    stdout: str
    stderr: str


def run_pod(
    command: Sequence[str],
    hosts: int,
    devices_per_host: int,
    mesh: str | None = None,
    *,
    env: Environment | Sequence[Environment] | None = None,
    grace: float = GRACE_SECONDS,
    timeout: float = 120.0,
) -> list[ProcessResult]:
    r"""Run a command as a pod to its end, and return the result of each process.

    Args:
        command: What each process runs.
        hosts: Number of processes.
        devices_per_host: CPU devices of each.
        mesh: Shape of all devices together.
        env: Variables to add, for all processes or one mapping for each.
        grace: Seconds for the others to exit after one has failed.
        timeout: Seconds for the whole run.

    Raises:
        TimeoutError: The run took longer than `timeout`.

    >>> run_pod(["sh", "-c", "echo $FTMESH_PROCESS_ID"], hosts=2, devices_per_host=4)[1]
    ProcessResult(status=0, stdout='1\n', stderr='')
    """
    output = [[bytearray(), bytearray()] for _ in range(hosts)]

    def keep(process: int, stream: int, data: bytes) -> None:
        output[process][stream - 1] += data

    with Pod(
        command, hosts=hosts, devices_per_host=devices_per_host, mesh=mesh, env=env, on_output=keep
    ) as pod:
        pod.run(grace=grace, timeout=timeout)
    results = [
        ProcessResult(
            process.status or 0, *(data.decode(errors="backslashreplace") for data in streams)
        )
        for process, streams in zip(pod.processes, output, strict=True)
    ]
    if pod.timed_out:
        raise TimeoutError(f"{' '.join(command)} took longer than {timeout:g} s: {results}")
    return results


class Processes:
    """A command in several processes, one for each environment, that run inside a ``with`` block.

    Leaving the block kills what is left, and so does the end of this process, even by SIGKILL.

    Args:
        command: What each process runs.
        environments: The environment of each.
        on_output: Called with the index of a process, 1 for stdout or 2 for stderr, and data, which
            is empty at the end.
        kill_after: Seconds from SIGTERM to SIGKILL.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Environment],
        *,
        on_output: OnOutput | None = None,
        kill_after: float = KILL_SECONDS,
    ) -> None:
        if os.name != "posix":
            raise ArgumentError("a pod of processes needs Linux or macOS")
        self._environments = list(environments)
        self._command, self._kill_after = list(command), kill_after
        for environment in self._environments:
            check_command(self._command, environment.get("PATH"))
        self.processes: list[ChildProcess] = []
        self.first_failed: ChildProcess | None = None
        self.timed_out = False
        self._on_output = on_output or (lambda process, stream, data: None)
        self._is_ending = False
        self._end_at = float("inf")
        self._reaper: Reaper | None = None
        self._selector = selectors.DefaultSelector()

    def __exit__(self, *error: object) -> None:
        self.close()

    def __enter__(self) -> Self:
        """Start all processes, or none."""
        try:
            self._reaper = Reaper()
            for number, env in enumerate(self._environments):
                process = ChildProcess(number, self._command, env, kill_after=self._kill_after)
                self.processes.append(process)
                self._reaper.watch(process)
                for stream, file in process.streams.items():
                    self._selector.register(file, selectors.EVENT_READ, (process, stream))
                if process.exit_fd is not None:
                    self._selector.register(process.exit_fd, selectors.EVENT_READ, (process, 0))
            if self._is_ending:  # a signal came meanwhile
                self.end(signal.SIGKILL)
            else:
                for process in self.processes:
                    process.release()
        except BaseException:
            self.close()
            raise
        return self

    @property
    def is_running(self) -> bool:
        """True while anything is left of any process."""
        return not all(process.is_gone for process in self.processes)

    @property
    def status(self) -> int:
        """Status of the first that failed by itself; 124 after a timeout; else the first not 0."""
        if self.first_failed is not None:
            return self.first_failed.status or 0
        if self.timed_out:
            return TIMED_OUT
        return next((process.status for process in self.processes if process.status), 0)

    def run(
        self,
        *,
        grace: float = GRACE_SECONDS,
        timeout: float | None = None,
        on_failure: Callable[[ChildProcess], None] | None = None,
    ) -> None:
        """Forward output until all processes have exited, within `timeout` seconds.

        The first that fails while others run is passed to `on_failure`; the others have `grace`
        seconds to exit.
        """
        if timeout is not None:
            self._end_at = time.monotonic() + timeout
        failed = None
        while self.is_running:
            self.poll(min(max(self._end_at - time.monotonic(), POLL_SECONDS), 1))
            if failed is None and self.first_failed is not None:
                failed = self.first_failed
                self._end_at = min(self._end_at, time.monotonic() + grace)
                if on_failure is not None and self.is_running:
                    on_failure(failed)

    def wait(
        self, timeout: float | None = None, *, until: Callable[[], bool] | None = None
    ) -> bool:
        """Forward output until all have exited, or `until` is true; False after `timeout`."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while not (until() if until else not self.is_running):
            left = deadline - time.monotonic()
            if left <= 0 or not self.is_running:
                return False
            self.poll(min(left, 1))
        return True

    def poll(self, seconds: float) -> list[ChildProcess]:
        """Forward output for at most `seconds`; return the processes that have exited."""
        seconds = min([seconds, *(process.seconds_to_poll() for process in self.processes)])
        exited = []
        for key, _ in self._selector.select(max(seconds, 0)):
            process, stream = key.data
            if stream:
                self._forward(process, stream)
            else:
                exited.append(process)  # in the order in which they exited
        ended = [process for process in [*exited, *self.processes] if self._update(process)]
        self.enforce()
        return ended

    def enforce(self) -> None:
        """End and kill processes that are due, while `on_output` blocks; `poll` does it too."""
        if time.monotonic() >= self._end_at and self.is_running and not self._is_ending:
            self.timed_out = self.first_failed is None
            self.end()
        for process in self.processes:
            process.kill_if_due()

    def end(self, signum: signal.Signals = signal.SIGTERM) -> None:
        """Send all a signal; `poll` kills what is left `kill_after` seconds later."""
        self._is_ending = True
        for process in self.processes:
            process.end(signum)

    def close(self) -> None:
        """Kill what is left and wait for it."""
        self.end(signal.SIGKILL)
        for process in self.processes:
            process.close()
            if self._reaper is not None:
                self._reaper.forget(process)
        self._selector.close()
        if self._reaper is not None:
            self._reaper.close()

    def _forward(self, process: ChildProcess, stream: int) -> bool:
        """Forward output; return True if there may be more."""
        file = process.streams[stream]
        if file.closed:
            return False
        data = file.read(READ_BYTES)
        if data is not None:  # there is some, or it is empty at the end
            self._on_output(process.number, stream, data)
        if data == b"":
            self._selector.unregister(file)
            file.close()
        return bool(data)

    def _update(self, process: ChildProcess) -> bool:
        """Return True if a process has exited since the last call; forward its last output."""
        if process.is_gone:
            return False
        has_exited = process.poll()
        if has_exited:
            if process.exit_fd is not None:
                self._selector.unregister(process.exit_fd)
            if process.status and process.sent_signal is None and self.first_failed is None:
                self.first_failed = process
        if has_exited or process.is_gone:
            self._drain(process)
        return has_exited

    def _drain(self, process: ChildProcess) -> None:
        """Forward all that a process wrote; end its output if none of its processes is left."""
        for stream, file in process.streams.items():
            for _ in range(MAX_READS):
                if not self._forward(process, stream):
                    break
            if process.is_gone and not file.closed:  # held by a process that left the session
                self._selector.unregister(file)
                file.close()
                self._on_output(process.number, stream, b"")
        if process.is_gone and self._reaper is not None:
            self._reaper.forget(process)


class Pod(Processes):
    """Processes that are one JAX program, each with the CPU devices of one emulated host.

    Args:
        command, hosts, devices_per_host, mesh, env: As for `run_pod`.
        on_output, kill_after: As for `Processes`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        hosts: int,
        devices_per_host: int,
        mesh: str | None = None,
        env: Environment | Sequence[Environment] | None = None,
        on_output: OnOutput | None = None,
        kill_after: float = KILL_SECONDS,
    ) -> None:
        all_env = environments(hosts, devices_per_host, mesh=mesh, env=env)
        super().__init__(command, all_env, on_output=on_output, kill_after=kill_after)


def check_command(command: Sequence[str], path: str | None) -> None:
    """Raise ArgumentError unless `command` names a program, by its path or on `path`."""
    if not command:
        raise ArgumentError("there is no command to run: give one, as in 'python train.py'")
    if shutil.which(command[0], path=path or os.defpath) is None:
        raise ArgumentError(f"{command[0]} is not a program: give its path, or one on the PATH")
