"""What became of each kind of fault, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from examples.soak.checks import Run
from ftmesh.testing.fault_spec import parse_faults

IN_PLACE, RESTARTED, RAN_ON, ENDED, SILENT = "in place", "restarted", "ran on", "ended", "silent"
HOW = (IN_PLACE, RESTARTED, RAN_ON, ENDED)
MILD = ("slow", "wrong", "full")  # kinds that a run may not even notice


@dataclass(frozen=True)
class Recovery:
    """What followed a fault: `how` the run went on, after how many seconds, steps done again.

    Where it was `hit_again`, another fault struck before the run went on.
    """

    kind: str
    moment: str
    how: str
    seconds: float | None = None
    repeated: int = 0
    hit_again: bool = False


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
            hit_again = any(fault["time"] < each["time"] < first["time"] for each in run.faults)
            found.append(Recovery(*what, how, seconds, first.get("repeated", 0), hit_again))
        else:
            found.append(Recovery(*what, ENDED if stopped and run.status != 0 else RAN_ON))
    struck = [(fault["kind"], fault["moment"]) for fault in run.faults]
    for planted in parse_faults(run.planted):
        if (planted.kind, planted.moment) in struck:
            struck.remove((planted.kind, planted.moment))
        else:
            found.append(Recovery(planted.kind, planted.moment, SILENT))
    return found


def table_of(found: Iterable[Recovery]) -> Table:
    """A line for each kind and moment, and lines for all of them."""
    table = Table(title="what followed each fault", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("fault", no_wrap=True)
    seconds = ("median s", "worst s", "worst, hit again")
    for name in ("struck", *HOW, *seconds, "steps again", "never struck"):
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    by_fault: dict[str, list[Recovery]] = {}
    for each in found:
        by_fault.setdefault(f"{each.kind} {each.moment}", []).append(each)
    for name, some in sorted(by_fault.items()):
        table.add_row(name, *_cells(some))
    everything = [each for some in by_fault.values() for each in some]
    for how in (IN_PLACE, RESTARTED):
        table.add_row(f"all {how}", *_cells([each for each in everything if each.how == how]))
    table.add_row("all", *_cells(everything))
    return table


def _cells(some: Sequence[Recovery]) -> list[str]:
    def count(how: str) -> str:
        return str(sum(each.how == how for each in some) or "")

    def worst(*, hit_again: bool) -> str:
        seconds = [each.seconds or 0.0 for each in some if each.hit_again == hit_again]
        return f"{max(seconds):.1f}" if any(seconds) else ""

    seconds = [each.seconds for each in some if each.seconds is not None]
    repeated = sorted({each.repeated for each in some if each.seconds is not None})
    return [
        str(sum(each.how != SILENT for each in some) or ""),
        *map(count, HOW),
        f"{median(seconds):.1f}" if seconds else "",
        worst(hit_again=False),
        worst(hit_again=True),
        "-".join(map(str, repeated[:1] + repeated[1:][-1:])),
        count(SILENT),
    ]
