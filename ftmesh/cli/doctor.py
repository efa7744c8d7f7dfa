"""``ftmesh doctor``: test the chips and links of this machine, or of all hosts of a pod."""

from __future__ import annotations

import argparse
import atexit
import json
import os
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ftmesh.cli.arguments import Progress, add_option
from ftmesh.command_line import add_process_arguments, number
from ftmesh.draw import Panel, draw_text
from ftmesh.draw.panel import page_size
from ftmesh.errors import ArgumentError

if TYPE_CHECKING:
    from ftmesh.distributed.process_group import ProcessGroup
    from ftmesh.health.examination import Findings
    from ftmesh.topology.topology import Topology

_MAX_WIDTH = 32  # chips per row in a drawing


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "doctor",
        help="find chips and links that are wrong, silent or slow",
        description="Test every live chip with a computation whose result is known, and every link "
        "with a pattern sent there and back, and list those that are wrong, silent or slow. The "
        "last line is the --failed option that excludes them.",
        epilog="examples: ftmesh doctor; ftmesh doctor --emulate --mesh 4x4; ftmesh launch --hosts "
        "2 --devices-per-host 8 --mesh 4x4 -- ftmesh doctor. Exit status: 0, all "
        "healthy; 1, something is unhealthy; 2, bad arguments. To try it out, "
        "FTMESH_SICK='wrong@1,2;link-slow@0,0-1,0' makes chips or links wrong, slow or silent.",
    )
    failed = "chips not to test: '4x2@6,14' (default: the environment variable FTMESH_FAILED)"
    add_option(parser, "--mesh", "SHAPE", "mesh shape, x first (default: that of the devices)")
    add_option(parser, "--failed", "BLOCKS", failed)
    add_option(parser, "--failed-links", "LINKS", "links not to test: '3,2-4,2;0,0-0,1'", "")
    emulate = "test emulated CPU devices instead of chips; needs --mesh"
    parser.add_argument("--emulate", action="store_true", help=emulate)
    timeout = "a chip or link that takes longer to respond is silent (default: 60)"
    parser.add_argument(
        "--timeout", "--limit", type=number(0.001), default=60.0, metavar="SECONDS", help=timeout
    )
    slow = "one that takes FACTOR times the median of its peers is slow"
    add_option(parser, "--slow", "FACTOR", slow, 3.0, number(1.001))
    one_by_one = (
        "test each link by itself, also if a process has more than 128: slower, but can tell which "
        "link is silent"
    )
    parser.add_argument("--one-by-one", action="store_true", help=one_by_one)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    add_process_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Test, print the findings, and return 0 if all are healthy."""
    if args.emulate and args.mesh is None:
        raise ArgumentError("--emulate needs --mesh: the shape to emulate")
    with _joined(args) as group:
        topology = _topology(args, group)
        group = group.for_topology(topology)
        if not group.is_member:
            return 0  # once the others are done
        findings = _examine(args, topology, group)
        if group.is_primary:
            _print(findings, as_json=args.json)
    if any(entry.kind == "silent" for entry in findings.entries):
        atexit.register(_exit_now, 1)  # JAX would wait for the silent chip
    return 0 if findings.is_healthy else 1


def _joined(args: argparse.Namespace) -> AbstractContextManager[ProcessGroup]:
    from ftmesh.distributed.process_group import TIMEOUT, ProcessGroup
    from ftmesh.elastic.elastic_group import initialize

    given = (args.coordinator, args.num_processes, args.process_id)
    if args.emulate:
        if any(value is not None for value in given):
            raise ArgumentError("--emulate is for one process: do not give it with several")
        return ProcessGroup()
    return initialize(*given, timeout=max(TIMEOUT, args.timeout), name="ftmesh doctor")


def _topology(args: argparse.Namespace, group: ProcessGroup) -> Topology:
    import jax

    from ftmesh.distributed.consensus import agreed_topology
    from ftmesh.testing import cpu_grid
    from ftmesh.topology.topology import Topology

    damage = {"failed": args.failed, "failed_links": args.failed_links}
    if args.emulate:
        return cpu_grid(args.mesh, **damage)
    group.agree({"--timeout": args.timeout, "--slow": args.slow, "--one-by-one": args.one_by_one})
    mesh = Topology.from_devices(jax.devices(), shape=args.mesh, **damage)
    return agreed_topology(group, mesh)


def _examine(args: argparse.Namespace, topology: Topology, group: ProcessGroup) -> Findings:
    from ftmesh.health.doctor import examine
    from ftmesh.health.probe_programs import Probes

    probes = Probes.for_topology(topology)
    if args.one_by_one:
        probes = replace(probes, max_single_links=sys.maxsize)
    options: dict[str, Any] = {"progress": Progress()} if group.is_primary else {}
    return examine(
        topology, group=group, timeout=args.timeout, slow=args.slow, probes=probes, **options
    )


def _print(findings: Findings, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(findings.to_json(), indent=2), flush=True)
        return
    if page_size(findings.topology)[0] <= _MAX_WIDTH:
        print(draw_text(Panel(findings.damaged_topology, str(findings.topology))))
    print(findings, flush=True)


def _exit_now(status: int) -> None:
    """Exit without JAX's cleanup."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
