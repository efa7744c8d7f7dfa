"""Train on emulated pods while things fail, and check every run; see scripts/soak."""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from examples.common.arguments import positive, seconds
from examples.soak.checks import Run, check
from examples.soak.running import HOST_SHAPES, PHASE_LIMIT, Pod, step_seconds
from examples.soak.table import Recovery, recoveries, table_of
from examples.soak.train import PRESETS
from ftmesh.command_line import MAX_SEED, Parser, say, whole_number
from ftmesh.errors import ArgumentError, FtmeshError
from ftmesh.testing.fault_spec import draw_faults, draw_timed_faults, parse_faults

BATCH, STEPS = PRESETS["tiny"].batch, PRESETS["tiny"].steps
MINUTES = 5.0
LIMIT = 600.0  # seconds a run may take; an undisturbed one takes a tenth of that


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for, print a table; the exit status."""
    args = _parser().parse_args(argv)
    folder = Path(args.out or tempfile.mkdtemp(prefix="ftmesh-soak-")).resolve()
    console = Console()
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ArgumentError(f"{folder} is not empty: give another folder")
        soak = Soak(args, folder, console)
        try:
            soak.one_long_run() if args.every else soak.many_runs()
        except KeyboardInterrupt:
            soak.told()
            return 130
        return soak.told()
    except FtmeshError as error:
        say(f"soak: {error}")
        return 2


class Soak:
    """Runs one after another, what was found wrong with them, and what followed their faults."""

    def __init__(self, args: argparse.Namespace, folder: Path, console: Console) -> None:
        self.args, self.folder, self.console = args, folder, console
        self.given = parse_faults(args.faults or "", hosts=args.hosts, steps=args.steps - 1)
        self.how = ("--restart",) if args.restart else ()
        self.wrong: list[str] = []
        self.recoveries: list[Recovery] = []
        self.goodputs: list[float] = []
        self.num_runs = 0

    def many_runs(self) -> None:
        """Runs with faults of their own each, until the time is over."""
        args = self.args
        pod = self._pod(args.steps, failures=10)
        reference = self._undisturbed(pod)
        if reference is None:
            return
        minutes = args.minutes or (float("inf") if args.runs else MINUTES)
        begun, limit = time.monotonic(), 60 * minutes
        numbers: Iterator[int] = iter(range(args.runs)) if args.runs else count()

        def one(number: int) -> Run:
            faults = self.given or draw_faults(
                args.seed + number, hosts=args.hosts, steps=args.steps - 1
            )
            return pod.train(self.folder / str(number), faults, limit=args.limit)

        running: set[Future[Run]] = set()
        with self._progress() as progress, ThreadPoolExecutor(args.jobs) as threads:
            task = progress.add_task("runs", total=args.runs or limit, says="")

            def start(number: int | None) -> None:
                if number is not None and time.monotonic() < begun + limit:
                    running.add(threads.submit(one, number))

            for _ in range(args.jobs):
                start(next(numbers, None))
            while running:
                ended, _ = wait(running, timeout=1, return_when=FIRST_COMPLETED)
                for future in ended:
                    running.remove(future)
                    self._look_at(future.result(), pod, reference)
                    start(next(numbers, None))
                done = self.num_runs if args.runs else min(time.monotonic() - begun, limit)
                says = f"{self.num_runs} ended, {len(self.wrong)} went wrong"
                progress.update(task, completed=done, says=says)

    def one_long_run(self) -> None:
        """One run of so many minutes, with a fault every so many seconds."""
        args = self.args
        wanted = 60 * (args.minutes or MINUTES)
        short = self._pod(args.steps, failures=10)
        if self._undisturbed(short) is None:
            return
        took = step_seconds(self.folder / "undisturbed")
        steps = max(args.steps, int(wanted / took))
        faults = self.given or draw_timed_faults(args.seed, args.every, wanted)
        self.console.print(
            f"a step takes {took * 1000:.1f} ms: {steps} steps, {len(faults)} faults"
        )
        often = ("--grow-back", "20", "--strikes", "1000")
        pod = self._pod(steps, failures=2 * len(faults) + 10, how=often)
        with self._progress() as progress:
            progress.add_task("one long run", total=None, says="")
            run = pod.train(self.folder / "long", faults, limit=5 * wanted)
        # On a pod, to compare with, it would take as long again.
        self._look_at(run, pod, pod.train_alone(self.folder / "alone"), exact=False)

    def _pod(self, steps: int, *, failures: int, how: tuple[str, ...] = ()) -> Pod:
        return Pod(
            hosts=self.args.hosts,
            steps=steps,
            failures=failures,
            phase_limit=self.args.phase_limit,
            how=(*self.how, *how),
        )

    def _undisturbed(self, pod: Pod) -> Path | None:
        """The weights of a run without a fault, which must be well itself."""
        with self._progress() as progress:
            progress.add_task("an undisturbed run", total=None, says="")
            run = pod.train(self.folder / "undisturbed", limit=self.args.limit)
        self._look_at(run, pod, None)
        self.num_runs, self.goodputs = 0, []
        return None if self.wrong else run.folder / "out" / "weights.npz"

    def _look_at(self, run: Run, pod: Pod, reference: Path | None, *, exact: bool = True) -> None:
        examples = pod.steps * BATCH
        found = check(run, steps=pod.steps, num_examples=examples, reference=reference, exact=exact)
        self.num_runs += 1
        self.recoveries += recoveries(run)
        self.goodputs += [event["goodput"] for event in run.of("done") if "goodput" in event]
        if found:
            faults = run.planted or "no fault"
            self.wrong.append(f"{faults}: {'; '.join(found)} (see {run.folder})")
        elif not self.args.keep and reference is not None:
            shutil.rmtree(run.folder, ignore_errors=True)

    def told(self) -> int:
        """Print what was found; the exit status."""
        if self.recoveries:
            self.console.print(table_of(self.recoveries))
        if self.goodputs:
            middle, least = statistics.median(self.goodputs), min(self.goodputs)
            self.console.print(f"goodput: median {middle:.1%}, least {least:.1%}")
        for line in self.wrong:
            self.console.print(f"wrong: {line}", markup=False, highlight=False, soft_wrap=True)
        self.console.print(f"{self.num_runs} runs, {len(self.wrong)} went wrong")
        if not self.wrong and not self.args.out and not self.args.keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        return int(bool(self.wrong))

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[says]}"),
            TimeElapsedColumn(),
            console=self.console,
        )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scripts/soak",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="""\
Train a small network on emulated pods of 16 CPU devices while things fail, and check every run: it
ends by itself with status 0, every example was used exactly once in the steps that were committed,
and the last weights are those of an undisturbed run, to the bit where the mesh did not change.

Each run has one to three faults, drawn by its own seed: processes that are killed, stopped, stuck,
that hold the interpreter or raise an error; a host with its keeper, all workers, the coordination
service; slow steps, a torn checkpoint, a full disk; at the start, while compiling, before a step,
in the middle of it, before its commit, in a checkpoint, in an evaluation, in a recovery.""",
        epilog="""\
exit status: 0 if all runs are well, 1 if one is not (its folder is kept, and named), 2 for bad
arguments.

examples: scripts/soak --minutes 10 --seed 1
          scripts/soak --runs 1 --faults 'kill@2:30; stop@0:45:collective'
          scripts/soak --minutes 10 --every 120     one long run, for its goodput""",
    )
    parser.add_argument(
        "--minutes", type=seconds, metavar="M", help=f"start no run after that ({MINUTES:g})"
    )
    parser.add_argument("--runs", type=positive, metavar="N", help="so many runs (any number)")
    parser.add_argument(
        "--seed",
        type=whole_number(0, MAX_SEED),
        default=0,
        metavar="S",
        help="of the first run (0)",
    )
    parser.add_argument(
        "--jobs", type=positive, default=1, metavar="J", help="runs at the same time (1)"
    )
    parser.add_argument(
        "--hosts", type=whole_number(1), choices=HOST_SHAPES, default=4, help="of a pod (4)"
    )
    parser.add_argument(
        "--steps", type=positive, default=STEPS, metavar="N", help=f"of a run ({STEPS})"
    )
    parser.add_argument(
        "--limit",
        type=seconds,
        default=LIMIT,
        metavar="SECONDS",
        help=f"a run that takes longer hangs: its stacks are in its log ({LIMIT:g})",
    )
    parser.add_argument(
        "--phase-limit",
        type=seconds,
        default=PHASE_LIMIT,
        metavar="SECONDS",
        help="a worker that takes longer to start, to plan, to compile or to restore is lost "
        f"({PHASE_LIMIT:g})",
    )
    parser.add_argument(
        "--faults", metavar="FAULTS", help="the same in every run, as kill@2:30 (at random)"
    )
    parser.add_argument(
        "--every",
        type=seconds,
        metavar="SECONDS",
        help="one run of so many minutes, with a fault each time so many seconds are over",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--in-place",
        action="store_true",
        help="survivors go on in the same processes, where they can (so it is anyway)",
    )
    how.add_argument(
        "--restart", action="store_true", help="processes are started anew after each failure"
    )
    parser.add_argument("--out", metavar="FOLDER", help="for the files of runs (a temporary one)")
    parser.add_argument("--keep", action="store_true", help="also those of runs that are well")
    return parser


if __name__ == "__main__":
    sys.exit(main())
