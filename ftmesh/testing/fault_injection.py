"""Injects the faults of FTMESH_FAULTS into a run.

A training loop says where it is, and a fault for that process, moment and step fires there:

    fault_injection.inject("step", 30)

A fault fires once in a run, also if processes are restarted: marker files in the folder
FTMESH_RUN_DIR record it. Without that variable it fires once in a process. Without FTMESH_FAULTS
nothing happens. `ftmesh.testing.fault_spec` describes the text form.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from ftmesh.testing.fault_actions import perform, truncate_to_half, write_until_full
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
    "keeper": "kill -9 of host {host} and its peer store",
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
    """Fire the faults that FTMESH_FAULTS has for this process here.

    Args:
        moment: Where the training loop is: one of `ftmesh.testing.fault_spec.MOMENTS`.
        step: The training step; ignored at ``start``, ``compile`` and ``recovery``.
    """
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
        self.pending = {
            index: fault
            for index, fault in enumerate(faults)
            if fault.process in (host, ANY_PROCESS)
        }
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
                return write_until_full(pieces, file)
        return pieces

    def after_write(self, step: int, file: Path) -> None:
        """Truncate the file and end the process if a `torn` fault is due."""
        for index, fault in self._due("checkpoint", step):
            if fault.kind == "torn" and self._claim(index, fault, step):
                truncate_to_half(file)
                perform("kill", self.host, self.run_dir)

    def _due(self, moment: str, step: int) -> list[tuple[int, Fault]]:
        if not self.pending:
            return []
        seconds = time.time() - self.start_time
        return [
            (index, fault)
            for index, fault in list(self.pending.items())  # a timer's thread may remove some
            if fault.moment == moment and self._is_time(fault, step, seconds)
        ]

    @staticmethod
    def _is_time(fault: Fault, step: int, seconds: float) -> bool:
        if fault.after is not None:
            return seconds >= fault.after
        return fault.moment in STEPLESS_MOMENTS or step >= fault.step

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
                    marker = os.open(
                        self.run_dir / f"fault-{index}", os.O_CREAT | os.O_EXCL | os.O_WRONLY
                    )
                except FileExistsError:
                    return False
                os.close(marker)
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
    host = env.get("FTMESH_HOST") or env.get("FTMESH_PROCESS_ID") or "0"
    hosts = env.get("FTMESH_NUM_PROCESSES") or "1"
    return _cached_injector(env[VARIABLE], int(host), int(hosts), env.get(RUN_DIR, ""))


@lru_cache
def _cached_injector(text: str, host: int, hosts: int, run_dir: str) -> FaultInjector:
    return FaultInjector(text, host=host, hosts=hosts, run_dir=Path(run_dir) if run_dir else None)
