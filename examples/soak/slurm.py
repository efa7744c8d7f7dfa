"""A real Slurm over hosts of one machine: slurmctld on the hub, a slurmd on each host.

It needs root, and Debian's packages slurm-wlm and munge.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from examples.soak.cluster_faults import KINDS, command_line, send
from examples.soak.hosts import HUB, Hosts

RECIPE = Path(__file__).parent.parent / "cluster" / "slurm" / "train.sbatch"
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE")
CONFIG = """\
ClusterName=ftmesh
SlurmctldHost=hub(10.66.0.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=20
MinJobAge=3600
{nodes}
PartitionName=all Nodes=h[0-{last}] Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """Slurm's daemons over hosts, inside a ``with`` block. It can start one run at a time."""

    kinds: tuple[str, ...] = tuple(KINDS)
    daemons: tuple[str, ...] = ("slurmd", "slurmstepd", "slurmctld")

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder.resolve()
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._job = ""
        self._statuses = Path()  # a folder

    def __enter__(self) -> Self:
        (self.folder / "state").mkdir(parents=True)
        nodes = (
            f"NodeName=h{host} NodeAddr={self.hosts.address(host)} CPUs=2 State=UNKNOWN"
            for host in range(self.hosts.number)
        )
        values = {"folder": self.folder, "last": self.hosts.number - 1, "nodes": "\n".join(nodes)}
        (self.folder / "slurm.conf").write_text(CONFIG.format(**values))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        try:
            _start_munge()
            self.start_controller()
            for host in range(self.hosts.number):
                self.start_node(host)
            self.wait_for_nodes()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for host in (HUB, *range(self.hosts.number)):
            self.hosts.kill_all(host)
        for daemon in self._daemons:
            daemon.wait()

    @staticmethod
    def missing_programs() -> list[str]:
        """Return which programs of Slurm are not installed."""
        return [name for name in PROGRAMS if shutil.which(name) is None]

    def start(self, run_dir: Path, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a run by the recipe of `examples/cluster/slurm`."""
        self._statuses, env = run_dir / "status", {**env, "RUN_DIR": str(run_dir)}
        self._job = self.submit(RECIPE, command, log=run_dir.parent / "log", env=env)

    def poll(self) -> int | None:
        """Return the exit status of the run, None while it goes on."""
        time.sleep(0.2)
        facts = self.job_facts(self._job)
        if facts["JobState"] == "PENDING" and facts["Restarts"] != "0":
            self.hurry(self._job)
        if facts["JobState"] not in ENDED:
            return None
        statuses = [int(file.read_text() or 255) for file in self._statuses.glob("*")]
        status = min(statuses, default=255)
        if status == 128 + signal.SIGTERM:  # all nodes were shut down: as an operator would
            self.ask("scontrol", "requeue", self._job)
            return None
        return status

    def end(self) -> None:
        """End the job."""
        self.ask("scancel", self._job, check=False)

    def perform(self, kind: str, host: int) -> None:
        """Kill a daemon, or requeue the job."""
        if kind == "requeue":
            self.ask("scontrol", "requeue", self._job, check=False)
            return
        where, name = (HUB, "slurmctld") if kind == "head" else (host, "slurmd")
        send((p for p in self.hosts.running(where) if name in command_line(p)[:1]), signal.SIGKILL)
        if kind == "head":
            self.start_controller()

    def repair(self, host: int) -> None:
        """Start the slurmd of a host."""
        self.start_node(host)

    def wait_until_ready(self) -> None:
        """Wait until all nodes are idle."""
        self.wait_for_nodes(150.0)

    def start_controller(self) -> None:
        """Start slurmctld."""
        self._start(HUB, "slurmctld", "-D")

    def start_node(self, host: int) -> None:
        """Start the slurmd of a host."""
        self._start(host, "slurmd", "-D")

    def submit(
        self, script: Path, command: Sequence[str], *, log: Path, env: Mapping[str, str]
    ) -> str:
        """Submit a job that runs a script on all hosts; return its id."""
        words = ["sbatch", "--parsable", f"--nodes={self.hosts.number}", f"--output={log}"]
        return self.ask(*words, str(script), *command, env=env).strip()

    def job_facts(self, job: str) -> dict[str, str]:
        """Return what Slurm says of a job, such as its JobState."""
        while not (words := self.ask("scontrol", "--oneliner", "show", "job", job, check=False)):
            time.sleep(0.5)  # slurmctld is being started again
        return dict(word.split("=", 1) for word in words.split() if "=" in word)

    def hurry(self, job: str) -> None:
        """Start a requeued job at once: Slurm waits for two minutes."""
        self.ask("scontrol", "update", f"jobid={job}", "StartTime=now", check=False)

    def wait_for_nodes(self, timeout: float = 60.0) -> None:
        """Wait until all nodes are idle."""
        until = time.monotonic() + timeout
        while (states := self.ask("sinfo", "-h", "-N", "-o", "%t", check=False).split()) != [
            "idle"
        ] * self.hosts.number:
            if time.monotonic() > until:
                raise TimeoutError(f"nodes of Slurm are {states}: see {self.folder}")
            time.sleep(0.5)

    def ask(self, *command: str, env: Mapping[str, str] | None = None, check: bool = True) -> str:
        """Run a command of Slurm on the hub; return its output."""
        done = subprocess.run(
            self.hosts.command(HUB, *command),
            env={**os.environ, **(env or {}), "SLURM_CONF": str(self.folder / "slurm.conf")},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command[:3])} ...: {done.stderr.strip()}")
        return done.stdout

    def _start(self, host: int | str, *command: str) -> None:
        env = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        with open(self.folder / "daemons.log", "ab") as log:
            words = self.hosts.command(host, *command)
            daemon = subprocess.Popen(words, env=env, stdout=log, stderr=log)
        self._daemons.append(daemon)


def _start_munge() -> None:
    """Start munged, which signs the messages of Slurm, unless it runs."""
    if subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode == 0:
        return
    run = Path("/run/munge")
    run.mkdir(exist_ok=True)
    shutil.chown(run, "munge", "munge")
    start = ["runuser", "-u", "munge", "--", "munged", "--syslog"]
    subprocess.run(start, check=True, capture_output=True)
