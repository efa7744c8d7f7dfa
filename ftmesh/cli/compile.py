"""``ftmesh compile``: compile a plan for a TPU slice, without a TPU."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

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
        description="Compile the all-reduce of a plan for a TPU slice and report: whether the "
        "compiler accepts it, its memory, whether the permutations of a round run at once, and the "
        "compiler's estimate for everything besides them. Needs libtpu (pip install libtpu, x86_64 "
        "Linux), and no TPU.",
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
        help="keep the failed chips in the program, idle: for v5e, which needs whole slices",
    )
    parser.add_argument(
        "--fit",
        action="store_true",
        help="compile --algorithm, or every algorithm that supports the slice, for --payload and a "
        "tenth of it, and fit the cost of a round by lanes and bytes: the device models of "
        "'ftmesh simulate --tpu' are such fits",
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
    from ftmesh.tpu.device_model_fit import fit_device_model
    from ftmesh.tpu.slices import tpu_devices

    stages = Stages()
    devices = stages.run(f"loading {args.slice}", lambda: tpu_devices(args.slice))
    topology = ftmesh.Topology.from_devices(
        devices, failed=args.failed, failed_links=args.failed_links
    )
    network = network_for(topology)

    def report(algorithm: str, payload_bytes: int) -> CompileReport:
        plan = stages.run(
            "planning",
            lambda: ftmesh.plan(
                topology,
                algorithm,
                payload_bytes=payload_bytes,
                link=network,
                with_idle=args.idle,
                executor=args.executor,
            ),
        )
        return stages.run("compiling", lambda: compile_report(plan, payload_bytes))

    if args.fit:
        algorithms = _supporting(topology) if args.algorithm == AUTO else [args.algorithm]
        sizes = (payload_bytes // 10, payload_bytes)
        fit = fit_device_model([report(name, size) for name in algorithms for size in sizes])
        print(json.dumps(asdict(fit), indent=2) if args.json else f"{topology}\n{fit}")
        return
    single = report(args.algorithm, payload_bytes)
    print(json.dumps(single.as_dict(), indent=2) if args.json else f"{single}\n{stages}")


def _supporting(topology: Topology) -> list[str]:
    """The algorithms that support a topology."""
    outcomes = registry.try_algorithms(topology).items()
    return [name for name, outcome in outcomes if isinstance(outcome, Schedule)]
