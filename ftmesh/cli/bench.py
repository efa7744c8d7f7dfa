"""``ftmesh bench``: the algorithms beside `lax.psum` on emulated devices."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from ftmesh.cli.arguments import add_mesh, show_progress, topology_of
from ftmesh.errors import ArgumentError
from ftmesh.units import parse_bytes


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "bench",
        help="time the algorithms beside lax.psum on emulated devices",
        description="Time every algorithm that fits a mesh beside lax.psum, in one run, on CPU "
        "devices that stand in for chips. It measures programs, not a network: compare ratios.",
        epilog="example: ftmesh bench 4x4 --failed 2x2@0,0 --payloads 4KB,1MB,64MB",
    )
    add_mesh(parser, optional=True)
    parser.add_argument(
        "--payloads",
        metavar="SIZES",
        default="4KB,64KB,1MB,16MB,64MB",
        help="payloads per device, joined by commas (default: 4KB,64KB,1MB,16MB,64MB)",
    )
    parser.add_argument("--repeats", type=int, default=5, help="the median of so many (default: 5)")
    parser.add_argument("--json", action="store_true", help="print the timings as JSON")


def run(args: argparse.Namespace) -> None:
    """Make the devices, time, and print a table."""
    if args.repeats < 1:
        raise ArgumentError(f"--repeats must be 1 or more, not {args.repeats}")
    if args.mesh is None:
        args.mesh, args.failed = "4x4", args.failed or "2x2@0,0"
    payloads = [parse_bytes(size) for size in args.payloads.split(",")]
    wanted = topology_of(args)  # refuse bad input before JAX is loaded

    from ftmesh.collectives.timing import bench, table
    from ftmesh.testing import cpu_grid

    topology = cpu_grid(
        wanted.name,
        failed=wanted.failed,
        failed_links=wanted.failed_links,
        wrap=wanted.wrap,
    )
    timings = bench(topology, payloads, repeats=args.repeats, progress=show_progress)
    if args.json:
        print(json.dumps([asdict(timing) for timing in timings], indent=2))
    else:
        print(
            f"{topology}: {topology.num_live} emulated devices, float32, median of {args.repeats}"
        )
        print(table(timings))
