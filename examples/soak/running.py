"""A run on an emulated pod, under a limit in time; one that hangs says where before it is ended."""

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
from ftmesh.testing.fault_actions import recorded_processes
from ftmesh.testing.fault_spec import Fault

MESH, DEVICES = "4x4", 16
HOST_SHAPES = {2: "4x2", 4: "2x2", 8: "2x1"}
QUICKLY = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # to compile; all runs alike
# Seconds to wait for what hangs: enough for this trainer on a busy machine, and no more.
PHASE_LIMIT = 60.0
LIMITS = {
    "--collective-limit": 5,
    "--strikes": 10,  # faults are drawn, and hosts are not to blame for them
}
STACKS_SECONDS, END_SECONDS = 3.0, 30.0


@dataclass(frozen=True, kw_only=True)
class Pod:
    """The command that trains on an emulated pod: the same in every run, but for the faults."""

    hosts: int
    steps: int
    failures: int
    phase_limit: float = PHASE_LIMIT  # seconds to start, to plan, to compile, to restore
    how: tuple[str, ...] = ()  # more options of the launcher

    def command(self, folder: Path) -> list[str]:
        """What is run, with all its files in `folder`."""
        launch = [sys.executable, "-m", "ftmesh", "launch", "--hosts", str(self.hosts)]
        launch += ["--devices-per-host", str(DEVICES // self.hosts), "--mesh", MESH]
        launch += ["--host-shape", HOST_SHAPES[self.hosts], "--failures", str(self.failures)]
        launch += ["--events", str(folder / "events.jsonl"), "--run-dir", str(folder / "run")]
        launch += [str(word) for limit in LIMITS.items() for word in limit]
        launch += ["--limits", limits_of_phases(self.phase_limit)]
        train = [*self._trainer(folder / "out"), "--checkpoint-dir", str(folder / "saved")]
        train += ["--checkpoint-every", str(max(10, self.steps // 100))]
        train += ["--copy-every", "5", "--check-every", "1"]
        return [*launch, *self.how, "--", *train]

    def _trainer(self, out: Path) -> list[str]:
        train = [sys.executable, "-m", "examples.soak.train"]
        return [*train, "--steps", str(self.steps), "--out", str(out)]

    def train(self, folder: Path, faults: Sequence[Fault] = (), *, limit: float) -> Run:
        """A run, of which everything is in `folder`; one that takes too long is ended."""
        (folder / "run").mkdir(parents=True)
        text = ";".join(map(str, faults))
        (folder / "faults").write_text(f"{text}\n")
        env = {**os.environ, **QUICKLY}
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
                _say_stacks(folder / "run")
            finally:
                _end(process)
        return Run.read(folder, status, text)

    def train_alone(self, folder: Path) -> Path:
        """The weights of the same training by one process, with all ranks on one device: quick."""
        command = [*self._trainer(folder), "--emulate", "one", "--mesh", MESH]
        env = {**os.environ, **QUICKLY, "JAX_PLATFORMS": "cpu"}
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        return folder / "weights.npz"


def limits_of_phases(seconds: float) -> str:
    """What may take so long before a step can be done, and less for what comes after one."""
    before = (f"{phase}={seconds:g}" for phase in ("start", "plan", "compile", "restore"))
    after = (f"{phase}={min(seconds, 30):g}" for phase in ("save", "evaluate"))
    return ",".join((*before, *after))


def step_seconds(folder: Path) -> float:
    """How long a step of a run took, in the middle of them all."""
    lines = metrics_lines(folder / "out" / "metrics.jsonl")
    steps = [line for line in lines if "per_second" in line]
    return float(statistics.median(line["examples"] / line["per_second"] for line in steps))


def _say_stacks(run_dir: Path) -> None:
    """Have every worker say in the log where it hangs."""
    for each in recorded_processes(run_dir):
        if each["kind"] == "worker":
            with contextlib.suppress(ProcessLookupError):
                os.kill(each["pid"], signal.SIGUSR1)
    time.sleep(STACKS_SECONDS)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher, which ends all that it has started."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
