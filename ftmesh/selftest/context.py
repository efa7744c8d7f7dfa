"""What a self-test is asked to do, what its checks work with, and how they return what they found.

The parent, which imports no JAX, passes the settings on to its workers.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ftmesh.selftest.journal import FAILED, LEFT_OUT, PASSED, CheckResult, Problem
from ftmesh.topology.topology import Topology

if TYPE_CHECKING:
    from ftmesh.elastic.elastic_group import ElasticGroup

ONE_DEVICE = "one device has nothing to exchange"
TIMEOUT = 60.0  # seconds for a check, compilation included
LIMIT = 600.0  # for the whole test
JOIN_TIMEOUT = 300.0  # for all processes to start


@dataclass(frozen=True)
class Settings:
    """The arguments of a self-test.

    Attributes:
        journal: Path of the journal.
        deadline: When the whole test must be over, in seconds since 1970.
        mesh: The mesh to emulate on CPU devices; None tests the devices that JAX has.
        failed, failed_links, wrap: As on the command line.
        timeout: Seconds for a check.
        payloads: Bytes to time sums of; none for those that suit the devices.
        only: Check names to run, or beginnings of names; none for all.
        kernels: Whether Pallas kernels are run.
        coordinator, num_processes, process_id: The other processes; None lets JAX find them.
        join_timeout: Seconds for all of them to come.
    """

    journal: str
    deadline: float
    mesh: str | None = None
    failed: str | None = None
    failed_links: str = ""
    wrap: str | None = None
    timeout: float = TIMEOUT
    payloads: tuple[int, ...] = ()
    only: tuple[str, ...] = ()
    kernels: bool = True
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    join_timeout: float = JOIN_TIMEOUT

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.time()

    def shared(self) -> dict[str, object]:
        """Return what all processes must have been given alike, by option."""
        names = ("failed", "failed_links", "wrap", "timeout", "payloads", "only", "kernels")
        return {f"--{name.replace('_', '-')}": getattr(self, name) for name in names}

    def to_json(self) -> str:
        """Return the settings as an argument for a worker."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Settings:
        """Return the settings that `to_json` wrote."""
        values = json.loads(text)
        lists = {name: tuple(values[name]) for name in ("payloads", "only")}
        return Settings(**{**values, **lists})


@dataclass(frozen=True)
class CheckContext:
    """What a check works with.

    Attributes:
        settings: The arguments.
        group: The processes with live chips in `topology`, and this one among them.
        whole: The mesh as it was given.
        topology: The mesh without the chips that were found to be wrong or silent.
        results: Of the checks before.
        deadline: When the check is killed, by `time.monotonic`.
    """

    settings: Settings
    group: ElasticGroup
    whole: Topology
    topology: Topology
    results: Mapping[str, CheckResult]
    deadline: float = float("inf")

    @property
    def platform(self) -> str:
        """The platform of the devices, as JAX names it."""
        return str(self.topology.devices[0].platform)

    @contextlib.contextmanager
    def quick_compiler(self) -> Iterator[None]:
        """On CPU devices, compile with few optimizations: it is what is computed that counts."""
        if self.platform != "cpu":
            yield
            return
        import jax

        jax.config.update("jax_disable_most_optimizations", True)
        try:
            yield
        finally:
            jax.config.update("jax_disable_most_optimizations", False)


def result_from(
    problems: Iterable[Problem], notes: Iterable[str] = (), data: Mapping[str, Any] | None = None
) -> CheckResult:
    """Return a result that passes if there are no problems."""
    known = tuple(problems)
    return CheckResult("", FAILED if known else PASSED, known, tuple(notes), data or {})


def left_out(reason: str) -> CheckResult:
    """Return the result of a check that cannot run here."""
    return CheckResult(status=LEFT_OUT, notes=(reason,))
