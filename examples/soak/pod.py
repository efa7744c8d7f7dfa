"""Train on an emulated pod with a timeout; a run that hangs dumps its stacks when killed."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.common.report import metrics_lines
from examples.soak.checks import Run
from ftmesh.testing.fault_injection import recorded_processes
from ftmesh.testing.fault_spec import Fault

MESH, DEVICES = "4x4", 16
HOST_SHAPES = {2: "4x2", 4: "2x2", 8: "2x1"}
FAST_COMPILE = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # the same in all runs
# Timeouts in seconds: enough for this trainer on a busy machine.
PHASE_LIMIT = 60.0
LIMITS = {
    "--collective-limit": 5,
    "--strikes": 10,  # faults are random, and no host is to blame for them
}
STACKS_SECONDS, END_SECONDS = 3.0, 30.0


@dataclass(frozen=True, kw_only=True)
class Pod:
    """Trains on an emulated pod: the same command in every run, except for the faults."""

    hosts: int
    steps: int
    failures: int
    phase_limit: float = PHASE_LIMIT  # seconds to start, to plan, to compile, to restore
    options: tuple[str, ...] = ()  # more options of the launcher

    def command(self, folder: Path) -> list[str]:
        """Return the command line, with all files in `folder`."""
        launch = [sys.executable, "-m", "ftmesh", "launch", "--hosts", str(self.hosts)]
        launch += ["--devices-per-host", str(DEVICES // self.hosts), "--mesh", MESH]
        launch += ["--host-shape", HOST_SHAPES[self.hosts], "--failures", str(self.failures)]
        launch += ["--events", str(folder / "events.jsonl"), "--run-dir", str(folder / "run")]
        launch += [str(word) for limit in LIMITS.items() for word in limit]
        launch += ["--limits", phase_limits(self.phase_limit)]
        train = [*self._trainer(folder / "out"), "--checkpoint-dir", str(folder / "saved")]
        train += ["--checkpoint-every", str(max(10, self.steps // 100))]
        train += ["--copy-every", "5", "--check-every", "1"]
        return [*launch, *self.options, "--", *train]

    def _trainer(self, out: Path) -> list[str]:
        train = [sys.executable, "-m", "examples.soak.train"]
        return [*train, "--steps", str(self.steps), "--out", str(out)]

    def train(self, folder: Path, faults: Sequence[Fault] = (), *, limit: float) -> Run:
        """Train with all files in `folder`; kill a run that takes longer than `limit` seconds."""
        (folder / "run").mkdir(parents=True)
        text = ";".join(map(str, faults))
        (folder / "faults").write_text(f"{text}\n")
        env = {**os.environ, **FAST_COMPILE}
        env.pop("FTMESH_FAULTS", None)
        if faults:
            env["FTMESH_FAULTS"] = text
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen(
                self.command(folder), env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
            try:
                status: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
                _dump_stacks(folder / "run")
            finally:
                _end(process)
        return Run.read(folder, status, text)

    def train_alone(self, folder: Path) -> Path:
        """Train the same in one process, with all ranks on one device; return the weights' path."""
        command = [*self._trainer(folder), "--emulate", "one", "--mesh", MESH]
        env = {**os.environ, **FAST_COMPILE, "JAX_PLATFORMS": "cpu"}
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        return folder / "weights.npz"


def phase_limits(seconds: float) -> str:
    """Return --limits with `seconds` for phases before the first step, and at most 30 after."""
    before = (f"{phase}={seconds:g}" for phase in ("start", "plan", "compile", "restore"))
    after = (f"{phase}={min(seconds, 30):g}" for phase in ("save", "evaluate"))
    return ",".join((*before, *after))


def step_seconds(folder: Path) -> float:
    """Return the median duration of a run's steps."""
    lines = metrics_lines(folder / "out" / "metrics.jsonl")
    steps = [line for line in lines if "per_second" in line]
    return float(statistics.median(line["examples"] / line["per_second"] for line in steps))


def _dump_stacks(run_dir: Path) -> None:
    """Make every worker write its stacks to the log."""
    for process in recorded_processes(run_dir):
        if process["kind"] == "worker":
            with contextlib.suppress(ProcessLookupError):
                os.kill(process["pid"], signal.SIGUSR1)
    time.sleep(STACKS_SECONDS)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a launcher, which ends the processes it has started."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
