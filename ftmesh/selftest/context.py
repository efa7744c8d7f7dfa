"""What a check of the self-test works with, and how it returns what it found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

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

    @contextlib.contextmanager
    def quick_compiler(self) -> Iterator[None]:
        """On CPU devices, compile with few optimizations: it is what is computed that counts."""
        if self.platform != "cpu":
            yield
            return
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
