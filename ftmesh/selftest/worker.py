"""The worker of a self-test: joins the other processes, and runs the checks one after another.

All processes synchronize before each check, and exchange results after it. A worker that is left
alone ends itself, and so do the others: their parents start new ones, which exchange their journals
first, so that all go on with the same check.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import jax

from ftmesh.command_line import one_line, run_command
from ftmesh.distributed.consensus import agreed_topology
from ftmesh.elastic.elastic_group import ElasticGroup, initialize
from ftmesh.errors import ClusterError, FtmeshError, MissingExtraError
from ftmesh.optional_deps import missing_extra
from ftmesh.selftest.checks import Check, list_checks
from ftmesh.selftest.context import CheckContext, Settings, left_out
from ftmesh.selftest.journal import (
    FAILED,
    LEFT_OUT,
    NO_TIME,
    CheckResult,
    Journal,
    Problem,
    history,
    merge_histories,
    merge_results,
)
from ftmesh.selftest.supervise import AGAIN, MARGIN, PARTED
from ftmesh.testing import cpu_grid
from ftmesh.topology.damage import CoordFrame, failed_chips
from ftmesh.topology.notation import parse_wrap_axes
from ftmesh.topology.topology import Topology

NAME = "ftmesh selftest"
MIN_SECONDS = 3.0  # that must be left to begin a check
BUG_ADVICE = "this is a bug in ftmesh or JAX: report it, with worker.log and journal.jsonl"


def main() -> NoReturn:
    """Run with the settings that the parent passes on."""
    settings = Settings.from_json(sys.argv[1])
    status = run_command(NAME, lambda: run(settings))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # JAX's own cleanup may wait for a silent chip


def run(settings: Settings) -> int:
    """Run what is left of the checks; return the exit status."""
    journal = Journal(settings.journal)
    try:
        group = _join(settings)
    except FtmeshError as error:
        journal.append("stopped", reason=one_line(str(error)), status=error.status)
        raise
    journal.append("joined", process=group.process, num_processes=group.num_processes)
    with group:
        try:
            group.agree(settings.shared())
            topology = _topology(settings, group)
        except FtmeshError as error:
            journal.append("stopped", reason=one_line(str(error)), status=error.status)
            raise
        return _Run(settings, journal, group, topology).run()


def _join(settings: Settings) -> ElasticGroup:
    if settings.mesh is not None:
        return ElasticGroup()
    return initialize(
        settings.coordinator,
        settings.num_processes,
        settings.process_id,
        timeout=settings.join_timeout,
        name=NAME,
    )


def _topology(settings: Settings, group: ElasticGroup) -> Topology:
    damage: dict[str, Any] = {"failed": settings.failed, "failed_links": settings.failed_links}
    if settings.mesh is not None:
        sizes = CoordFrame.for_grid(settings.mesh).shape
        return cpu_grid(settings.mesh, wrap=parse_wrap_axes(settings.wrap, sizes), **damage)
    shape = Topology.from_devices(jax.devices(), failed="").shape
    wrap = parse_wrap_axes(settings.wrap, shape)
    return agreed_topology(group, Topology.from_devices(jax.devices(), wrap=wrap, **damage))


@dataclass
class _Run:
    """The checks of one worker."""

    settings: Settings
    journal: Journal
    group: ElasticGroup  # all processes, also those without a live chip
    topology: Topology

    def run(self) -> int:
        """Run the checks that have no result yet."""
        results = self._exchange_histories()
        context = self._context(results)
        try:
            checks = list_checks(context)
        except FtmeshError as error:
            self.journal.append("stopped", reason=one_line(str(error)), status=error.status)
            raise
        self.journal.append("checks", names=[check.name for check in checks])
        for check in checks:
            if check.name in results:
                continue
            result = self._run_together(check, context)
            results[check.name] = result
            self.journal.append("result", result=result.to_json())
            if result.data.get("needs_new_worker"):
                return AGAIN
            if result.data.get("quarantined"):
                context = self._context(results)
        self.journal.append("finished")
        return 0

    def _context(self, results: dict[str, CheckResult]) -> CheckContext:
        """The mesh without what was found to be wrong or silent, and its processes."""
        excluded = next(
            (r.data["quarantined"] for r in results.values() if "quarantined" in r.data), ""
        )
        topology = self.topology
        if excluded:
            frame = CoordFrame.for_grid(topology.shape)
            topology = topology.with_failed(failed_chips(excluded, frame))
            topology = topology.with_failed(c for part in topology.components()[1:] for c in part)
        group = self.group.for_topology(topology)
        return CheckContext(self.settings, group, self.topology, topology, results)

    def _exchange_histories(self) -> dict[str, CheckResult]:
        own = history(self.journal.read())
        results = merge_histories(self._meet("journals", own, self.settings.timeout))
        for name, result in results.items():
            if name not in own["result"]:
                self.journal.append("result", result=result.to_json())
        return results

    def _run_together(self, check: Check, context: CheckContext) -> CheckResult:
        left = self._meet(f"begin {check.name}", self.settings.seconds_left, self.settings.timeout)
        seconds = min(left.values()) - 2 * MARGIN * (self.group.num_processes > 1)
        if seconds < MIN_SECONDS:
            return CheckResult(check.name, LEFT_OUT, notes=(NO_TIME,))
        limit = min(check.limit_factor * self.settings.timeout, seconds)
        self.journal.append("begin", check=check.name, limit=limit)
        context = replace(context, deadline=time.monotonic() + limit)
        result = run_check(check, context)
        self.journal.append("done", result=result.to_json())
        wait = max(0.0, context.deadline - time.monotonic()) + MARGIN
        all_results = self._meet(f"end {check.name}", result.to_json(), wait)
        return merge_results({i: CheckResult.from_json(one) for i, one in all_results.items()})

    def _meet(self, name: str, value: Any, timeout: float) -> dict[int, Any]:
        """Exchange values with all processes; end this one and all others if some do not come."""
        try:
            return self.group.gather(value, name, timeout=timeout)
        except (ClusterError, jax.errors.JaxRuntimeError) as error:
            reason = one_line(str(error))
            self.journal.append("parted", text=reason)
            self.group.abort(reason, status=PARTED)


def run_check(check: Check, context: CheckContext) -> CheckResult:
    """Run a check in this process; an error is a problem, unless something is not installed."""
    start = time.monotonic()
    result = CheckResult(status=LEFT_OUT)  # by a process without live chips; others run it
    if context.group.is_member:
        try:
            with jax.default_device(context.group.default_device):
                result = check.run(context)
        except MissingExtraError as error:
            result = left_out(one_line(str(error)))
        except Exception as error:
            result = _from_error(check, error)
    seconds = round(time.monotonic() - start, 2)
    return replace(result, name=check.name, seconds=seconds)


def _from_error(check: Check, error: Exception) -> CheckResult:
    extra = missing_extra(error) if isinstance(error, ModuleNotFoundError) else None
    if extra is not None:
        return left_out(str(extra))
    traceback.print_exc()
    kind = "" if isinstance(error, FtmeshError) else f"{type(error).__name__}: "
    return CheckResult(
        status=FAILED, problems=(Problem(one_line(f"{kind}{error}"), check.advice or BUG_ADVICE),)
    )


if __name__ == "__main__":
    main()
