"""``ftmesh limits``: how fast a collective could be on a mesh, and what holds it up."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from ftmesh.cli.arguments import (
    Stages,
    add_mesh,
    add_network,
    add_payload,
    add_tile,
    mesh_summary,
    network_of,
    topology_of,
)
from ftmesh.cost.links import Network
from ftmesh.cost.lower_bounds import Limits, limits
from ftmesh.cost.references import yardsticks
from ftmesh.cost.round_bounds import MOST_CHIPS
from ftmesh.topology.notation import Coord
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Topology
from ftmesh.units import format_bytes, format_time, parse_bytes


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "limits",
        help="the least time that any schedule could take, and where the damage hurts",
        description="Find the least time that any all-gather, reduce-scatter or all-reduce could "
        "take on a mesh, exactly, and show the chips and links that decide it.",
        epilog="example: ftmesh limits 16x32 --failed 4x2@2,2 --payload 100MB --link 50GB/s",
    )
    add_mesh(parser)
    add_tile(parser)
    add_payload(parser)
    add_network(parser)
    parser.add_argument("--json", action="store_true", help="print the limits as JSON")


def run(args: argparse.Namespace) -> None:
    """Find the limits and say what they are."""
    topology, network = topology_of(args), network_of(args)
    payload_bytes = parse_bytes(args.payload)
    stages = Stages()
    found = stages.run("finding the limits", lambda: limits(topology))
    times = stages.run("bounding rounds", lambda: _times(found, payload_bytes, network))
    if args.json:
        print(json.dumps(summary(found, times), indent=2))
        return
    print(found)
    pictures = _pictures(found)
    for title, groups in pictures:
        print(f"{title}:\n{drawing(topology, groups)}")
    if pictures:
        print("o alone   a . together with their like   X failed   - | links between parts")
    if isinstance(topology, TiledTopology):
        print(topology.describe())
    print(f"at least, for {format_bytes(payload_bytes)} over {network}:")
    gather = found.all_gather_seconds(payload_bytes, network.bandwidth)
    print(f"  all-gather, or reduce-scatter    {format_time(gather)}")
    print(f"  reduce-scatter, then all-gather  {format_time(2 * gather)}")
    print(f"  all-reduce                       {_shown(times['all_reduce_us'])}")
    print(f"  any of them, by latency alone    {_shown(times['latency_floor_us'])}")
    if not isinstance(topology, TiledTopology):
        print(f"  all-reduce, in rounds            {_shown(times['all_reduce_rounds_us'])}")
        print(f"  all-reduce, in rounds, by trees  {_shown(times['all_reduce_trees_us'])}")
    if network.device_model:
        floor = _shown(times["executor_floor_us"])
        print(f"  all-reduce, in the executor      {floor}, if wires took no time")
    print(stages)


def _times(found: Limits, payload_bytes: int, network: Network) -> dict[str, float | None]:
    """The bounds in microseconds, each for its own reason alone; None for what is left out."""
    seconds: dict[str, float | None] = {
        "all_gather_us": found.all_gather_seconds(payload_bytes, network.bandwidth),
        "all_reduce_us": found.all_reduce_seconds(payload_bytes, network.bandwidth),
        "latency_floor_us": found.latency_seconds(network.latency, network.overhead),
    }
    if not isinstance(found.topology, TiledTopology):
        beside = yardsticks(found, payload_bytes, network)
        seconds |= {"all_reduce_rounds_us": beside.rounds, "all_reduce_trees_us": beside.trees}
    if network.device_model:
        seconds["executor_floor_us"] = network.device_model.floor_seconds(payload_bytes)
    return {name: None if each is None else 1e6 * each for name, each in seconds.items()}


def _shown(microseconds: float | None) -> str:
    if microseconds is None:
        return f"left out: it takes long for more than {MOST_CHIPS:,} chips"
    return format_time(microseconds / 1e6)


def summary(found: Limits, times: dict[str, float | None]) -> dict[str, Any]:
    """What a program would want to know of the limits."""
    return {
        **mesh_summary(found.topology),
        "links": found.links,
        "strength": None if found.strength is None else float(found.strength),
        **times,
        "diameter": found.diameter,
        "all_gather_share": str(found.all_gather),
        "all_reduce_share": str(found.all_reduce),
        "why_all_gather": found.why_all_gather,
        "why_all_reduce": found.why_all_reduce,
    }


def _pictures(found: Limits) -> list[tuple[str, list[tuple[Coord, ...]]]]:
    """What to draw: bottlenecks of a 2-D mesh that take a picture to see."""
    pictures = []
    if len(found.topology.shape) == 2:
        if len(found.cut) > 1:
            pictures.append(("all-gather is held up here", [found.cut]))
        if len(found.partition[0]) > 1 < len(found.partition):
            pictures.append(("all-reduce is held up here", list(found.partition[1:])))
    return pictures


def drawing(topology: Topology, groups: Sequence[Sequence[Coord]]) -> str:
    """The chips of `groups` and those beside them, with only the links between different groups.

    A chip that is a group of its own is ``o``, those of a larger group share a letter, and the rest
    of the mesh is one group, drawn as dots. A link over the edge leaves at the right or the bottom.
    """
    letters = iter("abcdefghijklmnpqrstuvwyz" * len(groups))
    group, marks = {}, dict.fromkeys(topology.failed, "X")
    for number, chips in enumerate(groups):
        group.update(dict.fromkeys(chips, number))
        marks.update(dict.fromkeys(chips, "o" if len(chips) == 1 else next(letters)))
    near = {place for chip in group for place in (chip, *topology.neighbours(chip))}
    columns, rows = (
        range(max(min(line) - 1, 0), min(max(line) + 2, size))
        for line, size in zip(zip(*near, strict=True), topology.shape, strict=True)
    )
    lines = [f"x {columns[0]} to {columns[-1]}, y {rows[0]} to {rows[-1]}"]
    for y in rows:
        across = down = ""
        for x in columns:
            right, below = (
                topology.is_link((x, y), there) and group.get((x, y)) != group.get(there)
                for there in _onward(topology, (x, y))
            )
            across += marks.get((x, y), ".") + " -"[right]
            down += " |"[below] + " "
        lines += [across, down]
    return "\n".join(f"  {line.rstrip()}" for line in lines if line.strip())


def _onward(topology: Topology, chip: Coord) -> list[Coord]:
    """The places after `chip` along x and along y, over the edge where an axis is long enough."""
    places = []
    for axis, size in enumerate(topology.shape):
        place = list(chip)
        if place[axis] + 1 < size or size > 2:
            place[axis] = (place[axis] + 1) % size
        places.append(tuple(place))
    return places
