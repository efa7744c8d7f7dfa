"""``ftmesh limits``: how fast a collective could be on a mesh, and what limits it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from ftmesh.cli import arguments
from ftmesh.cost.links import Network
from ftmesh.cost.lower_bounds import Limits, limits
from ftmesh.cost.references import reference_times
from ftmesh.cost.round_bounds import MAX_CHIPS
from ftmesh.topology.notation import Coord
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Topology
from ftmesh.units import format_bytes, format_time, parse_bytes


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "limits",
        help="the least time that any schedule could take, and the bottleneck",
        description="Compute the least time that any all-gather, reduce-scatter or all-reduce "
        "could take on a mesh, exactly, and show the chips and links that are the bottleneck.",
        epilog="example: ftmesh limits 16x32 --failed 4x2@2,2 --payload 100MB --link 50GB/s",
    )
    arguments.add_mesh(parser)
    arguments.add_tile(parser)
    arguments.add_payload(parser)
    arguments.add_network(parser)
    parser.add_argument("--json", action="store_true", help="print the limits as JSON")


def run(args: argparse.Namespace) -> None:
    """Compute the limits and print them."""
    topology, network = arguments.topology_of(args), arguments.network_of(args)
    payload_bytes = parse_bytes(args.payload)
    stages = arguments.Stages()
    bounds = stages.run("finding the limits", limits, topology)
    times = stages.run("bounding rounds", _times, bounds, payload_bytes, network)
    if args.json:
        print(json.dumps(summary(bounds, times), indent=2))
        return
    print(bounds)
    if topology.physical.wrap_source:
        print(topology.physical.wrap_source)
    bottlenecks = _bottlenecks(bounds)
    for title, groups in bottlenecks:
        print(f"{title}:\n{drawing(topology, groups)}")
    if bottlenecks:
        print("o one chip   a, . groups of chips   X failed   - | links between groups")
    if isinstance(topology, TiledTopology):
        print(topology.describe())
    print(f"at least, for {format_bytes(payload_bytes)} over {network}:")
    gather = bounds.all_gather_seconds(payload_bytes, network.bandwidth)
    print(f"  all-gather, or reduce-scatter    {format_time(gather)}")
    print(f"  reduce-scatter, then all-gather  {format_time(2 * gather)}")
    print(f"  all-reduce                       {_format_us(times['all_reduce_us'])}")
    print(f"  any of them, by latency alone    {_format_us(times['latency_floor_us'])}")
    if not isinstance(topology, TiledTopology):
        print(f"  all-reduce, in rounds            {_format_us(times['all_reduce_rounds_us'])}")
        print(f"  all-reduce, in rounds, by trees  {_format_us(times['all_reduce_trees_us'])}")
    if network.device_model:
        floor = _format_us(times["executor_floor_us"])
        print(f"  in permutations, device time     {floor}, if the links took no time")
    print(stages)


def _times(bounds: Limits, payload_bytes: int, network: Network) -> dict[str, float | None]:
    """The bounds in microseconds, each for one reason alone; None if not computed."""
    seconds: dict[str, float | None] = {
        "all_gather_us": bounds.all_gather_seconds(payload_bytes, network.bandwidth),
        "all_reduce_us": bounds.all_reduce_seconds(payload_bytes, network.bandwidth),
        "latency_floor_us": bounds.latency_seconds(network.latency, network.overhead),
    }
    if not isinstance(bounds.topology, TiledTopology):
        references = reference_times(bounds, payload_bytes, network)
        seconds["all_reduce_rounds_us"] = references.rounds_bound
        seconds["all_reduce_trees_us"] = references.tree_bound
    if network.device_model:
        seconds["executor_floor_us"] = network.device_model.lower_bound_seconds(payload_bytes)
    return {name: None if s is None else 1e6 * s for name, s in seconds.items()}


def _format_us(microseconds: float | None) -> str:
    if microseconds is None:
        return f"not computed: too slow for more than {MAX_CHIPS:,} chips"
    return format_time(microseconds / 1e6)


def summary(bounds: Limits, times: dict[str, float | None]) -> dict[str, Any]:
    """Describe the limits as JSON values."""
    return {
        **arguments.mesh_summary(bounds.topology),
        "links": bounds.links,
        "strength": None if bounds.strength is None else float(bounds.strength),
        **times,
        "diameter": bounds.diameter,
        "all_gather_share": str(bounds.all_gather),
        "all_reduce_share": str(bounds.all_reduce),
        "why_all_gather": bounds.why_all_gather,
        "why_all_reduce": bounds.why_all_reduce,
    }


def _bottlenecks(bounds: Limits) -> list[tuple[str, list[tuple[Coord, ...]]]]:
    """The bottlenecks of a 2D mesh that are worth drawing."""
    bottlenecks = []
    if len(bounds.topology.shape) == 2:
        if len(bounds.cut) > 1:
            bottlenecks.append(("bottleneck of all-gather", [bounds.cut]))
        if len(bounds.partition[0]) > 1 < len(bounds.partition):
            bottlenecks.append(("bottleneck of all-reduce", list(bounds.partition[1:])))
    return bottlenecks


def drawing(topology: Topology, groups: Sequence[Sequence[Coord]]) -> str:
    """Draw the chips of `groups` and their neighbours, with only the links between groups.

    A group of one chip is ``o``, the chips of a larger group share a letter, and the rest of the
    mesh is one group, drawn as dots. A wrapping link leaves at the right or the bottom.
    """
    letters = iter("abcdefghijklmnpqrstuvwyz" * len(groups))
    group, marks = {}, dict.fromkeys(topology.failed, "X")
    for number, chips in enumerate(groups):
        group.update(dict.fromkeys(chips, number))
        marks.update(dict.fromkeys(chips, "o" if len(chips) == 1 else next(letters)))
    near = {coord for chip in group for coord in (chip, *topology.neighbours(chip))}
    columns, rows = (
        range(max(min(line) - 1, 0), min(max(line) + 2, size))
        for line, size in zip(zip(*near, strict=True), topology.shape, strict=True)
    )
    lines = [f"x {columns[0]} to {columns[-1]}, y {rows[0]} to {rows[-1]}"]
    for y in rows:
        across = down = ""
        for x in columns:
            crosses_right, crosses_below = (
                topology.is_link((x, y), there) and group.get((x, y)) != group.get(there)
                for there in _next_coords(topology, (x, y))
            )
            across += marks.get((x, y), ".") + " -"[crosses_right]
            down += " |"[crosses_below] + " "
        lines += [across, down]
    return "\n".join(f"  {line.rstrip()}" for line in lines if line.strip())


def _next_coords(topology: Topology, chip: Coord) -> list[Coord]:
    """The coords after `chip` along x and y, around the edge if the axis is longer than 2."""
    x, y = (
        i if i + 1 == size <= 2 else (i + 1) % size
        for i, size in zip(chip, topology.shape, strict=True)
    )
    return [(x, chip[1]), (chip[0], y)]
