"""``ftmesh view``: a page that plays schedules, as a file or from a local server."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from typing import Any

from ftmesh.cli import arguments
from ftmesh.command_line import whole_number
from ftmesh.errors import ArgumentError, PlanError
from ftmesh.files import check_output_files, write_text
from ftmesh.planning.selection import ALGORITHMS, AUTO
from ftmesh.schedule.files import load
from ftmesh.topology.topology import Topology
from ftmesh.units import parse_bytes
from ftmesh.view.page import ALL, build_scene, build_schedule_scene, render_page

DEFAULT_OUT = "view.html"
MAX_PORT = 65535
MAX_CHIPS_WITH_LOSSES = 16  # up to this size a file has a plan for the loss of each chip


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "view",
        help="play schedules in a browser: click chips to fail them, watch chunks travel",
        description="Write a page that plays schedules in a browser, round by round, with their "
        "costs; one file that needs no network. With --serve, serve a page on this machine that "
        "plans again when you click chips and links to fail them. MESH may also be a saved "
        "schedule, FILE.npz.",
        epilog="examples: ftmesh view 8x8 --failed 2x2@2,2 --out view.html; ftmesh view 8x8 "
        "--serve",
    )
    arguments.add_mesh(parser)
    text = "schedules to show (default: all that work; with --serve auto, and others when selected)"
    arguments.add_algorithm(parser, text, (ALL, *ALGORITHMS), None)
    arguments.add_payload(parser)
    arguments.add_network(parser)
    devices = "devices per chip, 1 or 2"
    arguments.add_option(parser, "--devices", "N", devices, 1, whole_number(1, 2))
    out = f"the file to write (default: {DEFAULT_OUT})"
    arguments.add_option(parser, "--out", "FILE.html", out)
    port = whole_number(0, MAX_PORT)
    text = "serve the page on 127.0.0.1 until interrupted, on this port or a free one"
    parser.add_argument("--serve", metavar="PORT", nargs="?", type=port, const=0, help=text)


def run(args: argparse.Namespace) -> None:
    """Plan, and write or serve the page."""
    if args.serve is not None and args.out:
        raise ArgumentError("--out writes a file and --serve serves a page: give one of the two")
    out = args.out or DEFAULT_OUT
    if args.serve is None:
        check_output_files(out)
    stages = arguments.Stages()
    if args.mesh.endswith(".npz"):
        scenes = [stages.run("loading", _from_file, args)]
    else:
        scenes = _planned(args, stages)
    if args.serve is not None:
        _serve(args, scenes[0])
        return
    write_text(out, render_page(scenes, options=_options(args)))
    first = scenes[0]
    number = sum("schedule" in entry for entry in first["algorithms"])
    print(f"{first['mesh']['name']}: {first['shown']} is shown first, of {number} that work")
    print(f"{stages}\nwrote {out}")


def _planned(args: argparse.Namespace, stages: arguments.Stages) -> list[dict[str, Any]]:
    """Build the scene of the mesh; for a file and a small mesh, also those with one chip less."""
    topology = replace(arguments.topology_of(args), devices_per_chip=args.devices)
    algorithm = args.algorithm or (ALL if args.serve is None else AUTO)
    scenes = [stages.run("planning", _scene, args, topology, algorithm)]
    if args.serve is None and topology.num_live <= MAX_CHIPS_WITH_LOSSES:
        scenes += stages.run("planning for lost chips", _losses, args, topology)
    return scenes


def _from_file(args: argparse.Namespace) -> dict[str, Any]:
    has_options = args.failed or args.failed_links or args.wrap or args.algorithm
    if has_options or args.devices > 1:
        raise ArgumentError(f"{args.mesh} already describes its mesh: leave out the other options")
    return build_schedule_scene(load(args.mesh), **_costs(args))


def _serve(args: argparse.Namespace, first: dict[str, Any]) -> None:
    from ftmesh.view.server import Server  # http.server is slow to import

    network = arguments.network_of(args)
    server = Server(first, network=network, options=_options(args), port=args.serve)
    print(f"{server.address}\nopen this address in a browser; press Ctrl-C to stop", flush=True)
    try:
        server.run()
    except KeyboardInterrupt:
        print("stopped")


def _scene(args: argparse.Namespace, topology: Topology, algorithm: str) -> dict[str, Any]:
    return build_scene(topology, algorithm, **_costs(args))


def _costs(args: argparse.Namespace) -> dict[str, Any]:
    return {"payload_bytes": parse_bytes(args.payload), "network": arguments.network_of(args)}


def _losses(args: argparse.Namespace, topology: Topology) -> list[dict[str, Any]]:
    """Build the scenes of the mesh without each chip in turn, where the rest is connected."""
    scenes = []
    for coord in topology.coords:
        try:
            scenes.append(_scene(args, topology.with_failed([coord]), AUTO))
        except PlanError:
            continue
    return scenes


def _options(args: argparse.Namespace) -> str:
    """The options about links, as given."""
    given = [("--tpu", arguments.generation_of(args))]
    given += [(f"--{name}", getattr(args, name)) for name in ("link", "latency", "overhead")]
    words = [word for name, value in given if value for word in (name, value)]
    return shlex.join(words + ["--wires-only"] * args.wires_only)
