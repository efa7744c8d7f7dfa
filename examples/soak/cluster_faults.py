"""Faults of a cluster: which host fails how, and when.

    power@2:30        host 2 loses power when step 30 is done
    agent@0:start     the agent of host 0 is killed once workers are started
    cut@1:recovery    the link of host 1 is cut when the next loss is noticed

Join several with ``;``: each waits for the one before. A machine that lost power, its link or a
daemon has it back `REPAIR_SECONDS` later.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.soak.hosts import Hosts
from ftmesh.errors import ArgumentError
from ftmesh.testing.fault_injection import recorded_processes

KINDS = {
    "worker": "kill -9 of the worker",
    "hang": "SIGSTOP to the worker",
    "agent": "kill -9 of the agent",
    "freeze": "SIGSTOP to the agent",
    "store": "kill -9 of the peer store",
    "controller": "kill -9 of the controller, wherever it is",
    "leave": "SIGTERM to the agent",
    "blink": "the link is cut for 2 s",
    "outage": "the link is cut for 20 s",
    "cut": "the link is cut",
    "power": "power loss",
    "daemon": "kill -9 of the engine's daemon",
    "head": "kill -9 and restart of the engine's controller",
    "preempt": "SIGTERM to all agents, and a new start later",
    "requeue": "the engine ends the run and starts it again",
}
ANY_HOST = ("controller", "head", "preempt", "requeue")  # kinds without a host
HARMLESS = ("store", "blink", "daemon", "head")  # that a run may not notice
REPAIR_SECONDS = {"blink": 2.0, "outage": 20.0, "cut": 40.0, "power": 40.0, "daemon": 15.0}
EARLY, RECOVERY = ("start", "compile"), "recovery"
LATER = 0.4  # probability that another fault strikes during the recovery from the one before


@dataclass(frozen=True)
class ClusterFault:
    """A fault; its moment is ``start``, ``compile``, ``recovery`` or ``step``."""

    kind: str
    host: int
    moment: str
    step: int = 0

    def __str__(self) -> str:
        return f"{self.kind}@{self.host}:{self.step or self.moment}"

    @property
    def text(self) -> str:
        """What happens."""
        where = "" if self.kind in ANY_HOST else f", host {self.host}"
        return f"{KINDS[self.kind]}{where}"


def parse_cluster_faults(text: str, hosts: int = 4) -> list[ClusterFault]:
    """Read faults.

    >>> [str(fault) for fault in parse_cluster_faults("power@2:30; cut@1:recovery")]
    ['power@2:30', 'cut@1:recovery']
    """
    faults = []
    for word in filter(None, (part.strip() for part in text.split(";"))):
        kind, _, rest = word.partition("@")
        host, _, when = rest.partition(":")
        is_known = when in (*EARLY, RECOVERY) or when.isdecimal()
        if kind not in KINDS or not host.isdecimal() or int(host) >= hosts or not is_known:
            raise ArgumentError(
                f"{word} is not a fault of {hosts} hosts: give KIND@HOST:WHEN, with one of "
                f"{', '.join(KINDS)}, and start, compile, recovery or a step"
            )
        step = int(when) if when.isdecimal() else 0
        faults.append(ClusterFault(kind, int(host), "step" if step else when, step))
    return faults


def draw_cluster_faults(
    seed: int, kinds: Sequence[str], hosts: int, steps: int
) -> list[ClusterFault]:
    """Draw one to four faults."""
    rng = random.Random(seed)
    faults: list[ClusterFault] = []
    step = 1
    for _ in range(rng.choices((1, 2, 3, 4), (2, 3, 3, 2))[0]):
        kind, host = rng.choice(kinds), rng.randrange(hosts)
        step = rng.randrange(step, steps - 10) if step < steps - 20 else step
        if not faults and rng.random() < 0.25:
            faults.append(ClusterFault(kind, host, rng.choice(EARLY)))
        elif faults and faults[-1].kind not in HARMLESS and rng.random() < LATER:
            faults.append(ClusterFault(kind, host, RECOVERY))
        else:
            faults.append(ClusterFault(kind, host, "step", step))
    return faults


def perform(fault: ClusterFault, hosts: Hosts, run_dir: Path) -> bool:
    """Perform a fault of a host or its processes; False if it has no such process."""
    match fault.kind:
        case "blink" | "outage" | "cut":
            hosts.cut(fault.host)
            return True
        case "power":
            hosts.power_off(fault.host)
            return True
    recorded = recorded_processes(run_dir)
    signum = signal.SIGKILL
    match fault.kind:
        case "worker" | "hang":
            pids = [p["pid"] for p in recorded if (p["kind"], p["host"]) == ("worker", fault.host)]
            signum = signal.SIGSTOP if fault.kind == "hang" else signum
        case "store":
            pids = [p["pid"] for p in recorded if (p["kind"], p["host"]) == ("store", fault.host)]
        case "controller":
            every = [pid for host in range(hosts.number) for pid in hosts.running(host)]
            pids = [pid for pid in every if "--controller-only" in command_line(pid)]
        case "preempt":
            pids = [pid for host in range(hosts.number) for pid in agents(hosts, host)]
            signum = signal.SIGTERM
        case "agent" | "freeze" | "leave":
            pids = agents(hosts, fault.host)
            signum = {"freeze": signal.SIGSTOP, "leave": signal.SIGTERM}.get(fault.kind, signum)
        case _:
            raise ArgumentError(f"{fault.kind} is for the engine to perform")
    send(pids, signum)
    return bool(pids)


def agents(hosts: Hosts, host: int) -> list[int]:
    """Return the pids of the agents on a host."""
    commands = ((pid, command_line(pid)) for pid in hosts.running(host))
    return [
        pid
        for pid, words in commands
        if words[1:4] == ["-m", "ftmesh", "run"] and "--controller-only" not in words
    ]


def command_line(pid: int) -> list[str]:
    """Return the words of a process; none if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def send(pids: Iterable[int], signum: int) -> None:
    """Send a signal to processes that may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
