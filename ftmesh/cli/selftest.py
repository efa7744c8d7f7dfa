"""``ftmesh selftest``: find out whether ftmesh does what it says on these devices."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import ftmesh
from ftmesh.cli import arguments
from ftmesh.cli.arguments import Progress, add_option
from ftmesh.command_line import add_process_arguments, number, say
from ftmesh.errors import USAGE, ArgumentError
from ftmesh.files import check_output_folder
from ftmesh.selftest.context import LIMIT, TIMEOUT, Settings
from ftmesh.units import check_bytes, parse_bytes

FOLDER = "ftmesh-selftest"
MAX_FOLDERS = 1000
_CONTROLLER = "FTMESH_STEWARD"  # set by `ftmesh launch --failures`


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "selftest",
        help="find out whether ftmesh does what it says on these devices",
        description="Check everything on the devices that JAX has: the mesh and its wrap links, "
        "every chip and link, the order of the ring, every collective by every executor and "
        "algorithm, gradients, sharded optimizers, speed, and the trainers of a clone. Checks run "
        "in a process of their own: one that hangs or dies is reported, and the rest goes on. "
        "Writes report.md, profile.json and journal.jsonl. With MESH it runs on emulated CPU "
        "devices.",
        epilog="examples: ftmesh selftest; ftmesh selftest --failed 2x2@0,0; ftmesh selftest 4x4 "
        "--only topology,right; ftmesh launch --hosts 4 --devices-per-host 4 --mesh 4x4 -- ftmesh "
        "selftest. On a pod start it on every host, as a training run: process 0 writes the "
        "report. Exit status: 0, all right; 1, problems; 2, bad arguments.",
    )
    arguments.add_mesh(parser, optional=True)
    folder = "folder to write; a number is added to its name if it has files already"
    add_option(parser, "--out", "FOLDER", folder, FOLDER)
    timeout = "time for one check, compilation included; links, hops, speed and trainers get more"
    add_option(parser, "--timeout", "SECONDS", timeout, TIMEOUT, number(1))
    limit = "time for all checks; what does not fit is left out"
    add_option(parser, "--limit", "SECONDS", limit, LIMIT, number(1))
    only = "run only checks whose names begin so, separated by commas: 'topology,right: ppermute'"
    add_option(parser, "--only", "NAMES", only)
    sizes = "time sums of these, separated by commas (default: 4KB to 16MB, on accelerators 100MB)"
    add_option(parser, "--payloads", "SIZES", sizes)
    no_kernels = "leave out Pallas kernels, which have never run on a TPU and may hang"
    parser.add_argument("--no-kernels", action="store_true", help=no_kernels)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    add_process_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Supervise the checks, write the report, and return 0 if all is right."""
    from ftmesh.selftest.journal import NO_TIME, final_results
    from ftmesh.selftest.report import JOURNAL, LOG, SelfTestReport, now, write_report
    from ftmesh.selftest.supervise import Ending, supervise

    settings, began, start = _settings(args), now(), time.monotonic()
    is_first = settings.process_id in (None, 0)
    with _folder(args.out, is_first) as folder:
        settings = Settings(**{**vars(settings), "journal": str(folder / JOURNAL)})
        progress = Progress() if is_first else lambda *_: None
        ending, interrupt = Ending(), None
        try:
            ending = supervise(settings, folder / LOG, progress)
        except KeyboardInterrupt as error:
            ending, interrupt = Ending("interrupted"), error
        if ending.status == USAGE:
            raise ArgumentError(ending.reason)
        events = _read(folder / JOURNAL)
        results = tuple(final_results(events, ending.reason))
        seconds = time.monotonic() - start
        reason = ending.reason
        if not reason and any(NO_TIME in result.notes for result in results):
            reason = NO_TIME
        report = SelfTestReport(results, reason, seconds, ftmesh.__version__, began)
        if is_first:
            names = write_report(report, folder)
            if args.json:
                print(json.dumps(report.to_json(), indent=2))
            else:
                print(report.summary())
                print(f"see {folder / names[0]}")
        elif not report.is_healthy:
            kept = tempfile.mkdtemp(prefix=f"ftmesh-selftest-process-{settings.process_id}-")
            shutil.copytree(folder, kept, dirs_exist_ok=True)
            where = f"its journal and log are in {kept}"
            reason = f"{ending.reason}; {where}" if ending.reason else where
            say(f"ftmesh selftest: process {settings.process_id}: {reason}")
        if interrupt is not None:
            raise interrupt
    return 0 if report.is_healthy else 1


def _read(journal: Path) -> list[dict[str, object]]:
    from ftmesh.selftest.journal import Journal

    return Journal(journal).read()


def _settings(args: argparse.Namespace) -> Settings:
    """Check the arguments, and find out which process this is."""
    payloads = [parse_bytes(size) for size in args.payloads.split(",")] if args.payloads else []
    for size in payloads:
        check_bytes(size, name="each of --payloads")
    given = (args.coordinator, args.num_processes, args.process_id)
    if args.mesh is not None:
        if any(value is not None for value in given):
            raise ArgumentError("MESH emulates devices in one process: leave it out with several")
        arguments.topology_of(args)  # rejects bad input before anything starts
    if os.environ.get(_CONTROLLER):
        raise ArgumentError("a self-test restarts its own workers: leave out --failures of launch")
    check_output_folder(args.out)
    coordinator, num_processes, process = (None, None, None) if args.mesh else _processes(*given)
    return Settings(
        journal="",
        deadline=time.time() + args.limit,
        mesh=args.mesh,
        failed=args.failed,
        failed_links=args.failed_links,
        wrap=args.wrap,
        timeout=args.timeout,
        payloads=tuple(payloads),
        kernels=not args.no_kernels,
        only=tuple(name.strip() for name in (args.only or "").split(",") if name.strip()),
        coordinator=coordinator,
        num_processes=num_processes,
        process_id=process,
    )


def _processes(
    coordinator: str | None, num_processes: int | None, process: int | None
) -> tuple[str | None, int | None, int | None]:
    from ftmesh.distributed.startup import find_processes  # imports JAX, and creates no devices

    return find_processes(coordinator, num_processes, process, TIMEOUT)


@contextlib.contextmanager
def _folder(out: str, is_first: bool) -> Iterator[Path]:
    """Yield an empty folder to write, or for processes that write no report a temporary one."""
    if not is_first:
        with tempfile.TemporaryDirectory(prefix="ftmesh-selftest-") as temporary:
            yield Path(temporary)
        return
    folder, is_new = _new_folder(Path(out))
    try:
        yield folder
    except ArgumentError:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _new_folder(wanted: Path) -> tuple[Path, bool]:
    """Return a folder without files, and whether it was made: `wanted`, or with a number added."""
    for i in range(1, MAX_FOLDERS + 1):
        folder = wanted if i == 1 else wanted.with_name(f"{wanted.name}-{i}")
        try:
            folder.mkdir(parents=True)
            return folder, True
        except FileExistsError:
            if folder.is_dir() and not any(folder.iterdir()):
                return folder, False
        except OSError as error:
            raise ArgumentError(f"cannot write to {folder}: {error.strerror}") from error
    raise ArgumentError(f"there are {MAX_FOLDERS} folders {wanted}-N: give another --out")
