"""``ftmesh plan``: plan and verify an all-reduce for a damaged mesh."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import ftmesh
from ftmesh.cli import arguments
from ftmesh.command_line import whole_number
from ftmesh.draw import draw_svg, schedule_panels
from ftmesh.files import check_output_files, write_text
from ftmesh.planning.plan import Plan
from ftmesh.units import parse_bytes


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "plan",
        help="plan an all-reduce on a mesh and prove it correct",
        description="Plan an all-reduce on a mesh, prove it correct, and describe it.",
        epilog="example: ftmesh plan 16x32 --failed 4x2@6,14 --out plan.npz --svg plan.svg",
    )
    arguments.add_mesh(parser)
    arguments.add_tile(parser)
    arguments.add_algorithm(parser)
    arguments.add_payload(parser)
    arguments.add_network(parser)
    parser.add_argument("--explain", action="store_true", help="also show what all algorithms cost")
    parser.add_argument("--out", metavar="FILE.npz", help="save the schedule")
    parser.add_argument("--svg", metavar="FILE.svg", help="draw the phases as SVG")
    text = "also list the transfers of round R"
    arguments.add_option(parser, "--round", "R", text, type=whole_number(0))
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> None:
    """Plan, verify, and write the outputs."""
    check_output_files(args.out, args.svg)
    topology, network = arguments.topology_of(args), arguments.network_of(args)
    payload_bytes = parse_bytes(args.payload)
    stages = arguments.Stages()
    make_plan = partial(ftmesh.plan, payload_bytes=payload_bytes, link=network)
    plan = stages.run("planning and proving", make_plan, topology, args.algorithm)
    round_text = None if args.round is None else plan.schedule.describe_round(args.round)
    if args.svg:
        drawing = stages.run("drawing", lambda: draw_svg(schedule_panels(plan.schedule)))
    if args.out:
        stages.run("saving", ftmesh.save, plan.schedule, args.out)
    if args.svg:
        write_text(args.svg, drawing)
    if args.json:
        print(json.dumps(summary(plan), indent=2))
        return
    print(plan)
    if round_text:
        print(round_text)
    if args.explain:
        print(plan.explain())
    print(plan.proof)
    print(stages)
    for path in filter(None, (args.out, args.svg)):
        print(f"wrote {path}")


def summary(plan: Plan) -> dict[str, Any]:
    """Describe a plan as JSON values."""
    schedule = plan.schedule
    return {
        "algorithm": plan.algorithm,
        **arguments.mesh_summary(plan.topology),
        "payload_bytes": plan.payload_bytes,
        "rounds": schedule.num_rounds,
        "rounds_in_reduce_scatter": getattr(schedule, "rounds_in_reduce_scatter", 0),
        "chunks": schedule.num_chunks,
        "neighbour_only": schedule.is_neighbour_only,
        "verified": plan.proof is not None,
        "phases": [
            {
                "name": phase.name,
                "rounds": phase.num_rounds,
                "lanes": len(phase.lanes),
                "busiest_link_bytes": plan.payload_bytes
                * max(schedule.link_loads(phase).values())
                / schedule.num_chunks,
            }
            for phase in schedule.phases
        ],
    }
