"""``ftmesh launch``: run the processes of an emulated pod on this machine."""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from ftmesh.command_line import number, say, whole_number
from ftmesh.elastic.agent import LocalAgents
from ftmesh.elastic.agent_pool import AgentPool
from ftmesh.elastic.child_process import ChildProcess, HostLayout
from ftmesh.elastic.heartbeats import parse_phase_timeouts
from ftmesh.elastic.local_pod import GRACE_SECONDS, Pod, check_command
from ftmesh.elastic.run_log import EventLog, OutputPrinter
from ftmesh.elastic.supervisor import Policy, Supervisor
from ftmesh.errors import ArgumentError
from ftmesh.files import check_local, check_output_folder


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "launch",
        usage="ftmesh launch --hosts N --devices-per-host N [options] -- COMMAND ...",
        help="run a command once per host of an emulated pod",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="""\
Run a command in one process per host of a pod, each with CPU devices in place of chips. Every line
of output is printed with the index of its process: [2] step 10.

The processes have FTMESH_COORDINATOR, FTMESH_NUM_PROCESSES, FTMESH_PROCESS_ID and, with --mesh,
FTMESH_MESH in their environment, and an empty stdin. Variables of a real cluster (SLURM_*, OMPI_*,
TPU_* and the like) are removed.

When a process fails, the others have --grace seconds to exit; then they get SIGTERM, and SIGKILL 15
seconds later. Ctrl-C ends all of them, a second Ctrl-C at once. No process outlives this command,
not even if it is killed.

With --failures N the run survives N failures of hosts. The other workers continue in place from the
last committed step, without the lost chips; where that is not possible, all are restarted from
copies in host memory or from the newest checkpoint. A worker that makes no progress writes its
stacks and counts as failed.""",
        epilog="""\
exit status: 0 if all processes exit with 0; else that of the first that failed (128 + n after
signal n); 124 after --timeout, 130 after Ctrl-C, 2 for bad arguments.

example: ftmesh launch --hosts 4 --devices-per-host 4 --mesh 4x4 -- python train.py --steps 100""",
    )
    whole = whole_number(0)
    for name, text in (
        ("--hosts", "number of processes"),
        ("--devices-per-host", "CPU devices of each process"),
    ):
        parser.add_argument(name, metavar="N", type=whole, required=True, help=text)
    add_option(parser, "--mesh", "MESH", str, None, "shape of all devices together, x first: 4x4")
    grace = "time for the other processes to exit after one fails"
    add_option(parser, "--grace", "SECONDS", number(0), GRACE_SECONDS, grace)
    add_option(parser, "--timeout", "SECONDS", number(0), None, "end the run after this time")
    add_failure_options(parser)
    parser.add_argument(
        "program", metavar="COMMAND", nargs=argparse.REMAINDER, help="what each process runs"
    )


def add_failure_options(parser: argparse.ArgumentParser, *, failures: int = 0) -> None:
    """Add the options of `Policy`."""
    policy = Policy()
    group = parser.add_argument_group("fault tolerance")
    option = partial(add_option, group)
    option("--failures", "N", whole_number(0), failures, "survive N failures of hosts")
    group.add_argument(
        "--restart",
        action="store_true",
        help="restart all processes after every failure, as TPUs require (default: in place)",
    )
    option("--host-shape", "WxH", str, None, "block of the mesh of each host", "whole rows")
    text = "timeout of a collective; a step is stuck after this plus ten times the median step"
    option("--collective-limit", "SECONDS", number(1), policy.collective_timeout, text)
    text = "timeouts of phases, as in start=60,compile=600"
    option("--limits", "PHASE=SECONDS", str, None, text, "docs/failures.md lists them")
    option("--strikes", "N", whole_number(1), policy.strikes, "exclude a host after N failures")
    text = "wait before a restart; doubled after each restart that led to no step"
    option("--backoff", "SECONDS", number(0), policy.backoff, text)
    option(
        "--grow-back",
        "SECONDS",
        number(0),
        None,
        "restart to take lost hosts back, this long after losing them",
        "never",
    )
    option("--events", "FILE", Path, None, "append a JSON line for each event")
    option(
        "--run-dir", "FOLDER", Path, None, "folder for stacks and process ids", "a temporary one"
    )


def add_option(
    parser: argparse._ActionsContainer,
    name: str,
    metavar: str,
    kind: Any,
    default: Any,
    text: str,
    no_default: str = "none",
) -> None:
    """Add an option whose help says its default."""
    shown = no_default if default is None else f"{default:g}" if default != "auto" else default
    text = f"{text} (default: {shown})"
    parser.add_argument(name, metavar=metavar, type=kind, default=default, help=text)


def run(args: argparse.Namespace) -> int:
    """Run the processes to their end; return the exit status."""
    if args.program[:1] == ["--"]:
        del args.program[0]
    if args.failures:
        return _run_with_failures(args)
    policy = Policy()
    unused = {
        "restart": False,
        "host_shape": None,
        "collective_limit": policy.collective_timeout,
        "limits": None,
        "strikes": policy.strikes,
        "backoff": policy.backoff,
        "grow_back": None,
        "events": None,
        "run_dir": None,
    }
    for name, default in unused.items():
        if getattr(args, name) != default:
            raise ArgumentError(f"--{name.replace('_', '-')} has no effect without --failures N")
    return _run_once(args)


def _run_with_failures(args: argparse.Namespace) -> int:
    if args.grace != GRACE_SECONDS:
        raise ArgumentError("--grace has no effect with --failures N: see --limits")
    if args.mesh is None:
        raise ArgumentError("--failures needs --mesh, to know which chips a host has")
    check_output_folder(args.run_dir)
    check_local(args.events or "")
    check_command(args.program, os.environ.get("PATH"))  # before files are created
    layout = HostLayout.create(args.mesh, args.host_shape, args.hosts, args.devices_per_host)
    policy = policy_from(args)
    with ExitStack() as stack:
        run_dir = args.run_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        run_dir.mkdir(parents=True, exist_ok=True)
        if not args.run_dir:
            stack.callback(print_stacks, run_dir)
        events = EventLog(log, args.events)
        stack.callback(events.close)
        pool = stack.enter_context(AgentPool(args.hosts, secrets.token_hex(32)))
        supervisor = Supervisor(pool, layout, policy, events, run_dir.resolve())
        printer = OutputPrinter(args.hosts, lambda: agents.enforce(), is_ending=lambda: received)
        unread: list[BrokenPipeError] = []

        def print_output(host: int, stream: int, data: bytes) -> None:
            try:
                printer(host, stream, b"" if unread else data)
            except BrokenPipeError as error:  # the reader of the output is gone
                unread.append(error)
                supervisor.end(signal.SIGTERM)

        agents = LocalAgents(
            pool,
            args.program,
            run_dir=run_dir.resolve(),
            devices=args.devices_per_host,
            flags=policy.xla_flags,
            on_output=print_output,
        )
        with forward_signals(supervisor.end) as received, agents:
            status = supervisor.run(timeout=args.timeout)
    if received:
        log(f"ended by {received[0].name}")
    return 128 + signal.SIGPIPE if unread else status


def policy_from(args: argparse.Namespace) -> Policy:
    """Return the policy that the options give."""
    return Policy(
        failures=args.failures,
        in_place=not args.restart,
        collective_timeout=args.collective_limit,
        phase_timeouts=parse_phase_timeouts(args.limits or ""),
        strikes=args.strikes,
        backoff=args.backoff,
        grow_back=args.grow_back,
        min_hosts=getattr(args, "min_hosts", None),
        join_timeout=getattr(args, "join_timeout", Policy.join_timeout),
    )


def print_stacks(run_dir: Path) -> None:
    """Print the stacks of stuck workers from a folder that is about to be deleted."""
    for file in sorted(run_dir.glob("stacks-*.txt")):
        text = file.read_text(errors="replace")
        if text and sys.stderr is not None:
            print(f"ftmesh: {file.stem}:\n{text}", file=sys.stderr, flush=True)


def _run_once(args: argparse.Namespace) -> int:
    pod = Pod(
        args.program,
        hosts=args.hosts,
        devices_per_host=args.devices_per_host,
        mesh=args.mesh,
        on_output=OutputPrinter(args.hosts, lambda: pod.enforce(), is_ending=lambda: received),
    )

    def on_failure(first: ChildProcess) -> None:
        how = f"process {first.number} failed {_how_failed(first)}"
        log(f"{how}; the others have {args.grace:g} s to exit")

    try:
        with forward_signals(pod.end) as received, pod:
            pod.run(grace=args.grace, timeout=args.timeout, on_failure=on_failure)
    except BrokenPipeError:  # the reader of the output is gone
        return 128 + signal.SIGPIPE
    first = pod.first_failed
    if received:
        log(f"ended by {received[0].name}")
    elif first is not None:
        log(f"process {first.number} failed first, {_how_failed(first)}; {_ended(pod)}")
    elif pod.timed_out:
        log(f"timed out after {args.timeout:g} s; {_ended(pod)}")
    return 128 + received[0] if received else pod.status


@contextmanager
def forward_signals(end: Callable[[signal.Signals], None]) -> Iterator[list[signal.Signals]]:
    """Call `end` for signals that end this command, with SIGKILL for the second; yield them."""
    received: list[signal.Signals] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        gentle = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        end(gentle if len(received) == 1 else signal.SIGKILL)

    # Ignored signals stay ignored: nohup, and background jobs of a script.
    old = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    old = {signum: handler for signum, handler in old.items() if handler != signal.SIG_IGN}
    for signum in old:
        signal.signal(signum, handle)
    try:
        yield received
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)


def _how_failed(process: ChildProcess) -> str:
    status = process.status or 0
    if status - 128 in {*signal.Signals}:
        return f"by {signal.Signals(status - 128).name} (status {status})"
    return f"with status {status}"


def _ended(pod: Pod) -> str:
    """Say which processes the launcher had to end."""
    ended = [str(process.number) for process in pod.processes if process.sent_signal is not None]
    return f"had to end {', '.join(ended)}" if ended else "the others exited by themselves"


def log(text: str) -> None:
    """Print a line to stderr."""
    say(f"ftmesh: {text}")
