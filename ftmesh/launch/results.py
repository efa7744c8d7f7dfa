"""Run a command as an emulated pod on this machine, from its first process to its last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftmesh.launch.environment import Environment
from ftmesh.launch.pod import GRACE_SECONDS, Pod


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
