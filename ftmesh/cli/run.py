"""``ftmesh run``: run this host's part of a training run that survives the loss of hosts."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import json
import math
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ftmesh.cli.launch import (
    add_failure_options,
    add_option,
    forward_signals,
    log,
    policy_from,
    print_stacks,
)
from ftmesh.command_line import number, whole_number
from ftmesh.distributed.cluster_env import Placement, detect
from ftmesh.distributed.handshake import find_secret
from ftmesh.elastic.agent import PROBE_SECONDS, Agent
from ftmesh.elastic.agent_pool import AgentPool
from ftmesh.elastic.child_process import HostLayout, Sidecar
from ftmesh.elastic.local_pod import check_command
from ftmesh.elastic.rpc import LOOPBACK, ChannelClosed, connect, free_port
from ftmesh.elastic.run_log import EventLog, OutputPrinter
from ftmesh.elastic.supervisor import Supervisor
from ftmesh.errors import RESTART, ArgumentError
from ftmesh.files import check_local, check_output_folder, write_text
from ftmesh.topology.notation import parse_shape

FAREWELL_SECONDS = 5.0  # for agents to learn how the run ended
MIN_SECRET_CHARS = 16
CONTROLLER_FILE = "controller"  # in the run's folder: its address, for hosts that come back
_PARENT, _RECORD = "FTMESH_CONTROLLER_OF_AGENT", "FTMESH_CONTROLLER_RECORD"
_LOCAL_RANKS = ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "LOCAL_RANK")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "run",
        usage="ftmesh run [options] -- COMMAND ...",
        help="run a training command on every host of a cluster, and keep going when hosts fail",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="""\
Run a command on this host as one worker of a run on several hosts. Start it once on every host, as
with torchrun: by srun, mpirun, an indexed Kubernetes job, or by hand with --join, --hosts and
--host-index. Host 0 also runs the controller, which decides who takes part; if it is lost, the next
host takes over.

When a host is lost, the others continue from the last committed step without its chips. A worker
that hangs writes its stack traces and is treated as lost. A host that loses contact ends its own
worker before the others continue.

All hosts need the same secret: FTMESH_SECRET, or a file FTMESH_SECRET_FILE.""",
        epilog="""\
exit status, the same on every host: 0 done; 2, 65, 66, 69 a permanent error, do not restart;
75 restart all hosts (or --restart-status); 77 too few hosts; 124 after --timeout; 128 + n after
signal n; else that of the worker that failed.

example: srun --no-kill ftmesh run --run-dir shared/run1 -- python train.py""",
    )
    text = "address of the controller, on host 0 or where --controller-only runs"
    add_option(parser, "--join", "HOST:PORT", str, "auto", text)
    text = "number of hosts, if the cluster's launcher does not set it"
    add_option(parser, "--hosts", "N", whole_number(1), None, text)
    add_option(parser, "--host-index", "I", whole_number(0), None, "index of this host, from 0")
    text = "stable name of this host: with the same name it gets the same chips when started again"
    add_option(parser, "--node-name", "NAME", str, None, text, "that of the cluster")
    parser.add_argument(
        "--controller-only", action="store_true", help="run the controller, and no worker"
    )
    text = "shape of all devices together, for devices without coordinates"
    add_option(parser, "--mesh", "MESH", str, None, text)
    text = "emulate this many CPU devices on each host"
    add_option(parser, "--devices-per-host", "N", whole_number(1), None, text, "real devices")
    text = "time for all hosts to join"
    add_option(parser, "--join-timeout", "SECONDS", number(1), 300.0, text)
    text = "fewest hosts to start or continue with"
    no_default = "all to start, more than half to start again, then any number"
    add_option(parser, "--min-hosts", "N", whole_number(1), None, text, no_default)
    add_option(parser, "--timeout", "SECONDS", number(0), None, "end the run after this time")
    text = "exit status for 'restart all hosts'; XPK expects 42"
    add_option(parser, "--restart-status", "N", whole_number(1, 255), RESTART, text)
    add_failure_options(parser, failures=10)
    parser.add_argument(
        "program", metavar="COMMAND", nargs=argparse.REMAINDER, help="what the worker runs"
    )


def run(args: argparse.Namespace) -> int:
    """Run the agent of this host until the run is over; return the exit status."""
    if args.program[:1] == ["--"]:
        del args.program[0]
    check_output_folder(args.run_dir)
    check_local(args.events or "")
    placement, hosts, index = _place(args)
    layout = _layout(args, hosts)  # in all hosts, which would wait for a controller in vain
    secret = _secret()
    address = _controller_address(args, placement, hosts)
    with ExitStack() as stack:
        run_dir = args.run_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (run_dir / "pids").mkdir(parents=True, exist_ok=True)
        if args.controller_only:
            status = _run_controller(args, hosts, layout, address, secret, run_dir.resolve())
        else:
            check_command(args.program, os.environ.get("PATH"))
            if not args.run_dir:
                stack.callback(print_stacks, run_dir)
            name = args.node_name or _node_name(placement)
            status = _run_agent(args, name, hosts, index, address, secret, run_dir.resolve())
    return int(args.restart_status) if status == RESTART else status


def _place(args: argparse.Namespace) -> tuple[Placement | None, int, int | None]:
    """Return where an engine has placed this host, how many hosts there are, and its index."""
    placement, hosts, index = None, args.hosts, args.host_index
    if hosts is None and index is None and os.environ.get("FTMESH_NUM_PROCESSES") == "1":
        hosts, index = 1, 0
    needs_index = not args.controller_only or args.join == "auto"
    if hosts is None or (index is None and needs_index):
        placement = detect(os.environ)
    if hosts is None and placement is not None:
        hosts = placement.count
    is_several = args.join != "auto" or index or "FTMESH_NUM_PROCESSES" in os.environ
    if hosts is None and (is_several or args.controller_only):
        raise ArgumentError("the number of hosts is not known: give --hosts N")
    hosts = hosts or 1
    if index is not None and index >= hosts:
        raise ArgumentError(f"--host-index {index} of {hosts} hosts: give 0 to {hosts - 1}")
    if (args.min_hosts or 0) > hosts:
        raise ArgumentError(f"--min-hosts {args.min_hosts} of {hosts} hosts: give {hosts} at most")
    return placement, hosts, placement.index if index is None and placement else index


def _layout(args: argparse.Namespace, hosts: int) -> HostLayout | None:
    """Return the block of the mesh that each host has; None if devices know it."""
    if args.mesh is None:
        if args.host_shape is not None:
            raise ArgumentError("--host-shape has no effect without --mesh")
        return None
    devices = args.devices_per_host or math.prod(parse_shape(args.mesh)) // hosts
    return HostLayout.create(args.mesh, args.host_shape, hosts, devices)


def _run_agent(
    args: argparse.Namespace,
    name: str,
    hosts: int,
    index: int | None,
    address: str,
    secret: str,
    run_dir: Path,
) -> int:
    def start_controller(at: str, record: Mapping[str, Any]) -> ControllerProcess:
        words = sys.argv[1 : len(sys.argv) - len(args.program)]
        options = [*words[: len(words) - (words[-1] == "--")], "--hosts", str(hosts)]
        return ControllerProcess(at, record, secret, options)

    printer = OutputPrinter(1, lambda: agent.enforce(), is_ending=lambda: received, prefix=False)
    agent = Agent(
        args.program,
        name=name,
        index=index,
        secret=secret,
        run_dir=run_dir,
        devices=args.devices_per_host,
        flags=policy_from(args).xla_flags,
        on_output=lambda stream, data: printer(0, stream, data),
        say=log,
        start_controller=start_controller,
    )
    with ExitStack() as stack:
        present = _find_controller(address, secret, run_dir)
        if index in (None, 0) and _is_own(address) and present is None:
            stack.callback(start_controller(address, {}).close)
        received = stack.enter_context(forward_signals(agent.end))
        status = agent.run(present or address, args.join_timeout)
    if received:
        log(f"ended by {received[0].name}")
    return status


def _run_controller(
    args: argparse.Namespace,
    hosts: int,
    layout: HostLayout | None,
    address: str,
    secret: str,
    run_dir: Path,
) -> int:
    """Run the controller; it has a record if an agent takes over a run."""
    record = json.loads(os.environ.get(_RECORD, "{}"))
    host, _, port = address.rpartition(":")
    events, is_over = EventLog(log, args.events), threading.Event()
    with (
        contextlib.closing(events),
        AgentPool(hosts, secret, host=host, port=int(port), folder=run_dir, say=log) as pool,
    ):
        write_text(run_dir / CONTROLLER_FILE, pool.address)
        supervisor = Supervisor(
            pool, layout, policy_from(args), events, run_dir, record=record, has_successors=True
        )
        if _PARENT in os.environ:
            print(pool.address, flush=True)
            threading.Thread(target=_exit_with_parent, args=[is_over], daemon=True).start()
        with forward_signals(supervisor.end):
            status = supervisor.run(timeout=args.timeout)
        if not supervisor.hands_over:
            is_over.set()
            pool.dismiss(status)
            until = time.monotonic() + FAREWELL_SECONDS
            while (pool.present or pool.leaving) and time.monotonic() < until:
                time.sleep(0.05)
    return status


def _exit_with_parent(is_over: threading.Event) -> None:
    while os.read(0, 4096):  # sys.stdin has a lock, which an exit of the interpreter needs
        pass
    if is_over.is_set():  # the agent here has heard it first; the others must, too
        time.sleep(FAREWELL_SECONDS)
    os._exit(RESTART)


class ControllerProcess(Sidecar):
    """The controller in a process of its own, with the options of this command."""

    name = "the controller"
    exit_seconds = FAREWELL_SECONDS + 1

    def __init__(
        self, address: str, record: Mapping[str, Any], secret: str, options: Sequence[str]
    ) -> None:
        command = [sys.executable, "-m", "ftmesh", *options, "--controller-only", "--join", address]
        env = {"FTMESH_SECRET": secret, _PARENT: "1", _RECORD: json.dumps(record)}
        super().__init__(command, env, shows_errors=True)


def _secret() -> str:
    secret = find_secret(os.environ)
    if len(secret) < MIN_SECRET_CHARS:
        raise ArgumentError(
            "the hosts need a secret that only they know, of 16 characters or more: before they "
            "start, export FTMESH_SECRET=$(openssl rand -hex 32), or set FTMESH_SECRET_FILE"
        )
    return secret


def _controller_address(args: argparse.Namespace, placement: Placement | None, hosts: int) -> str:
    """Return where the controller is, as an IP address and a port."""
    if args.join != "auto":
        host, _, port = args.join.rpartition(":")
    elif placement is not None and placement.first_host is not None:
        host, port = placement.first_host, str(placement.port)
    elif hosts == 1:
        host, port = LOOPBACK, str(free_port())  # this machine may have others of one host
    else:
        raise ArgumentError(f"the address of host 0 of {hosts} is not known: give --join HOST:PORT")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ArgumentError(
            f"{host}:{port} is not the address of a controller: give --join HOST:PORT"
        )
    return f"{_resolve(host, hosts)}:{port}"


def _resolve(host: str, hosts: int) -> str:
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise ArgumentError(f"cannot resolve {host}, the host of the controller: {error}") from None
    addresses = [str(entry[4][0]) for entry in found]
    outside = [a for a in addresses if not ipaddress.ip_address(a).is_loopback]
    if outside or hosts == 1 or host in ("localhost", *addresses):
        return (outside or addresses)[0]
    # As on Debian, where a host's own name leads to 127.0.1.1: take the address of its interface.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])
    raise ArgumentError(
        f"{host} resolves to {addresses[0]}, which other hosts cannot reach: give --join with the "
        "address of an interface"
    )


def _is_own(address: str) -> bool:
    """True if this host has the address."""
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.bind((address.rpartition(":")[0], 0))
        return True
    return False


def _find_controller(address: str, secret: str, run_dir: Path) -> str | None:
    """Return the address of the run's controller; None if there is none yet.

    It may run alone by --controller-only, or on a host that has taken over.
    """
    with contextlib.suppress(OSError, UnicodeError):
        address_now = (run_dir / CONTROLLER_FILE).read_text()[:100].strip()
        if re.fullmatch(r"[0-9.]+:[0-9]+", address_now) and _answers(address_now, secret):
            return address_now
    return address if _answers(address, secret) else None


def _answers(address: str, secret: str) -> bool:
    try:
        connect(address, secret, timeout=PROBE_SECONDS).close()
    except ChannelClosed:
        return False
    return True


def _node_name(placement: Placement | None) -> str:
    """Return the name of this node, or of one of several agents on it."""
    node = placement.node if placement else socket.gethostname()
    local = next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "0")
    return node if local == "0" else f"{node}/{local}"
