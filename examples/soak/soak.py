"""Train on emulated pods under injected faults, and check every run; see scripts/soak."""

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
from examples.soak.hosts import can_make_hosts
from examples.soak.pod import HOST_SHAPES, PHASE_LIMIT, Pod, step_seconds
from examples.soak.recoveries import Recovery, find_recoveries, recovery_table
from examples.soak.train import PRESETS
from ftmesh.command_line import MAX_SEED, Parser, say, whole_number
from ftmesh.errors import ArgumentError, FtmeshError
from ftmesh.testing.fault_spec import draw_faults, draw_timed_faults, parse_faults

BATCH, STEPS = PRESETS["tiny"].batch, PRESETS["tiny"].steps
MINUTES = 5.0
TIMEOUT = 600.0  # seconds; an undisturbed run takes a tenth of that


def main(argv: Sequence[str] | None = None) -> int:
    """Soak and print a table; return the exit status."""
    args = _parser().parse_args(argv)
    folder = Path(args.out or tempfile.mkdtemp(prefix="ftmesh-soak-")).resolve()
    console = Console()
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ArgumentError(f"{folder} is not empty: give another folder")
        soak = make_soak(args, folder, console)
        try:
            soak.one_long_run() if args.every else soak.many_runs()
        except KeyboardInterrupt:
            soak.report()
            return 130
        return soak.report()
    except FtmeshError as error:
        say(f"soak: {error}")
        return 2


def make_soak(args: argparse.Namespace, folder: Path, console: Console) -> Soak:
    """Return what runs the soak that is asked for."""
    if args.engine is None:
        return Soak(args, folder, console)
    from examples.soak.cluster import ENGINES, ClusterSoak

    if args.every or args.restart or args.in_place or args.jobs > 1:
        raise ArgumentError("--every, --jobs, --in-place and --restart are not for --engine")
    missing = [] if can_make_hosts() else ["root and network namespaces"]
    missing += ENGINES[args.engine].missing_programs()
    if missing:
        raise ArgumentError(f"--engine {args.engine} needs {', '.join(missing)}")
    return ClusterSoak(args, folder, console)


class Soak:
    """Runs under faults, the errors found in them, and how they recovered."""

    def __init__(self, args: argparse.Namespace, folder: Path, console: Console) -> None:
        self.args, self.folder, self.console = args, folder, console
        words = "" if args.engine else args.faults or ""
        self.faults = parse_faults(words, hosts=args.hosts, steps=args.steps - 1)
        self.options = ("--restart",) if args.restart else ()
        self.errors: list[str] = []
        self.recoveries: list[Recovery] = []
        self.goodputs: list[float] = []
        self.num_runs = 0

    def many_runs(self) -> None:
        """Start runs, each with its own faults, until the time is up."""
        args = self.args
        pod = self._pod(args.steps, failures=10)
        reference = self._undisturbed(pod)
        if reference is None:
            return
        minutes = args.minutes or (float("inf") if args.runs else MINUTES)
        started, duration = time.monotonic(), 60 * minutes
        numbers: Iterator[int] = iter(range(args.runs)) if args.runs else count()

        def train(number: int) -> Run:
            faults = self.faults or draw_faults(
                args.seed + number, hosts=args.hosts, steps=args.steps - 1
            )
            return pod.train(self.folder / str(number), faults, limit=args.limit)

        running: set[Future[Run]] = set()
        with self._progress() as progress, ThreadPoolExecutor(args.jobs) as threads:
            task = progress.add_task("runs", total=args.runs or duration, status="")

            def start(number: int | None) -> None:
                if number is not None and time.monotonic() < started + duration:
                    running.add(threads.submit(train, number))

            for _ in range(args.jobs):
                start(next(numbers, None))
            while running:
                ended, _ = wait(running, timeout=1, return_when=FIRST_COMPLETED)
                for future in ended:
                    running.remove(future)
                    self._check(future.result(), pod, reference)
                    start(next(numbers, None))
                elapsed = min(time.monotonic() - started, duration)
                progress.update(
                    task,
                    completed=self.num_runs if args.runs else elapsed,
                    status=f"{self.num_runs} ended, {len(self.errors)} went wrong",
                )

    def one_long_run(self) -> None:
        """Train one run of `--minutes`, with a fault every `--every` seconds."""
        args = self.args
        duration = 60 * (args.minutes or MINUTES)
        short = self._pod(args.steps, failures=10)
        if self._undisturbed(short) is None:
            return
        per_step = step_seconds(self.folder / "undisturbed")
        steps = max(args.steps, int(duration / per_step))
        faults = self.faults or draw_timed_faults(args.seed, args.every, duration)
        self.console.print(
            f"a step takes {per_step * 1000:.1f} ms: {steps} steps, {len(faults)} faults"
        )
        options = ("--grow-back", "20", "--strikes", "1000")
        pod = self._pod(steps, failures=2 * len(faults) + 10, options=options)
        with self._progress() as progress:
            progress.add_task("one long run", total=None, status="")
            run = pod.train(self.folder / "long", faults, limit=5 * duration)
        # An undisturbed run on a pod would take as long again.
        self._check(run, pod, pod.train_alone(self.folder / "alone"), exact=False)

    def _pod(self, steps: int, *, failures: int, options: tuple[str, ...] = ()) -> Pod:
        return Pod(
            hosts=self.args.hosts,
            steps=steps,
            failures=failures,
            phase_limit=self.args.phase_limit,
            options=(*self.options, *options),
        )

    def _undisturbed(self, pod: Pod) -> Path | None:
        """Train without faults; return the weights' path, or None if the run has errors."""
        with self._progress() as progress:
            progress.add_task("an undisturbed run", total=None, status="")
            run = pod.train(self.folder / "undisturbed", limit=self.args.limit)
        self._check(run, pod, None)
        self.num_runs, self.goodputs = 0, []
        return None if self.errors else run.folder / "out" / "weights.npz"

    def _check(self, run: Run, pod: Pod, reference: Path | None, *, exact: bool = True) -> None:
        examples = pod.steps * BATCH
        errors = check(
            run, steps=pod.steps, num_examples=examples, reference=reference, exact=exact
        )
        self.count(run, errors, is_kept=reference is None)

    def count(self, run: Run, errors: Sequence[str], *, is_kept: bool) -> None:
        """Count a run with its errors; remove its files if it has none and they are not needed."""
        self.num_runs += 1
        self.recoveries += find_recoveries(run)
        self.goodputs += [event["goodput"] for event in run.named("done") if "goodput" in event]
        if errors:
            faults = run.planted or "no fault"
            self.errors.append(f"{faults}: {'; '.join(errors)} (see {run.folder})")
        elif not self.args.keep and not is_kept:
            shutil.rmtree(run.folder, ignore_errors=True)

    def report(self) -> int:
        """Print the results; return the exit status."""
        if self.recoveries:
            self.console.print(recovery_table(self.recoveries))
        if self.goodputs:
            median, least = statistics.median(self.goodputs), min(self.goodputs)
            self.console.print(f"goodput: median {median:.1%}, least {least:.1%}")
        for error in self.errors:
            self.console.print(f"wrong: {error}", markup=False, highlight=False, soft_wrap=True)
        self.console.print(f"{self.num_runs} runs, {len(self.errors)} went wrong")
        if not self.errors and not self.args.out and not self.args.keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        return int(bool(self.errors))

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            console=self.console,
        )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scripts/soak",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="""\
Train a small network on emulated pods of 16 CPU devices under injected faults, and check every run:
it ends by itself with status 0, every example was used exactly once in the committed steps, and the
last weights are those of an undisturbed run, bit for bit if the mesh did not change.

Each run has one to three faults, drawn by its own seed: processes that are killed, stopped, stuck,
that hold the interpreter or raise an error; a host with its peer store, all workers, the
coordination service; slow steps, a torn checkpoint, a full disk; at the start, while compiling,
before a step, in it, before its commit, in a checkpoint, an evaluation, a recovery.""",
        epilog="""\
exit status: 0 if all runs pass, 1 if one fails (its folder is kept, and named), 2 for bad
arguments.

examples: scripts/soak --minutes 10 --seed 1
          scripts/soak --runs 1 --faults 'kill@2:30; stop@0:45:collective'
          scripts/soak --minutes 10 --every 120     one long run, for its goodput
          scripts/soak --engine slurm --runs 1 --faults 'power@0:30; agent@2:recovery'""",
    )
    parser.add_argument(
        "--minutes", type=seconds, metavar="M", help=f"start no run after M minutes ({MINUTES:g})"
    )
    parser.add_argument("--runs", type=positive, metavar="N", help="number of runs (any)")
    parser.add_argument(
        "--seed",
        type=whole_number(0, MAX_SEED),
        default=0,
        metavar="S",
        help="seed of the first run (default: 0)",
    )
    parser.add_argument(
        "--jobs", type=positive, default=1, metavar="J", help="concurrent runs (default: 1)"
    )
    parser.add_argument(
        "--hosts",
        type=whole_number(1),
        choices=HOST_SHAPES,
        default=4,
        help="hosts of a pod (default: 4)",
    )
    parser.add_argument(
        "--steps", type=positive, default=STEPS, metavar="N", help=f"steps of a run ({STEPS})"
    )
    parser.add_argument(
        "--limit",
        type=seconds,
        default=TIMEOUT,
        metavar="SECONDS",
        help=f"timeout of a run; its stacks are then in its log ({TIMEOUT:g})",
    )
    parser.add_argument(
        "--phase-limit",
        type=seconds,
        default=PHASE_LIMIT,
        metavar="SECONDS",
        help=f"timeout of a worker's start, planning, compilation and restore ({PHASE_LIMIT:g})",
    )
    parser.add_argument(
        "--faults", metavar="FAULTS", help="faults of every run, as kill@2:30 (default: random)"
    )
    parser.add_argument(
        "--every",
        type=seconds,
        metavar="SECONDS",
        help="one run of --minutes, with a fault every SECONDS seconds",
    )
    parser.add_argument(
        "--engine",
        choices=("slurm", "ray"),
        help="run under a real engine on four hosts, as network namespaces; needs root",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--in-place",
        action="store_true",
        help="survivors continue in the same processes where they can (the default)",
    )
    how.add_argument(
        "--restart", action="store_true", help="restart all processes after each failure"
    )
    parser.add_argument("--out", metavar="FOLDER", help="for the files of runs (a temporary one)")
    parser.add_argument("--keep", action="store_true", help="keep the files of passing runs too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
