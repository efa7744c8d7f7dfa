"""``ftmesh launch``: the processes of an emulated pod, on this machine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from ftmesh.command_line import number, say, whole_number
from ftmesh.elastic.child_process import Process
from ftmesh.elastic.events import Events
from ftmesh.elastic.heartbeats import parse_limits
from ftmesh.elastic.local_pod import Pod, check_command
from ftmesh.elastic.output_lines import Printer
from ftmesh.elastic.pod_environment import Place
from ftmesh.elastic.supervisor import Policy, Supervisor
from ftmesh.errors import ArgumentError
from ftmesh.files import check_folder


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "launch",
        usage="ftmesh launch --hosts N --devices-per-host N [options] -- COMMAND ...",
        help="run a command once per host of an emulated pod",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="""\
Run a command in as many processes as a pod would have hosts, each with CPU devices in place of
chips. Every line that they write is passed on with the number of its process: [2] step 10.

Processes find FTMESH_COORDINATOR, FTMESH_NUM_PROCESSES, FTMESH_PROCESS_ID and, with --mesh,
FTMESH_MESH in their environment, and nothing to read on stdin. What a real cluster has put there
(SLURM_*, OMPI_*, TPU_* and the like) is taken out.

When one fails, the others have --grace seconds to end by themselves; then they get SIGTERM, and 15
seconds later SIGKILL. Ctrl-C ends all of them, a second one at once. What stays in
their sessions does not outlive this command, not even when it is killed.

With --failures N the run goes on when hosts fail, as often as that. Whoever is left goes on in
place from the last step that counts, on the mesh less the chips that are lost; where that is not
possible all processes are started anew, from copies in the memory of hosts or from the newest
checkpoint. A process that is alive and makes no progress is named, writes where it is, and counts
as failed.""",
        epilog="""\
exit status: 0 if all had 0; else that of the process that failed first (128 + n if by signal n);
124 after --timeout, 130 after Ctrl-C, 2 for bad arguments.

example: ftmesh launch --hosts 4 --devices-per-host 4 --mesh 4x4 -- python train.py --steps 100""",
    )
    parser.add_argument(
        "--hosts", metavar="N", type=whole_number(0), required=True, help="so many processes"
    )
    parser.add_argument(
        "--devices-per-host",
        metavar="N",
        type=whole_number(0),
        required=True,
        help="CPU devices of each",
    )
    parser.add_argument(
        "--mesh", metavar="MESH", help="shape of all devices together, x first: 4x4 (default: none)"
    )
    parser.add_argument(
        "--grace",
        metavar="SECONDS",
        type=number(0),
        default=30.0,
        help="what others have left when one fails (default: 30)",
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=number(0), help="end all of them then (default: never)"
    )
    _add_failures(parser)
    parser.add_argument(
        "words", metavar="COMMAND", nargs=argparse.REMAINDER, help="what each process runs"
    )


def _add_failures(parser: argparse.ArgumentParser) -> None:
    policy = Policy()
    group = parser.add_argument_group("through failures")

    def option(name: str, kind: Any, default: Any, text: str, **more: Any) -> None:
        group.add_argument(
            name, type=kind, default=default, help=f"{text} ({_shown(default)})", **more
        )

    option(
        "--failures", whole_number(0), 0, "go on after so many, and end with the next", metavar="N"
    )
    group.add_argument(
        "--restart",
        action="store_true",
        help="start all processes anew after every failure, as TPUs need it (in place)",
    )
    option(
        "--host-shape",
        str,
        None,
        "the block of the mesh that a host has, as 2x2 (rows, one after another)",
        metavar="WxH",
    )
    seconds = {"metavar": "SECONDS"}
    option(
        "--collective-limit",
        number(1),
        policy.limit,
        "a collective that takes longer has failed; steps have this and ten times their usual time",
        **seconds,
    )
    option(
        "--limits",
        str,
        None,
        "of phases, as start=60,compile=600; what takes longer is stuck (docs/failures.md has all)",
        metavar="PHASE=SECONDS",
    )
    option(
        "--strikes",
        whole_number(1),
        policy.strikes,
        "a host that fails so often stays out",
        metavar="N",
    )
    option(
        "--backoff",
        number(0),
        policy.backoff,
        "before a restart; doubled after each that led to no step",
        **seconds,
    )
    option("--grow-back", number(0), None, "have lost hosts back after so long", **seconds)
    option("--events", Path, None, "append a JSON line for each event", metavar="FILE")
    option("--run-dir", Path, None, "for stacks, and notes of processes", metavar="FOLDER")


def _shown(default: Any) -> str:
    return "none" if default is None else f"{default:g}" if isinstance(default, float) else default


def run(args: argparse.Namespace) -> int:
    """Start the processes, pass their output on, see them out; the exit status."""
    if args.failures:
        return _run_through_failures(args)
    for name in ("restart", "host_shape", "limits", "grow_back", "events", "run_dir"):
        if getattr(args, name):
            raise ArgumentError(f"--{name.replace('_', '-')} does nothing without --failures N")
    return _run_once(args)


def _run_through_failures(args: argparse.Namespace) -> int:
    if args.mesh is None:
        raise ArgumentError("--failures needs --mesh, to know which chips a host has")
    check_folder(args.run_dir)
    check_command(_command(args), os.environ.get("PATH"))  # before files are made
    place = Place.of(args.mesh, args.host_shape, args.hosts, args.devices_per_host)
    policy = Policy(
        failures=args.failures,
        in_place=not args.restart,
        limit=args.collective_limit,
        limits=parse_limits(args.limits or ""),
        strikes=args.strikes,
        backoff=args.backoff,
        grow_back=args.grow_back,
    )
    with ExitStack() as stack:
        run_dir = args.run_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        run_dir.mkdir(parents=True, exist_ok=True)
        if not args.run_dir:
            stack.callback(_say_stacks, run_dir)
        events = Events(_say, args.events)
        stack.callback(events.close)
        supervisor = Supervisor(
            _command(args),
            place,
            policy,
            events,
            run_dir.resolve(),
            on_output=Printer(args.hosts, idle=lambda: supervisor.enforce()),
        )
        try:
            with _ended_by_signals(supervisor.end) as received:
                status = supervisor.run(timeout=args.timeout)
        except BrokenPipeError:  # whoever read the output has gone
            return 128 + signal.SIGPIPE
    if received:
        _say(f"ended by {received[0].name}")
    return status


def _say_stacks(run_dir: Path) -> None:
    """Pass on where stuck processes were, from a folder that is about to go."""
    for file in sorted(run_dir.glob("stacks-*.txt")):
        text = file.read_text(errors="replace")
        if text and sys.stderr is not None:
            print(f"ftmesh: {file.stem}:\n{text}", file=sys.stderr, flush=True)


def _command(args: argparse.Namespace) -> list[str]:
    words: list[str] = args.words
    return words[1:] if words[:1] == ["--"] else words


def _run_once(args: argparse.Namespace) -> int:
    pod = Pod(
        _command(args),
        hosts=args.hosts,
        devices_per_host=args.devices_per_host,
        mesh=args.mesh,
        on_output=Printer(args.hosts, idle=lambda: pod.enforce()),
    )

    def on_failure(first: Process) -> None:
        _say(
            f"process {first.number} failed {_how(first)}; the others have {args.grace:g} s to end"
        )

    try:
        with _ended_by_signals(pod.end) as received, pod:
            pod.see_out(grace=args.grace, timeout=args.timeout, on_failure=on_failure)
    except BrokenPipeError:  # whoever read the output has gone
        return 128 + signal.SIGPIPE
    first = pod.first_failed
    if received:
        _say(f"ended by {received[0].name}")
    elif first is not None:
        _say(f"process {first.number} failed first, {_how(first)}; {_ended(pod)}")
    elif pod.timed_out:
        _say(f"time was up after {args.timeout:g} s; {_ended(pod)}")
    return 128 + received[0] if received else pod.status


@contextmanager
def _ended_by_signals(
    tell: Callable[[signal.Signals], None],
) -> Iterator[list[signal.Signals]]:
    """Signals that end this command end what it runs, the second at once; those that came."""
    received: list[signal.Signals] = []

    def end(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        if len(received) > 1:
            tell(signal.SIGKILL)
        else:
            tell(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    # What is ignored stays so: nohup, and jobs in the background of a script.
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {each: signal.getsignal(each) for each in ending}
    taken = [each for each in ending if before[each] != signal.SIG_IGN]
    for each in taken:
        signal.signal(each, end)
    try:
        yield received
    finally:
        for each in taken:
            signal.signal(each, before[each])


def _how(process: Process) -> str:
    """How a process failed."""
    status = process.status or 0
    if status - 128 in {*signal.Signals}:
        return f"by {signal.Signals(status - 128).name} (status {status})"
    return f"with status {status}"


def _ended(pod: Pod) -> str:
    """Which processes the launcher had to end."""
    told = [str(process.number) for process in pod.processes if process.told is not None]
    return f"had to end {', '.join(told)}" if told else "the others ended by themselves"


def _say(text: str) -> None:
    say(f"ftmesh: {text}")
