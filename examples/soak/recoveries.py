"""How a run recovered from each fault, and a table of that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from examples.common.report import metrics_lines
from examples.soak.checks import Run
from examples.soak.cluster_faults import HARMLESS, KINDS, parse_cluster_faults
from ftmesh.testing.fault_spec import parse_faults

IN_PLACE, RESTARTED, STARTED_AGAIN = "in place", "restarted", "started again"
RAN_ON, ENDED, SILENT = "ran on", "ended", "silent"
HOW = (IN_PLACE, RESTARTED, STARTED_AGAIN, RAN_ON, ENDED)
MILD = ("slow", "wrong", "full", *HARMLESS)  # kinds that may not interrupt a run


@dataclass(frozen=True)
class Recovery:
    """How a run continued after a fault."""

    kind: str
    moment: str
    how: str
    seconds: float | None = None
    repeated: int = 0  # steps
    hit_again: bool = False  # another fault struck before the run continued


def find_recoveries(run: Run) -> list[Recovery]:
    """Return the recovery from each fault of a run, also of those that never struck."""
    recoveries = []
    for fault in run.faults:
        what = fault["kind"], fault["moment"]
        later = [event for event in run.events if event["time"] >= fault["time"]]
        stopped = fault["kind"] not in MILD or any(
            event["event"] == "masked"
            or (event["event"] == "failed" and event["host"] == fault["process"])
            for event in later
        )
        went_on = [event for event in later if event["event"] == "goes on"]
        again = next((start for start in run.starts if start > fault["time"]), None)
        if stopped and again and not (went_on and went_on[0]["time"] < again):
            # All hosts were started again by the engine, at once or after other failures.
            steps = [s["time"] for s in metrics_lines(run.folder / "out" / "metrics.jsonl")]
            first = min((at for at in steps if at > again), default=again)
            recoveries.append(Recovery(*what, STARTED_AGAIN, first - fault["time"]))
        elif stopped and went_on:
            first = went_on[0]
            epoch = [event for event in run.named("epoch") if event["epoch"] == first["epoch"]]
            how = IN_PLACE if epoch and epoch[-1]["in_place"] else RESTARTED
            seconds = first["time"] - fault["time"]
            hit_again = any(fault["time"] < other["time"] < first["time"] for other in run.faults)
            recoveries.append(Recovery(*what, how, seconds, first.get("repeated", 0), hit_again))
        else:
            recoveries.append(Recovery(*what, ENDED if stopped and run.status != 0 else RAN_ON))
    struck = [(fault["kind"], fault["moment"]) for fault in run.faults]
    for planted in _planted(run.planted):
        if planted in struck:
            struck.remove(planted)
        else:
            recoveries.append(Recovery(*planted, SILENT))
    return recoveries


def _planted(text: str) -> list[tuple[str, str]]:
    """Return the kind and the moment of each fault that was planted."""
    if text.partition("@")[0] in KINDS:
        return [(fault.kind, fault.moment) for fault in parse_cluster_faults(text)]
    return [(fault.kind, fault.moment) for fault in parse_faults(text)]


def recovery_table(recoveries: Iterable[Recovery]) -> Table:
    """Return a table with a row per kind and moment of faults, and rows for all of them."""
    table = Table(title="what followed each fault", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("fault", no_wrap=True)
    seconds = ("median s", "worst s", "worst, hit again")
    for name in ("struck", *HOW, *seconds, "steps again", "never struck"):
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    by_fault: dict[str, list[Recovery]] = {}
    for recovery in recoveries:
        by_fault.setdefault(f"{recovery.kind} {recovery.moment}".strip(), []).append(recovery)
    for name, group in sorted(by_fault.items()):
        table.add_row(name, *_cells(group))
    everything = [recovery for group in by_fault.values() for recovery in group]
    for how in (IN_PLACE, RESTARTED, STARTED_AGAIN):
        table.add_row(f"all {how}", *_cells([x for x in everything if x.how == how]))
    table.add_row("all", *_cells(everything))
    return table


def _cells(recoveries: Sequence[Recovery]) -> list[str]:
    def count(how: str) -> str:
        return str(sum(x.how == how for x in recoveries) or "")

    def worst(*, hit_again: bool) -> str:
        seconds = [x.seconds or 0.0 for x in recoveries if x.hit_again == hit_again]
        return f"{max(seconds):.1f}" if any(seconds) else ""

    seconds = [x.seconds for x in recoveries if x.seconds is not None]
    repeated = sorted({x.repeated for x in recoveries if x.seconds is not None})
    return [
        str(sum(x.how != SILENT for x in recoveries) or ""),
        *map(count, HOW),
        f"{median(seconds):.1f}" if seconds else "",
        worst(hit_again=False),
        worst(hit_again=True),
        "-".join(map(str, repeated[:1] + repeated[1:][-1:])),
        count(SILENT),
    ]
