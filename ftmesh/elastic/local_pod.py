"""An emulated pod on this machine: its processes started together, heard, and ended together.

Run a command as an emulated pod on this machine, from its first process to its last.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from ftmesh.elastic.child_process import Process, Warden
from ftmesh.elastic.pod_environment import Environment, environments
from ftmesh.errors import ArgumentError

GRACE_SECONDS = 30.0
KILL_SECONDS = 15.0  # between being told to end and being killed: trainers finish a checkpoint
TIMED_OUT = 124  # as timeout(1)
TURN_SECONDS = 0.05  # between looks at what wakes nobody
MOST_PIECES = 64  # of the output of one that has ended; another may hold its pipe and go on writing

OnOutput = Callable[[int, int, bytes], None]


class Pod:
    """Processes that are one JAX program, each with the devices of one host.

    Within ``with`` they run; leaving it kills what is left, and so does the end of this process,
    even by SIGKILL. `on_output` is given the number of a process, 1 or 2 for its stdout or stderr,
    and a piece of bytes, which is empty at the end.

    >>> with Pod(["true"], hosts=2, devices_per_host=4) as pod:
    ...     pod.see_out()
    >>> [process.status for process in pod.processes]
    [0, 0]
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        hosts: int,
        devices_per_host: int,
        mesh: str | None = None,
        env: Environment | Sequence[Environment] | None = None,
        flags: str = "",
        on_output: OnOutput | None = None,
        kill_after: float = KILL_SECONDS,
    ) -> None:
        if os.name != "posix":
            raise ArgumentError("a pod of processes needs Linux or macOS: run it there")
        self._environments = environments(hosts, devices_per_host, mesh=mesh, env=env, flags=flags)
        self._command = list(command)
        self._kill_after = kill_after
        for each in self._environments:
            check_command(self._command, each.get("PATH"))
        self.coordinator = self._environments[0]["FTMESH_COORDINATOR"]
        self.processes: list[Process] = []
        self.first_failed: Process | None = None
        self.timed_out = False
        self._on_output = on_output or (lambda process, stream, piece: None)
        self._is_ending = False
        self._give_up_at = float("inf")
        self._warden: Warden | None = None
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Pod:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start all of them, or none."""
        try:
            self._warden = Warden()
            for number, env in enumerate(self._environments):
                process = Process(number, self._command, env, kill_after=self._kill_after)
                self.processes.append(process)
                self._warden.watch(process)
                self._listen(process)
            if self._is_ending:  # a signal came meanwhile
                self.kill()
            else:
                for process in self.processes:
                    process.go()
        except BaseException:
            self.close()
            raise

    @property
    def is_running(self) -> bool:
        """Whether anything is left of any process."""
        return not all(process.is_gone for process in self.processes)

    @property
    def status(self) -> int:
        """The status of the first that failed by itself; 124 if time was up; else any but 0."""
        if self.first_failed is not None:
            return self.first_failed.status or 0
        if self.timed_out:
            return TIMED_OUT
        return next((process.status for process in self.processes if process.status), 0)

    def poll(self, seconds: float) -> list[Process]:
        """Pass output on as it comes, for one turn of at most so many seconds; who has ended."""
        seconds = min([seconds, *(process.seconds_to_kill() for process in self.processes)])
        if any(process.must_be_asked() for process in self.processes):
            seconds = min(seconds, TURN_SECONDS)
        asked = []
        for key, _ in self._selector.select(max(seconds, 0)):
            process, stream = key.data
            if stream:
                self._pass_on(process, stream)
            else:
                asked.append(process)  # in the order in which they ended
        ended = [process for process in [*asked, *self.processes] if self._look(process)]
        self.enforce()
        return ended

    def wait(
        self, timeout: float | None = None, *, until: Callable[[], bool] | None = None
    ) -> bool:
        """Pass output on until all have ended, or `until` is true; False if time is up before."""
        give_up = float("inf") if timeout is None else time.monotonic() + timeout
        while not (until() if until else not self.is_running):
            left = give_up - time.monotonic()
            if left <= 0 or not self.is_running:
                return False
            self.poll(min(left, 1))
        return True

    def see_out(
        self,
        *,
        grace: float = GRACE_SECONDS,
        timeout: float | None = None,
        on_failure: Callable[[Process], None] | None = None,
    ) -> None:
        """Stay until all have ended; once one fails the others have `grace` seconds left."""
        if timeout is not None:
            self._give_up_at = time.monotonic() + timeout
        failed = None
        while self.is_running:
            self.poll(min(max(self._give_up_at - time.monotonic(), TURN_SECONDS), 1))
            if failed is None and self.first_failed is not None:
                failed = self.first_failed
                self._give_up_at = min(self._give_up_at, time.monotonic() + grace)
                if on_failure is not None and self.is_running:
                    on_failure(failed)

    def enforce(self) -> None:
        """End and kill what is due, as `poll` does; for an `on_output` that has to wait."""
        if time.monotonic() >= self._give_up_at and self.is_running and not self._is_ending:
            self.timed_out = self.first_failed is None
            self.end()
        for process in self.processes:
            process.kill_if_due()

    def end(self, signum: signal.Signals = signal.SIGTERM) -> None:
        """Tell all to end; `poll` kills what has not ended `kill_after` seconds later."""
        self._is_ending = True
        for process in self.processes:
            process.end(signum)

    def kill(self) -> None:
        """Kill all at once."""
        self._is_ending = True
        for process in self.processes:
            process.end(signal.SIGKILL)

    def close(self) -> None:
        """Kill what is left and wait for it; nothing of the pod remains."""
        self.kill()
        for process in self.processes:
            process.close()
            if self._warden is not None:
                self._warden.forget(process)
        self._selector.close()
        if self._warden is not None:
            self._warden.close()

    def _listen(self, process: Process) -> None:
        for stream, file in process.streams.items():
            self._selector.register(file, selectors.EVENT_READ, (process, stream))
        if process.ended_fd is not None:
            self._selector.register(process.ended_fd, selectors.EVENT_READ, (process, 0))

    def _pass_on(self, process: Process, stream: int) -> bool:
        """Pass a piece of output on; whether there may be more."""
        file = process.streams[stream]
        if file.closed:
            return False
        piece = process.read(stream)
        if piece is not None:
            self._on_output(process.number, stream, piece)
        if piece == b"":
            self._selector.unregister(file)
            file.close()
        return bool(piece)

    def _look(self, process: Process) -> bool:
        """See whether a process has ended, and hear it out if so."""
        if process.is_gone:
            return False
        ended = process.look()
        if ended:
            if process.ended_fd is not None:
                self._selector.unregister(process.ended_fd)
            if process.status and process.told is None and self.first_failed is None:
                self.first_failed = process
        if ended or process.is_gone:
            self._hear_out(process)
        return ended

    def _hear_out(self, process: Process) -> None:
        """All that it wrote; an end to its output if nothing of it is left."""
        for stream, file in process.streams.items():
            for _ in range(MOST_PIECES):
                if not self._pass_on(process, stream):
                    break
            if process.is_gone and not file.closed:  # held by what has left the session
                self._selector.unregister(file)
                file.close()
                self._on_output(process.number, stream, b"")
        if process.is_gone and self._warden is not None:
            self._warden.forget(process)


def check_command(command: Sequence[str], path: str | None) -> None:
    """Refuse what no process could run, a program on `path` or by its own."""
    if not command:
        raise ArgumentError("there is no command to run: give one, as 'python train.py'")
    if shutil.which(command[0], path=path or os.defpath) is None:
        raise ArgumentError(f"{command[0]} is not a program: give its path, or one on the PATH")


@dataclass(frozen=True)
class Result:
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
) -> list[Result]:
    r"""Run a pod to its end; what came of each process. Raises TimeoutError if time was up.

    >>> run_pod(["sh", "-c", "echo $FTMESH_PROCESS_ID"], hosts=2, devices_per_host=4)[1]
    Result(status=0, stdout='1\n', stderr='')
    """
    wrote = [[bytearray(), bytearray()] for _ in range(hosts)]

    def keep(process: int, stream: int, piece: bytes) -> None:
        wrote[process][stream - 1] += piece

    with Pod(
        command, hosts=hosts, devices_per_host=devices_per_host, mesh=mesh, env=env, on_output=keep
    ) as pod:
        pod.see_out(grace=grace, timeout=timeout)
    results = [
        Result(process.status or 0, *(each.decode(errors="backslashreplace") for each in text))
        for process, text in zip(pod.processes, wrote, strict=True)
    ]
    if pod.timed_out:
        raise TimeoutError(f"{' '.join(command)} took longer than {timeout:g} s: {results}")
    return results
