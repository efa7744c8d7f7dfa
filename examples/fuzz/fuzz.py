"""Fuzz: careless and hostile inputs of every kind, each in a process of its own, under limits.

    scripts/fuzz --minutes 10 --seed 1                 all kinds in turn, until the time is over
    scripts/fuzz --seed 1 --only images --case 17      this case again, with what it said

No case may end in a traceback, go past its limits in time and memory, leave anything half-written,
or be accepted where it is wrong. A table at the end counts how they ended.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from examples.fuzz import commands, files
from examples.fuzz.commands import Rng
from examples.fuzz.running import CPU_SECONDS, MAX_BYTES, WALL_SECONDS, Ended, Work, run
from ftmesh.command_line import MOST_SEED, Parser, number, whole_number
from ftmesh.errors import NOT_FOUND, PROVED_WRONG, REFUSED, USAGE
from ftmesh.units import format_bytes

Maker = Callable[[Rng, Path], tuple[str, Work]]

KINDS: dict[str, Maker] = {
    "command lines": commands.command_line,
    "environment": commands.environment,
    "schedules": files.schedule,
    "records": files.records,
    "images": files.image,
    "checkpoints": files.checkpoint,
    "text": files.text,
    "computed": commands.computed,
}
NAMES = {0: "done", USAGE: "usage", PROVED_WRONG: "proved wrong", NOT_FOUND: "not found"}
NAMES[REFUSED] = "refused"
SHOWN = 20  # problems


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzz until the time is over, and print the table; 1 if anything went wrong."""
    args = _parser().parse_args(argv)
    kinds = [args.only] if args.only else list(KINDS)
    fuzzer = Fuzzer(args.seed)
    until = time.monotonic() + 60 * args.minutes
    if args.case is not None:
        for kind in kinds:
            ended = fuzzer.one(kind, args.case)
            print(f"{kind} {args.case}: status {ended.status}, {ended.problem or 'well'}")
            print(ended.stderr, end="")
    else:
        number = 0
        while time.monotonic() < until and (args.cases is None or number < args.cases):
            for kind in kinds:
                fuzzer.one(kind, number)
            number += 1
            fuzzer.show(number)
    print(fuzzer.table())
    return 1 if fuzzer.problems else 0


class Fuzzer:
    """What has been tried with one seed, and how it ended."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.problems: list[str] = []
        self.worst: dict[str, tuple[float, int]] = {}

    def one(self, kind: str, number: int) -> Ended:
        """Try one case, which is the same each time."""
        rng = np.random.default_rng([self.seed, list(KINDS).index(kind), number])
        place = Path(tempfile.mkdtemp(prefix="ftmesh-fuzz-"))
        try:
            folder, outputs = place / "in", place / "out"
            folder.mkdir()
            outputs.mkdir()
            what, work = KINDS[kind](rng, folder)
            ended = run(work, folder, outputs)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        self.counts[kind][ended.problem or NAMES[ended.status]] += 1
        if ended.problem:
            last = (ended.stderr.splitlines() or [""])[-1]
            self.problems.append(f"{kind} {number}: {ended.problem}: {what}\n    {last[:200]}")
        seconds, most = self.worst.get(kind, (0.0, 0))
        self.worst[kind] = max(seconds, ended.seconds), max(most, ended.max_bytes)
        return ended

    def show(self, number: int) -> None:
        """How far it is, on a terminal."""
        if sys.stderr.isatty():
            print(f"\r{number} of each, {len(self.problems)} wrong ", end="", file=sys.stderr)

    def table(self) -> str:
        """A row for each kind, the problems, and what the limits were."""
        known = [*NAMES.values()]
        others = sorted({end for counts in self.counts.values() for end in counts} - {*known})
        ends = [*known, *others]
        lines = [f"{'seed ' + str(self.seed):<16}{'cases':>7}" + "".join(f"{e:>14}" for e in ends)]
        lines[0] += f"{'longest':>10}{'most memory':>13}"
        for kind, counts in self.counts.items():
            seconds, most = self.worst[kind]
            cells = "".join(f"{counts[end]:>14}" for end in ends)
            lines.append(
                f"{kind:<16}{counts.total():>7}{cells}{seconds:>8.1f} s{format_bytes(most):>13}"
            )
        lines += self.problems[:SHOWN]
        wrong = f"{len(self.problems)} went wrong" if self.problems else "none went wrong"
        total = sum(counts.total() for counts in self.counts.values())
        limits = f"{CPU_SECONDS} s of one core, {WALL_SECONDS} s, {format_bytes(MAX_BYTES)}"
        lines.append(f"{total} cases, {wrong}; limits of a case: {limits}")
        return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scripts/fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=number(0), default=10.0, metavar="M", help="(10)")
    parser.add_argument(
        "--seed", type=whole_number(0, MOST_SEED), default=0, metavar="S", help="(0)"
    )
    parser.add_argument("--only", choices=tuple(KINDS), help="one kind of input")
    parser.add_argument(
        "--cases", type=whole_number(1), metavar="N", help="of each kind, at most (no limit)"
    )
    parser.add_argument(
        "--case", type=whole_number(0), metavar="N", help="this one alone, with what it said"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
