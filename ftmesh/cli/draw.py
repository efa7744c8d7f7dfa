"""``ftmesh draw``: draw a schedule on the terminal or as SVG."""

from __future__ import annotations

import argparse
import sys

import ftmesh
from ftmesh.cli.arguments import (
    add_algorithm,
    add_mesh,
    add_option,
    add_tile,
    generation_of,
    topology_of,
)
from ftmesh.command_line import whole_number
from ftmesh.draw import Panel, draw_svg, draw_text, figure, phase_panel, schedule_panels
from ftmesh.errors import ArgumentError
from ftmesh.files import check_output_files, write_text


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "draw",
        help="draw a schedule, or one of the paper's figures",
        description="Draw the phases of a schedule, on the terminal or as SVG. MESH may also be a "
        "saved schedule, FILE.npz.",
        epilog="examples: ftmesh draw 8x8 --failed 2x2@2,2 --phase 0; ftmesh draw 4x4x4 --wrap xyz "
        "--algorithm multi_ring --phase 0 --lane 0; ftmesh draw --figure 9 --svg figure-9.svg",
    )
    add_mesh(parser, optional=True)
    add_tile(parser)
    add_algorithm(parser)
    for name, metavar, text in (
        ("--phase", "K", "only phase K, counted from 0"),
        ("--round", "R", "only round R of phase K"),
        ("--lane", "L", "only lane L of phase K: one direction of one of its rings"),
        ("--figure", "N", "figure N of Kumar and Jouppi (2020), 1 to 10"),
    ):
        add_option(parser, name, metavar, text, type=whole_number(0))
    half = "only one half of the payload: one direction of a ring"
    parser.add_argument("--half", type=whole_number(0, 1), choices=(0, 1), help=half)
    add_option(parser, "--svg", "FILE.svg", "write an SVG instead of text")


def run(args: argparse.Namespace) -> None:
    """Draw the schedule or figure."""
    check_output_files(args.svg)
    panels = _panels(args)
    if args.svg:
        write_text(args.svg, draw_svg(panels))
        print(f"wrote {args.svg}")
    else:
        colour = sys.stdout.isatty()
        print("\n\n".join(draw_text(panel, colour=colour) for panel in panels))


def _panels(args: argparse.Namespace) -> list[Panel]:
    describes_mesh = (
        args.failed or args.failed_links or args.wrap or args.tile or args.algorithm != "auto"
    )
    narrowed = {"round": args.round, "lane": args.lane, "half": args.half}
    if args.figure is not None:
        given = [args.mesh, args.phase, *narrowed.values()]
        if describes_mesh or any(value is not None for value in given):
            raise ArgumentError(
                "the mesh of a figure of the paper is fixed: give --figure alone, or with --svg"
            )
        return figure(args.figure)
    if args.mesh is None:
        raise ArgumentError("give a MESH such as 8x8, a FILE.npz, or --figure N")
    for option in ("round", "lane"):
        if getattr(args, option) is not None and args.phase is None:
            raise ArgumentError(f"--{option} is counted within a phase: give --phase too")
    if args.mesh.endswith(".npz"):
        if describes_mesh:
            rule = "leave out the other options"
            raise ArgumentError(f"{args.mesh} already describes its mesh: {rule}")
        schedule = ftmesh.load(args.mesh)
    else:
        schedule = ftmesh.plan(topology_of(args), args.algorithm, link=generation_of(args)).schedule
    if args.phase is None:
        return schedule_panels(schedule, half=args.half)
    return [phase_panel(schedule, args.phase, **narrowed)]
