"""Train on hosts of one machine under a real engine, and let them fail; see scripts/soak."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Protocol

from examples.common.report import metrics_lines
from examples.soak.checks import Run, check
from examples.soak.cluster_faults import (
    REPAIR_SECONDS,
    ClusterFault,
    agents,
    command_line,
    draw_cluster_faults,
    parse_cluster_faults,
    perform,
    send,
)
from examples.soak.hosts import Hosts, network
from examples.soak.pod import FAST_COMPILE, phase_limits
from examples.soak.ray_cluster import Ray
from examples.soak.slurm import Slurm
from examples.soak.soak import BATCH, MINUTES, Soak
from ftmesh.testing.fault_injection import recorded_processes

STEPS, EVERY = 120, 20
PHASE_LIMIT = 60.0  # seconds
OPTIONS = (
    "--mesh 4x2 --host-shape 2x1 --devices-per-host 2 --collective-limit 5 --strikes 10 "
    f"--join-timeout 120 --limits {phase_limits(PHASE_LIMIT)}"
)
POLL_SECONDS = 0.05
LEFT_SECONDS = 10.0  # for the last processes of a run to exit
ROOT = Path(__file__).parent.parent.parent
ENGINES: dict[str, type[Slurm] | type[Ray]] = {"slurm": Slurm, "ray": Ray}


class Engine(Protocol):
    """What starts the agents of all hosts."""

    hosts: Hosts
    kinds: tuple[str, ...]  # of faults that make sense under it
    daemons: tuple[str, ...]  # words in the command lines of its own processes

    def start(self, run_dir: Path, command: Sequence[str], env: dict[str, str]) -> None:
        """Start a run."""

    def poll(self) -> int | None:
        """Return the exit status of the run, None while it goes on."""

    def end(self) -> None:
        """End a run that does not end by itself."""

    def perform(self, kind: str, host: int) -> None:
        """Perform a fault of the engine itself."""

    def repair(self, host: int) -> None:
        """Start what has ended of the engine on a host."""

    def wait_until_ready(self) -> None:
        """Wait until the engine can start a run on all hosts."""


def train(engine: Engine, folder: Path, faults: Sequence[ClusterFault], limit: float) -> Run:
    """Train once, with all files in `folder`; `faults` strike one after another."""
    run_dir = folder / "run"
    run_dir.mkdir(parents=True)
    engine.wait_until_ready()
    (folder / "events.jsonl").symlink_to(run_dir / "events.jsonl")
    (folder / "faults").write_text("; ".join(map(str, faults)) + "\n")
    env = {**FAST_COMPILE, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    env |= {"PATH": f"{install_commands(folder)}:{os.environ['PATH']}", "FTMESH_OPTIONS": OPTIONS}
    engine.start(run_dir, ["sh", "-c", _trainer(folder)], env)
    striker = Striker(engine, folder, faults)
    until, status = time.monotonic() + limit, None
    try:
        while (status := engine.poll()) is None and time.monotonic() < until:
            striker.poll()
            time.sleep(POLL_SECONDS)
        if status is None:
            write_stacks(run_dir)
    finally:
        engine.end()
        striker.close()
    return Run.read(folder, status, "; ".join(map(str, faults)))


def install_commands(folder: Path) -> Path:
    """Make a folder with the commands that a recipe calls, of this interpreter."""
    programs = folder / "bin"
    programs.mkdir()
    for name, words in {"python": "", "ftmesh": "-m ftmesh "}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words}"$@"\n')
        (programs / name).chmod(0o755)
    return programs


def _trainer(folder: Path) -> str:
    """Return the command of a worker, which also continues from a checkpoint."""
    words = f"python -m examples.soak.train --steps {STEPS} --copy-every 5 --check-every 1"
    words += f" --checkpoint-every {EVERY} --out {shlex.quote(str(folder / 'out'))}"
    saved = shlex.quote(str(folder / "saved"))
    resume = f"$(ls {saved}/*/index.json > /dev/null 2>&1 && echo --resume)"
    return f"exec {words} --checkpoint-dir {saved} {resume}"


class Striker:
    """Lets faults strike when their moments come, and repairs hosts later."""

    def __init__(self, engine: Engine, folder: Path, faults: Sequence[ClusterFault]) -> None:
        self.pending = list(faults)
        self._engine, self._folder = engine, folder
        self._repairs: list[tuple[float, str, int]] = []
        self._last = 0.0  # when a fault struck
        self._lock = threading.Lock()

    def poll(self) -> None:
        """Strike and repair what is due."""
        now = time.time()
        for repair in [repair for repair in self._repairs if repair[0] <= now]:
            self._repair(*repair)
        if self.pending and self._is_due(self.pending[0]):
            fault = self.pending.pop(0)
            step = self._step()
            self._last = time.time()
            if fault.kind in ("daemon", "head", "requeue"):
                self._engine.perform(fault.kind, fault.host)
            elif not perform(fault, self._engine.hosts, self._folder / "run"):
                self.pending.append(fault)
                return  # it has no such process now
            if fault.kind in REPAIR_SECONDS:
                due = self._last + REPAIR_SECONDS[fault.kind]
                self._repairs.append((due, fault.kind, fault.host))
            self._record(fault, step)

    def close(self) -> None:
        """Repair all, and end what hosts still run of the training."""
        for repair in list(self._repairs):
            self._repair(*repair)
        hosts = self._engine.hosts
        for host in range(hosts.number):
            send(agents(hosts, host), signal.SIGCONT)

    def _repair(self, due: float, kind: str, host: int) -> None:
        self._repairs.remove((due, kind, host))
        if kind != "daemon":
            self._engine.hosts.mend(host)
        if kind in ("power", "daemon"):
            self._engine.repair(host)

    def _is_due(self, fault: ClusterFault) -> bool:
        if time.time() - self._last < 0.5:
            return False
        match fault.moment:
            case "start":
                return bool(self._events("started"))
            case "compile":
                started = self._events("started")
                return bool(started) and time.time() - started[-1] > 4
            case "recovery":
                return any(at > self._last for at in self._events("failed"))
        return self._step() >= fault.step

    def _events(self, name: str) -> list[float]:
        file = self._folder / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        with contextlib.suppress(ValueError):  # of a line that is being written
            return [event["time"] for event in map(json.loads, lines) if event["event"] == name]
        return []

    def _step(self) -> int:
        file = self._folder / "out" / "metrics.jsonl"
        lines = metrics_lines(file) if file.exists() else []
        return max((line["step"] for line in lines if "lr" in line), default=0)

    def _record(self, fault: ClusterFault, step: int) -> None:
        facts = {"kind": fault.kind, "moment": fault.moment, "process": fault.host, "step": step}
        line = {"time": self._last, "event": "fault", "epoch": 0, **facts, "text": fault.text}
        with open(self._folder / "run" / "faults.jsonl", "a") as file:
            file.write(f"{json.dumps(line)}\n")


def leftovers(engine: Engine) -> list[str]:
    """Return how the command lines begin of processes of a run that are left on hosts."""
    hosts, until = engine.hosts, time.monotonic() + LEFT_SECONDS
    while True:
        left = [command_line(pid) for host in range(hosts.number) for pid in hosts.running(host)]
        lines = [" ".join(words).strip()[:60] for words in left if any(words)]
        lines = [line for line in lines if not any(word in line for word in engine.daemons)]
        if not lines or time.monotonic() > until:
            return lines
        time.sleep(1)


def write_stacks(run_dir: Path) -> None:
    """Make the workers write their stacks to their logs."""
    send((p["pid"] for p in recorded_processes(run_dir) if p["kind"] == "worker"), signal.SIGUSR1)
    time.sleep(2)


class ClusterSoak(Soak):
    """Runs under an engine, one after another on the same hosts."""

    def many_runs(self) -> None:
        """Start runs, each with its own faults, until the time is up."""
        number = self.args.hosts
        with (
            network(number) as hosts,
            ENGINES[self.args.engine](hosts, self.folder / "engine") as e,
        ):
            duration = 60 * (self.args.minutes or (math.inf if self.args.runs else MINUTES))
            if self._train(e, "undisturbed", (), None):
                return
            self.num_runs, self.goodputs = 0, []
            until, reference = time.monotonic() + duration, self.folder / "undisturbed"
            for index in range(self.args.runs) if self.args.runs else count():
                if time.monotonic() > until:
                    break
                faults = draw_cluster_faults(self.args.seed + index, e.kinds, number, STEPS)
                if self.args.faults:
                    faults = parse_cluster_faults(self.args.faults, number)
                self._train(e, str(index), faults, reference / "out" / "weights.npz")

    def _train(
        self, engine: Engine, name: str, faults: Sequence[ClusterFault], reference: Path | None
    ) -> bool:
        """Train once; return whether it went wrong."""
        begin, folder = time.monotonic(), self.folder / name
        run = train(engine, folder, faults, self.args.limit)
        errors = [f"left on a host: {line}" for line in leftovers(engine)]
        errors += check(run, steps=STEPS, num_examples=STEPS * BATCH, reference=reference)
        self.count(run, errors, is_kept=reference is None)
        self.recoveries = [replace(recovery, moment="") for recovery in self.recoveries]
        self.console.print(
            f"{name}: {run.planted or 'no fault'}: {time.monotonic() - begin:.0f} s, "
            f"{'; '.join(errors) or 'right'}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        return bool(errors)
