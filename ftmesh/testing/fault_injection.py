"""Faults that are planted in a run by FTMESH_FAULTS: the places where they can strike.

A trainer tells where it is, and a fault of that process, moment and step strikes there:

    faults.reach("step", 30)

Each strikes once in a run, also when processes are started anew: the folder FTMESH_RUN_DIR keeps
marks. Without that variable it is once in a process. Where FTMESH_FAULTS is not set, nothing
happens. `ftmesh.testing.fault_spec` has the text form.
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

from ftmesh.testing.fault_actions import act, halve, until_full
from ftmesh.testing.fault_spec import ANY, WITHOUT_STEP, Fault, parse

VARIABLE, RUN_DIR = "FTMESH_FAULTS", "FTMESH_RUN_DIR"
_SAYS = {
    "kill": "kill -9 of host {host}",
    "stop": "host {host} is stopped",
    "segv": "segmentation fault of host {host}",
    "hold": "a thread of host {host} holds the interpreter",
    "stuck": "host {host} is stuck",
    "raise": "an error in host {host}",
    "slow": "slow steps of host {host}",
    "wrong": "a wrong gradient of host {host}",
    "torn": "a torn file and kill -9 of host {host}",
    "full": "no space is left for host {host}",
    "keeper": "kill -9 of host {host} and its keeper",
    "service": "kill -9 of the coordination service by host {host}",
    "all": "kill -9 of all workers by host {host}",
}
_WHERE = {
    "start": "before joining",
    "compile": "while compiling",
    "step": "before the step",
    "collective": "in the collective",
    "commit": "before the commit",
    "checkpoint": "in the checkpoint",
    "evaluate": "in the evaluation",
    "recovery": "in the recovery",
}


def reach(moment: str, step: int = 0) -> None:
    """Tell that this process is at a moment of a step; what is planted there strikes."""
    if VARIABLE in os.environ:
        _planted().reach(moment, step)


def wrong(step: int) -> bool:
    """Whether the first chip of this process computes a wrong gradient in this step."""
    return VARIABLE in os.environ and _planted().is_wrong(step)


def writing(step: int, pieces: Iterable[Any], file: Path) -> Iterable[Any]:
    """What this process writes to a file of a checkpoint: all, or less where the disk is full."""
    return _planted().writing(step, pieces, file) if VARIABLE in os.environ else pieces


def written(step: int, file: Path) -> None:
    """Tell that this process has written that file, which may be torn, and the process ended."""
    if VARIABLE in os.environ:
        _planted().written(step, file)


class Planted:
    """The faults of a run, as one process meets them."""

    def __init__(self, text: str, *, host: int, hosts: int = 1, run_dir: Path | None) -> None:
        self.host, self.run_dir = host, run_dir
        started, told = _first_words(text, hosts, run_dir)
        self.started, faults = started, parse(told)
        self.own = {
            number: fault for number, fault in enumerate(faults) if fault.process in (host, ANY)
        }
        self._lasting: dict[str, tuple[Fault, int]] = {}  # by kind: the fault, the step it ends at
        self._lock = threading.Lock()

    def reach(self, moment: str, step: int) -> None:
        """Strike with what is planted at this moment."""
        for number, fault in self._due(moment, step):
            if fault.kind in ("wrong", "torn", "full"):
                continue  # these are asked for
            if moment == "collective":
                self.own.pop(number)
                later = threading.Timer(fault.seconds, self._strike, (number, fault, step))
                later.daemon = True
                later.start()
            else:
                self._strike(number, fault, step)
        slow = self._in_force("slow", step) if moment == "step" else None
        if slow is not None:
            time.sleep(slow.seconds)

    def is_wrong(self, step: int) -> bool:
        """Whether a wrong gradient is planted in this step."""
        for number, fault in self._due("step", step):
            if fault.kind == "wrong":
                self._strike(number, fault, step)
        return self._in_force("wrong", step) is not None

    def writing(self, step: int, pieces: Iterable[Any], file: Path) -> Iterable[Any]:
        """The pieces, or some and an error."""
        for number, fault in self._due("checkpoint", step):
            if fault.kind == "full" and self._is_first(number, fault, step):
                return until_full(pieces, file)
        return pieces

    def written(self, step: int, file: Path) -> None:
        """Tear the file, where that is planted."""
        for number, fault in self._due("checkpoint", step):
            if fault.kind == "torn" and self._is_first(number, fault, step):
                halve(file)
                act("kill", self.host, self.run_dir)

    def _due(self, moment: str, step: int) -> list[tuple[int, Fault]]:
        if not self.own:
            return []
        seconds = time.time() - self.started
        return [
            (number, fault)
            for number, fault in list(self.own.items())  # another thread may take some away
            if fault.moment == moment and self._is_time(fault, step, seconds)
        ]

    @staticmethod
    def _is_time(fault: Fault, step: int, seconds: float) -> bool:
        if fault.after is not None:
            return seconds >= fault.after
        return fault.moment in WITHOUT_STEP or step >= fault.step

    def _in_force(self, kind: str, step: int) -> Fault | None:
        fault, end = self._lasting.get(kind, (None, 0))
        return fault if step < end else None

    def _strike(self, number: int, fault: Fault, step: int) -> None:
        if not self._is_first(number, fault, step):
            return
        if fault.kind in ("slow", "wrong"):
            self._lasting[fault.kind] = (fault, step + fault.num_steps)
        else:
            act(fault.kind, self.host, self.run_dir)

    def _is_first(self, number: int, fault: Fault, step: int) -> bool:
        """Whether it strikes now for the first time in the run; if so, that is marked and said."""
        with self._lock:
            self.own.pop(number, None)
            if self.run_dir is not None:
                try:
                    mark = os.open(
                        self.run_dir / f"fault-{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY
                    )
                except FileExistsError:
                    return False
                os.close(mark)
        what = _SAYS[fault.kind].format(host=self.host)
        text = f"{what} at step {step}, {_WHERE[fault.moment]}"
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


def _first_words(text: str, hosts: int, run_dir: Path | None) -> tuple[float, str]:
    """When the run began, and its faults; the first process to ask says both for all later ones.

    By then there may be fewer hosts, and the same seed would draw others.
    """
    now = time.time()
    told = ";".join(str(fault) for fault in parse(text, hosts=hosts))
    if run_dir is None:
        return now, told
    run_dir.mkdir(parents=True, exist_ok=True)
    file, own = run_dir / "faults.json", run_dir / f".faults-{os.getpid()}"
    own.write_text(json.dumps({"time": now, "faults": told}))
    try:
        os.link(own, file)  # whole, and only the first
    except FileExistsError:
        pass
    finally:
        own.unlink()
    found = json.loads(file.read_text())
    return found["time"], found["faults"]


def _planted() -> Planted:
    env = os.environ
    host = env.get("FTMESH_HOST") or env.get("FTMESH_PROCESS_ID") or "0"
    hosts = env.get("FTMESH_NUM_PROCESSES") or "1"
    return _made(env[VARIABLE], int(host), int(hosts), env.get(RUN_DIR, ""))


@lru_cache
def _made(text: str, host: int, hosts: int, run_dir: str) -> Planted:
    """Once for an environment: what has struck is remembered."""
    return Planted(text, host=host, hosts=hosts, run_dir=Path(run_dir) if run_dir else None)
