"""``ftmesh doctor``: look at the chips and links of this machine, or of all hosts of a pod."""

from __future__ import annotations

import argparse
import atexit
import json
import os
import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ftmesh.cli.arguments import Progress
from ftmesh.command_line import add_processes, number
from ftmesh.draw import Panel, draw_text
from ftmesh.draw.panel import size
from ftmesh.errors import ArgumentError

if TYPE_CHECKING:
    from ftmesh.distributed.process_group import Cluster
    from ftmesh.health.findings import Findings
    from ftmesh.topology.topology import Topology

_WIDEST = 32  # chips of a row that is drawn


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "doctor",
        help="look for chips and links that are wrong, silent or slow",
        description="Have every live chip compute what is known, and every link carry a pattern "
        "there and back, and say which of them are wrong, silent or slow. The last line is what to "
        "leave out, as --failed takes it.",
        epilog="examples: ftmesh doctor; ftmesh doctor --emulate --mesh 4x4; ftmesh launch --hosts "
        "2 --devices-per-host 8 --mesh 4x4 -- ftmesh doctor. Exit status: 0, all is well; 1, "
        "something was found; 2, bad arguments. FTMESH_SICK='wrong@1,2;link-slow@0,0-1,0' plants "
        "what is to be found: wrong, slow or silent, chips or links.",
    )
    parser.add_argument("--mesh", metavar="SHAPE", help="shape, x first (that of the devices)")
    parser.add_argument(
        "--failed",
        metavar="BLOCKS",
        help="chips to leave alone: '4x2@6,14' (default: the environment variable FTMESH_FAILED)",
    )
    parser.add_argument(
        "--failed-links",
        metavar="LINKS",
        default="",
        help="links to leave alone: '3,2-4,2;0,0-0,1'",
    )
    parser.add_argument(
        "--emulate", action="store_true", help="look at CPU devices in place of chips; takes --mesh"
    )
    parser.add_argument(
        "--limit",
        type=number(0.001),
        default=60.0,
        metavar="SECONDS",
        help="what takes longer to answer is silent (60)",
    )
    parser.add_argument(
        "--slow",
        type=number(1.001),
        default=3.0,
        metavar="FACTOR",
        help="what takes so many times as long as the median of its peers is slow (3)",
    )
    parser.add_argument(
        "--one-by-one",
        action="store_true",
        help="try each link by itself, however many there are: takes longer, and names a silent "
        "one (default: where a process has 128 or fewer)",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    add_processes(parser)


def run(args: argparse.Namespace) -> int:
    """Look, print what was found, and say whether all is well."""
    if args.emulate and args.mesh is None:
        raise ArgumentError("--emulate needs --mesh, to know what to emulate")
    with _joined(args) as cluster:
        topology = _topology(args, cluster)
        cluster = cluster.on(topology)
        if not cluster.takes_part:
            return 0  # when the others are done
        findings = _examined(args, topology, cluster)
        if cluster.speaks:
            _print(findings, as_json=args.json)
    if any(one.kind == "silent" for one in findings.found):
        atexit.register(_leave, 1)  # JAX would wait for it
    return 0 if findings.is_well else 1


def _joined(args: argparse.Namespace) -> AbstractContextManager[Cluster]:
    from ftmesh.distributed.initialize import join
    from ftmesh.distributed.process_group import LIMIT, Cluster

    given = (args.coordinator, args.num_processes, args.process_id)
    if args.emulate:
        if any(one is not None for one in given):
            raise ArgumentError("--emulate is for one process: leave it out of several")
        return Cluster()
    return join(*given, limit=max(LIMIT, args.limit), name="ftmesh doctor")


def _topology(args: argparse.Namespace, cluster: Cluster) -> Topology:
    from ftmesh.distributed.consensus import agreed_topology
    from ftmesh.testing import cpu_grid

    damage = {"failed": args.failed, "failed_links": args.failed_links}
    if args.emulate:
        return cpu_grid(args.mesh, **damage)
    cluster.agree({"--limit": args.limit, "--slow": args.slow, "--one-by-one": args.one_by_one})
    return agreed_topology(cluster, shape=args.mesh, **damage)


def _examined(args: argparse.Namespace, topology: Topology, cluster: Cluster) -> Findings:
    from dataclasses import replace

    from ftmesh.health.doctor import examine
    from ftmesh.health.probe_programs import Probes
    from ftmesh.testing.unhealthy import Sick
    from ftmesh.topology.devices import platform_of

    sick = Sick.from_environment(topology)
    probes = Probes.of(platform_of(topology.devices[0]), sick)
    if args.one_by_one:
        probes = replace(probes, one_by_one=sys.maxsize)
    options: dict[str, Any] = {"progress": Progress()} if cluster.speaks else {}
    return examine(
        topology, cluster=cluster, limit=args.limit, slow=args.slow, probes=probes, **options
    )


def _print(findings: Findings, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(findings.to_json(), indent=2), flush=True)
        return
    if size(findings.topology)[0] <= _WIDEST:
        print(draw_text(Panel(findings.picture, str(findings.topology))))
    print(findings, flush=True)


def _leave(status: int) -> None:
    """End without JAX's own ending."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
