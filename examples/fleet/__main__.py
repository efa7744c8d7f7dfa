"""Simulate a year of a large TPU machine on paper: how much of it trains, by what a failure idles.

    python -m examples.fleet                               144 cubes of 4x4x4 chips
    python -m examples.fleet --restart 10min --lost 15min  slow restarts from checkpoints
    python -m examples.fleet --sensitivity                 halve and double each assumption
    python -m examples.fleet --json

One job trains on the whole machine, data-parallel. Hosts and cables fail at random and are repaired
days later. All strategies see the same failures:

- *drop the cube*: a cube with a failed host or copper cable is left out, and optical switches join
  the others, whatever their number, to a torus.
- *spare cubes*: the same on a machine with more cubes, of which the job uses at most the original
  number. All are paid for.
- *replicas*: groups of cubes hold a replica of the model each, and sum over the data-centre
  network. Where a cube fails, its replica alone stops; it takes another free cube, or waits. The
  other replicas lose a step.
- *ftmesh*: only the failed host's chips are left out. Cables are routed around.

Nothing of this has been measured on such a machine; docs/fleet.md has the sources.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, fields

from rich.console import Console
from rich.progress import Progress

from examples.fleet.simulation import VARIED, Fleet, Outcome, compare, vary
from ftmesh.command_line import MAX_SEED, Parser, number, whole_number
from ftmesh.units import parse_time


def describe(outcomes: dict[str, Outcome]) -> str:
    """Return the outcomes as a table, in per cent of the machine's time."""
    columns = "trained", "per_chip", "idle", "slower", "restarting", "thrown_away"
    heads = "trained", "per paid chip", "chips idle", "slower sums", "restarts", "thrown away"
    lines = [f"{'per cent of the time':<22}" + "".join(f"{head:>15}" for head in heads)]
    for name, outcome in outcomes.items():
        cells = "".join(f"{100 * getattr(outcome, column) + 0.0:>15.2f}" for column in columns)
        lines.append(f"{name:<22}{cells}")
    return "\n".join(lines)


def describe_sensitivity(table: dict[str, dict[str, Outcome]]) -> str:
    """Return goodput per paid chip for each changed assumption as a table."""
    names = list(next(iter(table.values())))
    lines = [f"{'per cent per paid chip':<26}" + "".join(f"{name:>15}" for name in names)]
    for label, outcomes in table.items():
        cells = "".join(f"{100 * outcomes[name].per_chip:>15.2f}" for name in names)
        lines.append(f"{label:<26}{cells}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, print the tables, and return the exit status."""
    parser = Parser(
        prog="python -m examples.fleet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Fleet()
    share = number(0, 1)
    count = whole_number(1, 10_000)
    add = parser.add_argument
    add("--cubes", type=count, default=default.cubes, metavar="N", help="cubes of 64 chips (144)")
    add("--host-failures", type=share, default=default.host_failures, metavar="SHARE",
        help="hosts that fail in a day (0.0008)")  # fmt: skip
    add("--cable-failures", type=share, default=default.cable_failures, metavar="SHARE",
        help="cables that fail in a day (0.00005)")  # fmt: skip
    add("--repair", type=number(0.01, 365), nargs=2, default=default.repair, metavar="DAYS",
        help="least and greatest days of a repair (3 14)")  # fmt: skip
    add("--restart", type=parse_time, default=default.restart, metavar="TIME",
        help="until all processes train again (2min)")  # fmt: skip
    add("--lost", type=parse_time, default=default.lost, metavar="TIME",
        help="training that a failure throws away (1min)")  # fmt: skip
    add("--sums", type=share, default=default.sums, metavar="SHARE",
        help="of a step, without damage (0.05)")  # fmt: skip
    add("--slowdown", type=number(1, 100), default=default.slowdown, metavar="FACTOR",
        help="of sums around holes (2)")  # fmt: skip
    add("--spares", type=count, default=default.spares, metavar="N", help="spare cubes (16)")
    add("--replica", type=count, default=default.replica, metavar="N",
        help="cubes of a replica (8)")  # fmt: skip
    add("--network", type=share, default=default.network, metavar="SHARE",
        help="of their speed that replicas keep (0.97)")  # fmt: skip
    add("--quorum", type=parse_time, default=default.quorum, metavar="TIME",
        help="that other replicas lose when one fails (10s)")  # fmt: skip
    add("--batch", type=parse_time, default=default.batch, metavar="TIME",
        help="for which ftmesh waits for more repairs (6h)")  # fmt: skip
    add("--days", type=number(1, 10_000), default=365.0, metavar="N", help="simulated (365)")
    add("--runs", type=whole_number(1, 1000), default=5, metavar="N", help="histories (5)")
    add("--seed", type=whole_number(0, MAX_SEED), default=0, metavar="N", help="random seed (0)")
    add("--sensitivity", action="store_true", help="halve and double each assumption too")
    add("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    values = {f.name: getattr(args, f.name) for f in fields(Fleet)}
    fleet = Fleet(**{**values, "repair": tuple(args.repair)})
    options = {"days": args.days, "runs": args.runs, "seed": args.seed}
    table = {"as assumed": compare(fleet, **options)}
    if args.sensitivity:
        with Progress(console=Console(stderr=True)) as progress:
            changes = [(name, factor) for name in VARIED for factor in (0.5, 2.0)]
            for name, factor in progress.track(changes, description="assumptions"):
                label = f"{name.replace('_', ' ')} x {factor:g}"
                table[label] = compare(vary(fleet, name, factor), **options)
    if args.json:
        shares = {
            label: {name: asdict(outcome) for name, outcome in row.items()}
            for label, row in table.items()
        }
        print(json.dumps(shares, indent=2))
        return 0
    print(describe(table["as assumed"]))
    if args.sensitivity:
        print()
        print(describe_sensitivity(table))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
