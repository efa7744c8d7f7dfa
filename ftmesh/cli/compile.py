"""``ftmesh compile``: compile a plan for a TPU slice, without a TPU."""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial

import ftmesh
from ftmesh.cli import arguments
from ftmesh.cli.arguments import add_algorithm, add_damage, add_executor, add_payload, add_wrap
from ftmesh.cost.links import network_for
from ftmesh.execute.lowering import PALLAS
from ftmesh.topology.notation import parse_wrap_axes
from ftmesh.units import parse_bytes


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "compile",
        help="compile a plan for a TPU slice, without a TPU",
        description="Compile the all-reduce of a plan for a TPU slice and report: whether the "
        "compiler accepts it, its memory, whether the permutations of a round run at once, and the "
        "compiler's estimate for everything besides them; for a Pallas kernel, the instruction "
        "bundles of its loops. Needs libtpu (pip install libtpu, x86_64 Linux), and no TPU.",
        epilog="example: ftmesh compile v6e:16x16 --failed 2x2@2,2 --algorithm row_pair",
    )
    parser.add_argument("slice", metavar="SLICE", help="TPU generation and shape: v6e:16x16")
    add_damage(parser)
    add_wrap(parser)
    add_algorithm(parser)
    add_executor(parser)
    add_payload(parser)
    parser.add_argument(
        "--idle",
        action="store_true",
        help="keep the failed chips in the program, idle: for v5e, which needs whole slices",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> None:
    """Plan for the slice, compile, and report."""
    payload_bytes = parse_bytes(args.payload)
    if args.executor != PALLAS:
        _compile(args, payload_bytes, None)
        return
    from ftmesh.tpu.compile_report import dump_bundles

    with tempfile.TemporaryDirectory() as folder:
        dump_bundles(folder)
        _compile(args, payload_bytes, folder)


def _compile(args: argparse.Namespace, payload_bytes: int, bundles: str | None) -> None:
    from ftmesh.tpu.compile_report import compile_report
    from ftmesh.tpu.compiler import parse_slice, tpu_devices

    stages = arguments.Stages()
    wrap = parse_wrap_axes(args.wrap, parse_slice(args.slice)[1].shape)
    load = partial(tpu_devices, args.slice, wrap=wrap)
    devices = stages.run(f"loading {args.slice}", load)
    topology = ftmesh.Topology.from_devices(
        devices, failed=args.failed, failed_links=args.failed_links, wrap=wrap
    )
    plan = stages.run(
        "planning",
        lambda: ftmesh.plan(
            topology,
            args.algorithm,
            payload_bytes=payload_bytes,
            link=network_for(topology),
            with_idle=args.idle,
            executor=args.executor,
        ),
    )
    report = stages.run("compiling", lambda: compile_report(plan, payload_bytes, bundles=bundles))
    if args.json:
        print(json.dumps(report.as_dict(), indent=2))
        return
    print(report)
    if topology.wrap_source:
        print(f"  {topology.wrap_source}")
    print(stages)
