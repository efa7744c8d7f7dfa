"""``ftmesh compile``: what the TPU compiler makes of a plan, without a TPU."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace

import ftmesh
from ftmesh.algorithms import registry
from ftmesh.cli.arguments import Stages, add_algorithm, add_damage, add_executor, add_payload
from ftmesh.cost.links import network_for
from ftmesh.errors import ArgumentError
from ftmesh.execute.lowering import PPERMUTE
from ftmesh.planning.selection import AUTO
from ftmesh.schedule.schedule import Schedule
from ftmesh.topology.topology import Topology
from ftmesh.units import parse_bytes


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "compile",
        help="compile a plan for a TPU slice, without a TPU",
        description="Compile the all-reduce of a plan for a TPU slice and say what came out: "
        "whether the compiler takes it, its memory, whether the permutations of a round travel "
        "together, and what it estimates for all that is done beside them. Needs libtpu (pip "
        "install libtpu, x86_64 Linux), and no TPU.",
        epilog="example: ftmesh compile v6e:16x16 --failed 2x2@2,2 --algorithm row_pair",
    )
    parser.add_argument("slice", metavar="SLICE", help="TPU generation and shape: v6e:16x16")
    add_damage(parser)
    add_algorithm(parser)
    add_executor(parser)
    add_payload(parser)
    parser.add_argument(
        "--idle",
        action="store_true",
        help="keep the failed chips in the program, idle: for v5e, which insists on whole slices",
    )
    parser.add_argument(
        "--in-vmem",
        action="store_true",
        help="let payloads below 112 MiB stay in the VMEM of a v6e, and not only below 98: rounds "
        "are cheaper, and whatever else a step computes has less of it",
    )
    parser.add_argument(
        "--fit",
        action="store_true",
        help="compile every algorithm that serves the slice, or --algorithm, for --payload and a "
        "tenth of it, and fit what a round costs by lanes and bytes: so the executors of "
        "'ftmesh simulate --tpu' were found",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> None:
    """Plan for the slice, compile, and report."""
    payload_bytes = parse_bytes(args.payload)
    if args.fit and args.executor != PPERMUTE:
        raise ArgumentError(
            "--fit reads rounds of permutations, and a kernel has none: leave --executor out"
        )
    from ftmesh.tpu.compile_report import CompileReport, compile_report
    from ftmesh.tpu.device_model_fit import fit
    from ftmesh.tpu.slices import tpu_devices

    stages = Stages()
    devices = stages.run(f"loading {args.slice}", lambda: tpu_devices(args.slice))
    topology = ftmesh.Topology.from_devices(
        devices, failed=args.failed, failed_links=args.failed_links
    )

    on = network_for(topology)

    def report_of(algorithm: str, payload_bytes: int) -> CompileReport:
        plan = stages.run(
            "planning",
            lambda: ftmesh.plan(
                topology,
                algorithm,
                payload_bytes=payload_bytes,
                link=on,
                with_idle=args.idle,
                executor=args.executor,
            ),
        )
        return stages.run(
            "compiling",
            lambda: compile_report(plan, payload_bytes, in_vmem=args.in_vmem),
        )

    if args.fit:
        algorithms = _able(topology) if args.algorithm == AUTO else [args.algorithm]
        sizes = (payload_bytes // 10, payload_bytes)
        found = fit([report_of(name, size) for name in algorithms for size in sizes])
        print(json.dumps(asdict(found), indent=2) if args.json else f"{topology}\n{found}")
        return
    report = report_of(args.algorithm, payload_bytes)
    print(json.dumps(report.as_dict(), indent=2) if args.json else f"{report}\n{stages}")


def _able(topology: Topology) -> list[str]:
    """The algorithms that serve a mesh."""
    outcomes = registry.try_algorithms(topology).items()
    return [name for name, outcome in outcomes if isinstance(outcome, Schedule)]
