"""``ftmesh bench``: time the algorithms against `lax.psum` on emulated devices."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from ftmesh.cli.arguments import Progress, add_mesh, topology_of
from ftmesh.command_line import whole_number
from ftmesh.memory_limits import check_memory
from ftmesh.units import check_bytes, format_bytes, parse_bytes

COPIES = 8  # copies of the payload per device during a sum, rounded up


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "bench",
        help="time the algorithms against lax.psum on emulated devices",
        description="Time every algorithm that works on a mesh against lax.psum, on emulated CPU "
        "devices. This measures programs, not a network: compare ratios only.",
        epilog="example: ftmesh bench 4x4 --failed 2x2@0,0 --payloads 4KB,1MB,64MB",
    )
    add_mesh(parser, optional=True)
    parser.add_argument(
        "--payloads",
        metavar="SIZES",
        default="4KB,64KB,1MB,16MB",
        help="bytes per device, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats",
        type=whole_number(1, 1000),
        default=5,
        metavar="N",
        help="report the median of N runs (default: 5)",
    )
    parser.add_argument("--json", action="store_true", help="print the timings as JSON")


def run(args: argparse.Namespace) -> None:
    """Create the devices, time the algorithms, and print a table."""
    if args.mesh is None:
        args.mesh, args.failed = "4x4", "2x2@0,0" if args.failed is None else args.failed
    payloads = [parse_bytes(size) for size in args.payloads.split(",")]
    for size in payloads:
        check_bytes(size, name="each of --payloads")
    mesh = topology_of(args)  # rejects bad input before JAX is loaded
    check_memory(
        f"timing sums of {format_bytes(max(payloads))} on {mesh.num_live} emulated devices",
        COPIES * max(payloads) * mesh.num_live,
        "give smaller --payloads, or a smaller mesh",
    )

    from ftmesh.testing import cpu_grid
    from ftmesh.testing.benchmark import format_timings, run_benchmark

    topology = cpu_grid(
        mesh.name,
        failed=mesh.failed,
        failed_links=mesh.failed_links,
        wrap=mesh.wrap,
    )
    timings = run_benchmark(topology, payloads, repeats=args.repeats, progress=Progress())
    if args.json:
        print(json.dumps([asdict(timing) for timing in timings], indent=2))
    else:
        print(
            f"{topology}: {topology.num_live} emulated devices, float32, median of {args.repeats}"
        )
        print(format_timings(timings))
