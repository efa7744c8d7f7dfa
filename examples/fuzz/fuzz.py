"""Fuzzer: careless and hostile inputs of every kind, each in its own process with limits.

    scripts/fuzz --minutes 10 --seed 1                 all kinds in turn, until the time is up
    scripts/fuzz --seed 1 --only images --case 17      repeat this case and show its stderr

No case may end in a traceback, exceed its limits in time and memory, leave a half-written file, or
accept wrong input. A table at the end counts the outcomes.
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
from examples.fuzz.running import CPU_SECONDS, MAX_BYTES, WALL_SECONDS, CaseResult, Work, run
from ftmesh.command_line import MAX_SEED, Parser, number, whole_number
from ftmesh.errors import NOT_FOUND, UNAVAILABLE, USAGE, VERIFICATION_FAILED
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
NAMES = {0: "success", USAGE: "usage", VERIFICATION_FAILED: "not verified", NOT_FOUND: "not found"}
NAMES[UNAVAILABLE] = "rejected"
MAX_PROBLEMS_SHOWN = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzz until the time is up, and print the table; return 1 if a case failed."""
    args = _parser().parse_args(argv)
    kinds = [args.only] if args.only else list(KINDS)
    fuzzer = Fuzzer(args.seed)
    deadline = time.monotonic() + 60 * args.minutes
    if args.case is not None:
        for kind in kinds:
            result = fuzzer.run_case(kind, args.case)
            print(f"{kind} {args.case}: status {result.status}, {result.problem or 'passed'}")
            print(result.stderr, end="")
    else:
        number = 0
        while time.monotonic() < deadline and (args.cases is None or number < args.cases):
            for kind in kinds:
                fuzzer.run_case(kind, number)
            number += 1
            fuzzer.show_progress(number)
    print(fuzzer.table())
    return 1 if fuzzer.problems else 0


class Fuzzer:
    """Runs the cases of one seed and counts their outcomes."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.problems: list[str] = []
        self.worst: dict[str, tuple[float, int]] = {}

    def run_case(self, kind: str, number: int) -> CaseResult:
        """Run a case; the same seed, kind and number give the same case."""
        rng = np.random.default_rng([self.seed, list(KINDS).index(kind), number])
        root = Path(tempfile.mkdtemp(prefix="ftmesh-fuzz-"))
        try:
            folder, outputs = root / "in", root / "out"
            folder.mkdir()
            outputs.mkdir()
            description, work = KINDS[kind](rng, folder)
            result = run(work, folder, outputs)
        finally:
            shutil.rmtree(root, ignore_errors=True)
        self.counts[kind][result.problem or NAMES[result.status]] += 1
        if result.problem:
            last = (result.stderr.splitlines() or [""])[-1]
            self.problems.append(
                f"{kind} {number}: {result.problem}: {description}\n    {last[:200]}"
            )
        seconds, max_bytes = self.worst.get(kind, (0.0, 0))
        self.worst[kind] = max(seconds, result.seconds), max(max_bytes, result.max_bytes)
        return result

    def show_progress(self, number: int) -> None:
        """Show on a terminal how many cases have run."""
        if sys.stderr.isatty():
            print(f"\r{number} of each, {len(self.problems)} failed ", end="", file=sys.stderr)

    def table(self) -> str:
        """Format a row for each kind, the problems, and the limits."""
        known = [*NAMES.values()]
        others = {name for counts in self.counts.values() for name in counts} - {*known}
        outcomes = [*known, *sorted(others)]
        lines = [
            f"{'seed ' + str(self.seed):<16}{'cases':>7}" + "".join(f"{e:>14}" for e in outcomes)
        ]
        lines[0] += f"{'longest':>10}{'most memory':>13}"
        for kind, counts in self.counts.items():
            seconds, max_bytes = self.worst[kind]
            cells = "".join(f"{counts[name]:>14}" for name in outcomes)
            lines.append(
                f"{kind:<16}{counts.total():>7}{cells}{seconds:>8.1f} s"
                f"{format_bytes(max_bytes):>13}"
            )
        lines += self.problems[:MAX_PROBLEMS_SHOWN]
        failures = f"{len(self.problems) or 'none'} failed"
        total = sum(counts.total() for counts in self.counts.values())
        limits = f"{CPU_SECONDS} s of one core, {WALL_SECONDS} s, {format_bytes(MAX_BYTES)}"
        lines.append(f"{total} cases, {failures}; limits of a case: {limits}")
        return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scripts/fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--minutes", type=number(0), default=10.0, metavar="M", help="how long to run (default: 10)"
    )
    parser.add_argument(
        "--seed",
        type=whole_number(0, MAX_SEED),
        default=0,
        metavar="S",
        help="random seed (default: 0)",
    )
    parser.add_argument("--only", choices=tuple(KINDS), help="only this kind of input")
    parser.add_argument(
        "--cases", type=whole_number(1), metavar="N", help="run at most N cases of each kind"
    )
    parser.add_argument(
        "--case", type=whole_number(0), metavar="N", help="run only case N, and show its stderr"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
