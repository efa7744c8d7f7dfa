"""Injects the faults of FTMESH_FAULTS into a run.

A training loop calls ``inject("step", 30)``, and a fault for that process, moment and step fires.

A fault fires once in a run, also if processes are restarted: marker files in the folder
FTMESH_RUN_DIR record it. Without that variable it fires once in a process. Without FTMESH_FAULTS
nothing happens. `ftmesh.testing.fault_spec` describes the text form.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from ftmesh.execute import _compat
from ftmesh.testing.fault_spec import ANY_PROCESS, STEPLESS_MOMENTS, Fault, parse_faults

VARIABLE, RUN_DIR = "FTMESH_FAULTS", "FTMESH_RUN_DIR"
_DESCRIPTIONS = {
    "kill": "kill -9 of host {host}",
    "stop": "host {host} is stopped",
    "segv": "segmentation fault of host {host}",
    "hold": "a thread of host {host} holds the interpreter",
    "stuck": "host {host} is stuck",
    "raise": "an error in host {host}",
    "slow": "slow steps of host {host}",
    "wrong": "a wrong gradient of host {host}",
    "torn": "a torn file and kill -9 of host {host}",
    "full": "no disk space for host {host}",
    "store": "kill -9 of host {host} and its peer store",
    "service": "kill -9 of the coordination service by host {host}",
    "all": "kill -9 of all workers by host {host}",
}
_MOMENT_DESCRIPTIONS = {
    "start": "before joining",
    "compile": "while compiling",
    "step": "before the step",
    "collective": "in the collective",
    "commit": "before the commit",
    "checkpoint": "in the checkpoint",
    "evaluate": "in the evaluation",
    "recovery": "in the recovery",
}


def inject(moment: str, step: int = 0) -> None:
    """Fire the faults that FTMESH_FAULTS has for this process, moment and step."""
    if VARIABLE in os.environ:
        _injector().inject(moment, step)


def corrupts_gradient(step: int) -> bool:
    """True if the first chip of this process is to compute a wrong gradient in this step."""
    return VARIABLE in os.environ and _injector().corrupts_gradient(step)


def limit_writes(step: int, pieces: Iterable[Any], file: Path) -> Iterable[Any]:
    """Return the pieces of a checkpoint file; they end in an OSError if the disk is to be full."""
    return _injector().limit_writes(step, pieces, file) if VARIABLE in os.environ else pieces


def after_write(step: int, file: Path) -> None:
    """Truncate the checkpoint file just written and end the process, if that is the fault."""
    if VARIABLE in os.environ:
        _injector().after_write(step, file)


class FaultInjector:
    """The faults of a run, as one process sees them."""

    def __init__(self, text: str, *, host: int, hosts: int = 1, run_dir: Path | None) -> None:
        self.host, self.run_dir = host, run_dir
        self.start_time, faults = _load_or_record(text, hosts, run_dir)
        numbered = enumerate(faults)
        self.pending = {i: fault for i, fault in numbered if fault.process in (host, ANY_PROCESS)}
        self._lasting: dict[str, tuple[Fault, int]] = {}  # by kind: the fault, the step it ends at
        self._lock = threading.Lock()

    def inject(self, moment: str, step: int) -> None:
        """Fire the faults that are due at this moment."""
        for index, fault in self._due(moment, step):
            if fault.kind in ("wrong", "torn", "full"):
                continue  # these have methods of their own
            if moment == "collective":
                self.pending.pop(index)
                timer = threading.Timer(fault.seconds, self._fire, (index, fault, step))
                timer.daemon = True
                timer.start()
            else:
                self._fire(index, fault, step)
        slow = self._in_force("slow", step) if moment == "step" else None
        if slow is not None:
            time.sleep(slow.seconds)

    def corrupts_gradient(self, step: int) -> bool:
        """True if the gradient of this step is to be wrong."""
        for index, fault in self._due("step", step):
            if fault.kind == "wrong":
                self._fire(index, fault, step)
        return self._in_force("wrong", step) is not None

    def limit_writes(self, step: int, pieces: Iterable[Any], file: Path) -> Iterable[Any]:
        """Return the pieces, or the first of them and then an OSError."""
        for index, fault in self._due("checkpoint", step):
            if fault.kind == "full" and self._claim(index, fault, step):
                return _write_until_full(pieces, file)
        return pieces

    def after_write(self, step: int, file: Path) -> None:
        """Truncate the file and end the process if a `torn` fault is due."""
        for index, fault in self._due("checkpoint", step):
            if fault.kind == "torn" and self._claim(index, fault, step):
                os.truncate(file, file.stat().st_size // 2)
                perform("kill", self.host, self.run_dir)

    def _due(self, moment: str, step: int) -> list[tuple[int, Fault]]:
        def is_due(fault: Fault) -> bool:
            if fault.moment != moment:
                return False
            if fault.after is not None:
                return time.time() - self.start_time >= fault.after
            return moment in STEPLESS_MOMENTS or step >= fault.step

        pending = list(self.pending.items())  # a timer's thread may remove some
        return [(index, fault) for index, fault in pending if is_due(fault)]

    def _in_force(self, kind: str, step: int) -> Fault | None:
        fault, end = self._lasting.get(kind, (None, 0))
        return fault if step < end else None

    def _fire(self, index: int, fault: Fault, step: int) -> None:
        if not self._claim(index, fault, step):
            return
        if fault.kind in ("slow", "wrong"):
            self._lasting[fault.kind] = (fault, step + fault.num_steps)
        else:
            perform(fault.kind, self.host, self.run_dir)

    def _claim(self, index: int, fault: Fault, step: int) -> bool:
        """Mark and report a fault; False if it has fired in this run already."""
        with self._lock:
            self.pending.pop(index, None)
            if self.run_dir is not None:
                try:
                    (self.run_dir / f"fault-{index}").touch(exist_ok=False)
                except FileExistsError:
                    return False
        description = _DESCRIPTIONS[fault.kind].format(host=self.host)
        text = f"{description} at step {step}, {_MOMENT_DESCRIPTIONS[fault.moment]}"
        os.write(2, f"fault: {text}\n".encode())
        if self.run_dir is not None:
            event = {
                "time": time.time(),
                "event": "fault",
                "epoch": int(os.environ.get("FTMESH_EPOCH", "1")),
                "process": self.host,
                "step": step,
                "kind": fault.kind,
                "moment": fault.moment,
                "text": text,
            }
            with open(self.run_dir / "faults.jsonl", "ab", buffering=0) as file:
                file.write(json.dumps(event).encode() + b"\n")
        return True


def _load_or_record(text: str, hosts: int, run_dir: Path | None) -> tuple[float, list[Fault]]:
    """Return the start time and the faults of the run; the first process records both.

    Later there may be fewer hosts, and the same seed would draw other faults.
    """
    start_time, faults = time.time(), parse_faults(text, hosts=hosts)
    if run_dir is None:
        return start_time, faults
    run_dir.mkdir(parents=True, exist_ok=True)
    file, temporary = run_dir / "faults.json", run_dir / f".faults-{os.getpid()}"
    temporary.write_text(json.dumps({"time": start_time, "faults": ";".join(map(str, faults))}))
    try:
        os.link(temporary, file)  # atomic, and only the first succeeds
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
    recorded = json.loads(file.read_text())
    return recorded["time"], parse_faults(recorded["faults"])


def _injector() -> FaultInjector:
    env = os.environ
    joined = _compat.process_id_and_count()  # under an engine that sets variables of its own
    host = env.get("FTMESH_HOST") or env.get("FTMESH_PROCESS_ID") or joined[0]
    hosts = env.get("FTMESH_NUM_PROCESSES") or joined[1]
    return _cached_injector(env[VARIABLE], int(host), int(hosts), env.get(RUN_DIR, ""))


@lru_cache
def _cached_injector(text: str, host: int, hosts: int, run_dir: str) -> FaultInjector:
    return FaultInjector(text, host=host, hosts=hosts, run_dir=Path(run_dir) if run_dir else None)


# What the faults do ------------------------------------------------------------------------------


class InjectedError(RuntimeError):
    """What the fault `raise` raises. ftmesh does not expect it anywhere."""


def perform(kind: str, host: int, run_dir: Path | None) -> None:
    """Perform a fault of this kind in host `host`. Most kinds do not return."""
    pid = os.getpid()
    match kind:
        case "kill":
            os.kill(pid, signal.SIGKILL)
        case "stop":
            os.kill(pid, signal.SIGSTOP)
        case "segv":
            import resource  # not available on every system

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump
            os.kill(pid, signal.SIGSEGV)
            time.sleep(60)  # another thread may receive the signal
        case "hold":
            _hold_interpreter()
        case "stuck":
            while True:
                time.sleep(3600)
        case "raise":
            raise InjectedError(f"a fault was injected here, in host {host}")
        case "store":
            _kill_processes(run_dir, "store", host)
            os.kill(pid, signal.SIGKILL)
        case "service":
            _kill_processes(run_dir, "service")
        case "all":
            _kill_processes(run_dir, "worker")
            os.kill(pid, signal.SIGKILL)


def _hold_interpreter() -> NoReturn:
    """Block in C with the interpreter lock held, and all signals masked."""
    pause = ctypes.PyDLL(None).pause

    def hold() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            pause()

    threading.Thread(target=hold, daemon=True).start()
    while True:
        time.sleep(1)  # never returns


def _kill_processes(run_dir: Path | None, kind: str, host: int | None = None) -> None:
    """Kill the other processes of the run of one kind, of one host or all."""
    recorded = [process for process in recorded_processes(run_dir) if process["kind"] == kind]
    targets = [process for process in recorded if host in (None, process["host"])]
    if not targets:
        # A raw write: Python's own stderr may be blocked.
        os.write(2, b"fault: FTMESH_RUN_DIR/pids has no such process of this run\n")
    for process in targets:
        if process["pid"] != os.getpid():
            os.kill(process["pid"], signal.SIGKILL)


def recorded_processes(run_dir: Path | None) -> list[dict[str, Any]]:
    """List the live processes of a run: their kind (worker, store or service), host and pid."""
    files = [] if run_dir is None else sorted((run_dir / "pids").glob("*.json"))
    processes = [json.loads(file.read_text()) for file in files]
    return [process for process in processes if _belongs_to_run(process["pid"], run_dir)]


def _belongs_to_run(pid: int, run_dir: Path | None) -> bool:
    """Check a process's environment, on Linux: its pid may have been reused."""
    if not sys.platform.startswith("linux"):
        return True
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return run_dir is not None and any(
        os.path.realpath(os.fsdecode(value)) == os.path.realpath(run_dir)
        for name, _, value in (variable.partition(b"=") for variable in variables)
        if name == RUN_DIR.encode()
    )


def _write_until_full(pieces: Iterable[Any], file: Path) -> Iterator[Any]:
    """Yield the first piece, then raise the OSError of a full disk."""
    yield from islice(pieces, 1)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
