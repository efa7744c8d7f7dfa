"""What became of each kind of fault, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from examples.soak.checks import Run
from ftmesh.testing.fault import parse

IN_PLACE, RESTARTED, RAN_ON, ENDED, SILENT = "in place", "restarted", "ran on", "ended", "silent"
HOW = (IN_PLACE, RESTARTED, RAN_ON, ENDED)
MILD = ("slow", "wrong", "full")  # kinds that a run may not even notice


@dataclass(frozen=True)
class Recovery:
    """What followed a fault: `how` the run went on, after how many seconds, steps done again."""

    kind: str
    moment: str
    how: str
    seconds: float | None = None
    repeated: int = 0


def recoveries(run: Run) -> list[Recovery]:
    """What followed each fault of a run, those included that never struck."""
    found = []
    for fault in run.faults:
        what = fault["kind"], fault["moment"]
        later = [event for event in run.events if event["time"] >= fault["time"]]
        stopped = fault["kind"] not in MILD or any(
            event["event"] == "masked"
            or (event["event"] == "failed" and event["host"] == fault["process"])
            for event in later
        )
        went_on = [event for event in later if event["event"] == "goes on"]
        if stopped and went_on:
            first = went_on[0]
            epoch = [event for event in run.of("epoch") if event["epoch"] == first["epoch"]]
            how = IN_PLACE if epoch and epoch[-1]["in_place"] else RESTARTED
            seconds = first["time"] - fault["time"]
            found.append(Recovery(*what, how, seconds, first.get("repeated", 0)))
        else:
            found.append(Recovery(*what, ENDED if stopped and run.status != 0 else RAN_ON))
    struck = [(fault["kind"], fault["moment"]) for fault in run.faults]
    for planted in parse(run.planted):
        if (planted.kind, planted.moment) in struck:
            struck.remove((planted.kind, planted.moment))
        else:
            found.append(Recovery(planted.kind, planted.moment, SILENT))
    return found


def table_of(found: Iterable[Recovery]) -> Table:
    """A line for each kind and moment, and one for all."""
    table = Table(title="what followed each fault", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("fault", no_wrap=True)
    for name in ("struck", *HOW, "median s", "worst s", "steps again", "never struck"):
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    by_fault: dict[str, list[Recovery]] = {}
    for each in found:
        by_fault.setdefault(f"{each.kind} {each.moment}", []).append(each)
    for name, some in sorted(by_fault.items()):
        table.add_row(name, *_cells(some))
    table.add_row("all", *_cells([each for some in by_fault.values() for each in some]))
    return table


def _cells(some: Sequence[Recovery]) -> list[str]:
    def count(how: str) -> str:
        return str(sum(each.how == how for each in some) or "")

    seconds = [each.seconds for each in some if each.seconds is not None]
    repeated = sorted({each.repeated for each in some if each.seconds is not None})
    return [
        str(sum(each.how != SILENT for each in some) or ""),
        *map(count, HOW),
        f"{median(seconds):.1f}" if seconds else "",
        f"{max(seconds):.1f}" if seconds else "",
        "-".join(map(str, repeated[:1] + repeated[1:][-1:])),
        count(SILENT),
    ]
