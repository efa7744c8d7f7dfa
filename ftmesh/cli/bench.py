"""``ftmesh bench``: the algorithms beside `lax.psum` on emulated devices."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from ftmesh.cli.arguments import Progress, add_mesh, topology_of
from ftmesh.command_line import whole_number
from ftmesh.memory_limits import check_memory
from ftmesh.units import check_bytes, format_bytes, parse_bytes

COPIES = 8  # of a payload that a device holds while it is summed, with room to spare


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
        default="4KB,64KB,1MB,16MB",
        help="payloads per device, joined by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats",
        type=whole_number(1, 1000),
        default=5,
        help="the median of so many (default: 5)",
    )
    parser.add_argument("--json", action="store_true", help="print the timings as JSON")


def run(args: argparse.Namespace) -> None:
    """Make the devices, time, and print a table."""
    if args.mesh is None:
        args.mesh, args.failed = "4x4", "2x2@0,0" if args.failed is None else args.failed
    payloads = [parse_bytes(size) for size in args.payloads.split(",")]
    for size in payloads:
        check_bytes(size, name="each of --payloads")
    wanted = topology_of(args)  # refuse bad input before JAX is loaded
    check_memory(
        f"timing sums of {format_bytes(max(payloads))} on {wanted.num_live} emulated devices",
        COPIES * max(payloads) * wanted.num_live,
        "give smaller --payloads, or a smaller mesh",
    )

    from ftmesh.testing.benchmark import bench, table
    from ftmesh.testing import cpu_grid

    topology = cpu_grid(
        wanted.name,
        failed=wanted.failed,
        failed_links=wanted.failed_links,
        wrap=wanted.wrap,
    )
    timings = bench(topology, payloads, repeats=args.repeats, progress=Progress())
    if args.json:
        print(json.dumps([asdict(timing) for timing in timings], indent=2))
    else:
        print(
            f"{topology}: {topology.num_live} emulated devices, float32, median of {args.repeats}"
        )
        print(table(timings))
