"""What a check of the self-test works with, and how it returns what it found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ftmesh.elastic.elastic_group import ElasticGroup
from ftmesh.selftest.journal import FAILED, LEFT_OUT, PASSED, CheckResult, Problem
from ftmesh.selftest.settings import Settings
from ftmesh.topology.topology import Topology

ONE_DEVICE = "one device has nothing to exchange"


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


def result_from(
    problems: Iterable[Problem], notes: Iterable[str] = (), data: Mapping[str, Any] | None = None
) -> CheckResult:
    """Return a result that passes if there are no problems."""
    found = tuple(problems)
    return CheckResult("", FAILED if found else PASSED, found, tuple(notes), data or {})


def left_out(reason: str) -> CheckResult:
    """Return the result of a check that cannot run here."""
    return CheckResult(status=LEFT_OUT, notes=(reason,))
