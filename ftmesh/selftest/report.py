"""The files of a self-test: ``report.md`` for people, ``profile.json`` for programs, and a plot."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ftmesh.cost.profile import Profile
from ftmesh.cost.profile_fit import HopTimes, SumLoad, TimedSum
from ftmesh.draw import plots
from ftmesh.errors import ArgumentError, MissingExtraError
from ftmesh.execute.lowering import PALLAS, PPERMUTE, XLA
from ftmesh.files import write_text
from ftmesh.planning.profiles import install_profile
from ftmesh.selftest.journal import LEFT_OUT, PASSED, STATUSES, CheckResult
from ftmesh.topology.notation import format_failed
from ftmesh.units import format_bytes, format_rate, format_time

REPORT, PROFILE, JOURNAL, LOG, PLOT = (
    "report.md",
    "profile.json",
    "journal.jsonl",
    "worker.log",
    "speed.svg",
)


@dataclass(frozen=True)
class SelfTestReport:
    """What came of a self-test.

    Attributes:
        results: One for each check, in order.
        reason: Why the test ended early; empty if it did not.
        seconds: How long it took.
        version: Of ftmesh.
        measured_at: When it began, as ISO 8601 in UTC.
    """

    results: tuple[CheckResult, ...]
    reason: str
    seconds: float
    version: str
    measured_at: str

    @property
    def is_healthy(self) -> bool:
        """True if nothing is wrong and the test came to its end."""
        return not self.reason and not any(result.is_bad for result in self.results)

    def data(self, name: str) -> Mapping[str, Any]:
        """The data of a check; empty if it has none."""
        return next((result.data for result in self.results if result.name == name), {})

    def is_bad(self, name: str) -> bool:
        """True if a check found something wrong."""
        return any(result.is_bad for result in self.results if result.name == name)

    @property
    def timings(self) -> list[dict[str, Any]]:
        """The times of all sums, those of `lax.psum` once."""
        first = list(self.data("speed").get("timings", ()))
        names = {(one["contender"], one["payload_bytes"]) for one in first}
        kernels = self.data("speed of kernels").get("timings", ())
        others = [one for one in kernels if (one["contender"], one["payload_bytes"]) not in names]
        return first + others

    @property
    def verdict(self) -> str:
        """One line: all right, or how many problems there are."""
        problems = sum(len(result.problems) for result in self.results)
        if self.is_healthy:
            return "all right"
        text = f"{problems} problem{'s' * (problems != 1)}"
        return f"{text}; it did not come to its end" if self.reason else text

    @property
    def counts(self) -> str:
        """How many checks passed, failed, hung, died and were left out."""
        counts = Counter(result.status for result in self.results)
        return ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])

    def to_json(self) -> dict[str, Any]:
        """Return the report as values for `json.dumps`."""
        return {
            "healthy": self.is_healthy,
            "verdict": self.verdict,
            "reason": self.reason,
            "seconds": round(self.seconds, 1),
            "ftmesh_version": self.version,
            "measured_at": self.measured_at,
            "checks": [result.to_json() for result in self.results],
        }

    def summary(self) -> str:
        """The verdict and each problem with what to do, for a terminal."""
        lines = [f"self-test: {self.verdict} ({self.counts}; {format_time(self.seconds)})"]
        lines += [f"it ended early: {self.reason}"] if self.reason else []
        for result in self.results:
            for problem in result.problems:
                lines.append(f"{result.name}: {result.status}: {problem.text}")
                lines += [f"    {problem.advice}"] if problem.advice else []
        return "\n".join(lines)


def now() -> str:
    """The time in UTC, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_report(report: SelfTestReport, folder: Path) -> list[str]:
    """Write the files of a report; return their names."""
    names = [REPORT]
    if report.timings:
        with contextlib.suppress(MissingExtraError):
            _plot(report, folder / PLOT)
            names.append(PLOT)
    about_profile = _save_profile(report, folder / PROFILE)
    if (folder / PROFILE).exists():
        names.append(PROFILE)
    write_text(folder / REPORT, "\n".join(_lines(report, names, about_profile)) + "\n")
    return names


# report.md --------------------------------------------------------------------------------------


def _lines(
    report: SelfTestReport, names: Sequence[str], about_profile: Sequence[str]
) -> Iterator[str]:
    topology = report.data("topology")
    yield f"# Self-test of ftmesh: {report.verdict}"
    yield ""
    if topology:
        yield f"{topology['devices']}, mesh {topology['mesh']}, JAX {topology['jax_version']}."
    counts = report.counts or "no checks"
    yield f"{counts} in {format_time(report.seconds)}, on {report.measured_at}."
    if topology.get("platform") == "cpu":
        yield "CPU devices: this says what the programs do, and nothing of a TPU's network."
    if report.reason:
        yield ""
        yield f"**The test ended early: {report.reason}.**"
    yield from _problem_lines(report)
    yield from _check_lines(report)
    yield from _topology_lines(topology, report.version)
    yield from _hop_lines(report.data("hops"))
    yield from _speed_lines(report.timings, PLOT in names)
    yield ""
    yield "## Files"
    yield ""
    yield from (f"- {line}" for line in about_profile)
    yield f"- `{JOURNAL}`: every event, as JSON lines; `{LOG}`: what the workers printed."


def _problem_lines(report: SelfTestReport) -> Iterator[str]:
    bad = [(result, problem) for result in report.results for problem in result.problems]
    if not bad:
        return
    yield ""
    yield "## Problems"
    yield ""
    for number, (result, problem) in enumerate(bad, 1):
        yield f"{number}. **{result.name}** ({result.status}): {problem.text}."
        if problem.advice:
            yield f"   What to do: {problem.advice}."
    for result in report.results:
        if result.is_bad and result.notes:
            yield ""
            yield from (f"{result.name}: {note}." for note in result.notes)


def _check_lines(report: SelfTestReport) -> Iterator[str]:
    yield ""
    yield "## Checks"
    yield ""
    rows = [
        (result.name, result.status, f"{result.seconds:.1f} s", "; ".join(result.notes))
        for result in report.results
        if result.status != LEFT_OUT
    ]
    yield from _table(("check", "result", "took", "notes"), rows)
    missing = [result for result in report.results if result.status == LEFT_OUT]
    if missing:
        yield ""
        yield "Left out:"
        yield ""
        yield from (f"- {result.name}: {'; '.join(result.notes)}" for result in missing)


def _topology_lines(topology: Mapping[str, Any], version: str) -> Iterator[str]:
    if not topology:
        return
    axes = "".join("xyz"[i] for i, wraps in enumerate(topology["wrap"]) if wraps)
    hosts = topology["devices_by_process"]
    rows = [
        ("devices", f"{topology['devices']} ({topology['platform']})"),
        ("shape", "x".join(map(str, topology["shape"]))),
        ("devices per chip", topology["devices_per_chip"]),
        ("axes that wrap", f"{axes or 'none'}; {topology['wrap_source']}"),
        (
            "processes",
            f"{topology['num_processes']}; live devices: {', '.join(map(str, hosts.values()))}",
        ),
        ("failed chips", format_failed(map(tuple, topology["failed"])) or "none"),
        ("failed links", topology["failed_links"] or "none"),
        ("ftmesh", version),
        ("JAX, jaxlib", f"{topology['jax_version']}, {topology['jaxlib_version']}"),
        ("libtpu", topology["libtpu_version"] or "not installed"),
        ("driver", topology["platform_version"]),
        ("Python", topology["python_version"]),
    ]
    yield from ("", "## Topology", "")
    yield from _table(("what", "is"), rows)


def _hop_lines(hops: Mapping[str, Any]) -> Iterator[str]:
    if not hops:
        return
    small, large = format_bytes(hops["small_bytes"]), format_bytes(hops["large_bytes"])
    yield from ("", "## Hops", "")
    if hops["latency_s"]:
        yield f"Each hop adds {format_time(hops['latency_s'])} (measured)."
    if hops["bytes_per_second"]:
        yield f"A link carries {format_rate(hops['bytes_per_second'])} (measured)."
    yield from ("Times of one permutation, measured (median):", "")
    rows = [
        (row["name"], row["pairs"], format_time(row["small_s"]), format_time(row["large_s"]))
        for row in hops["hops"]
    ]
    yield from _table(("messages", "pairs at once", small, large), rows)


def _speed_lines(timings: Sequence[Mapping[str, Any]], has_plot: bool) -> Iterator[str]:
    if not timings:
        return
    payloads = sorted({timing["payload_bytes"] for timing in timings})
    names = list(dict.fromkeys(timing["contender"] for timing in timings))
    median = {(t["contender"], t["payload_bytes"]): t["median_s"] for t in timings}
    yield from (
        "",
        "## Speed",
        "",
        "Time of a sum, measured (median), by bytes on each device:",
        "",
    )
    rows = [
        (
            name,
            *(
                format_time(median[name, size]) if (name, size) in median else ""
                for size in payloads
            ),
        )
        for name in names
    ]
    yield from _table(("sum", *map(format_bytes, payloads)), rows)
    if has_plot:
        yield from ("", f"![Time of a sum by payload]({PLOT})")


def _table(head: Sequence[Any], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    for i, row in enumerate((head, *rows)):
        yield f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |"
        if i == 0:
            yield f"|{'---|' * len(head)}"


# profile.json and the plot ----------------------------------------------------------------------


def make_profile(report: SelfTestReport) -> Profile:
    """Return what planning may rely on.

    Raises:
        ArgumentError: There is none, for the reason given.
    """
    topology, speed = report.data("topology"), report.data("speed")
    timed = [*speed.get("sums", ()), *report.data("speed of kernels").get("sums", ())]
    if not topology or not timed:
        raise ArgumentError("no sums were timed")
    if wrong := [one.name for one in report.results if _is_timed(one.name) and one.is_bad]:
        raise ArgumentError(f"it would vouch for what is not right: {', '.join(wrong)}")
    sums = [TimedSum(**{**one, "load": SumLoad(**one["load"])}) for one in timed]
    return Profile(
        device_kind=topology["device_kind"],
        platform=topology["platform"],
        shape=tuple(topology["shape"]),
        wrap=tuple(topology["wrap"]),
        devices_per_chip=topology["devices_per_chip"],
        num_devices=topology["num_devices"],
        num_processes=topology["num_processes"],
        ftmesh_version=report.version,
        jax_version=topology["jax_version"],
        measured_at=report.measured_at,
        hop_times=HopTimes(**speed["hop_times"]) if speed["hop_times"] else None,
        sums=tuple(sums),
        kernel_passed=tuple(
            result.data["algorithm"]
            for result in report.results
            if result.status == PASSED
            and result.data.get("executor") == PALLAS
            and not result.data["is_interpreted"]
        ),
    )


def _save_profile(report: SelfTestReport, path: Path) -> tuple[str, ...]:
    """Write the profile, if there is one, and keep it for plans; return lines for the report.

    One process plans with what is kept for such devices. Several are given a profile by name, since
    each host has a cache of its own.
    """
    try:
        profile = make_profile(report)
        profile.save(path)
    except ArgumentError as error:
        return (f"No `{path.name}`: {error}.",)
    lines = [f"`{path.name}`: what was timed and found right here; {profile.fit_error()}."]
    unsure = [name for name in ("chips and links", "hops") if report.is_bad(name)]
    if unsure:
        lines.append(f"It is not kept for plans: {' and '.join(unsure)} found problems.")
    elif profile.platform == "cpu" or profile.num_processes > 1:
        lines.append(f'Plans use it if it is given: `link="{path}"` or `FTMESH_PROFILE={path}`.')
    else:
        try:
            lines.append(f"Plans for these devices use it, as {install_profile(profile)}.")
        except ArgumentError as error:
            lines.append(f"It is not kept for plans: {error}.")
    return tuple(lines)


def _is_timed(name: str) -> bool:
    """Whether a check speaks for something that a profile has times of."""
    return name in ("topology", "ring order", "speed") or name.startswith(
        (f"right: {XLA} ", f"right: {PPERMUTE} ")
    )


def _plot(report: SelfTestReport, path: Path) -> None:
    topology = report.data("topology")
    figure = plots.measured_times(
        report.timings,
        f"All-reduce on {topology.get('mesh', '')}",
        f"{topology.get('devices', '')}; measured",
    )
    plots.save(figure, path)
