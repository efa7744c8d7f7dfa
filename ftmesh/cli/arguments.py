"""Arguments that several commands take, and what they share in carrying them out."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ftmesh.algorithms import registry
from ftmesh.command_line import say
from ftmesh.cost.links import DEFAULT, NETWORKS, Network, network
from ftmesh.errors import ArgumentError
from ftmesh.execute.lowering import EXECUTORS, PPERMUTE
from ftmesh.planning.selection import ALGORITHMS, AUTO
from ftmesh.topology.notation import parse_shape
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Topology
from ftmesh.units import format_rate, format_time, parse_rate

T = TypeVar("T")


def add_mesh(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """MESH, --failed, --failed-links, --wrap."""
    parser.add_argument(
        "mesh", metavar="MESH", nargs="?" if optional else None, help="shape, x first: 16x32, 4x4x8"
    )
    add_damage(parser)
    parser.add_argument("--wrap", metavar="AXES", default="", help="axes that wrap: 'x', 'xyz'")


def add_damage(parser: argparse.ArgumentParser) -> None:
    """--failed, --failed-links."""
    parser.add_argument(
        "--failed",
        metavar="BLOCKS",
        help="failed chips: '4x2@6,14' or '2x2@2,2;2x2@8,4', on three axes '2x2x1@0,0,4' "
        "(default: the environment variable FTMESH_FAILED)",
    )
    parser.add_argument(
        "--failed-links", metavar="LINKS", default="", help="failed links: '3,2-4,2;0,0-0,1'"
    )


def add_tile(parser: argparse.ArgumentParser) -> None:
    """--tile."""
    parser.add_argument(
        "--tile",
        metavar="SHAPE",
        help="cut the mesh into tiles, as 2x2: each is a model group and one rank, and fails with "
        "any of its chips (default: every chip is a rank)",
    )


def add_algorithm(parser: argparse.ArgumentParser) -> None:
    """--algorithm."""
    parser.add_argument(
        "--algorithm",
        choices=ALGORITHMS,
        default="auto",
        help="how to sum: auto is the fastest of the others by simulation, but looks at tree only "
        "for TPU v3 to v6e and where no other serves; best looks at it wherever it could be "
        "faster, and takes longer to plan (default: auto)",
    )


def add_executor(parser: argparse.ArgumentParser) -> None:
    """--executor."""
    parser.add_argument(
        "--executor",
        choices=(AUTO, *EXECUTORS),
        default=PPERMUTE,
        help="what runs the rounds: permutations, or one Pallas kernel, or what takes less of them "
        "by a model that nobody has measured (default: %(default)s)",
    )


def add_payload(parser: argparse.ArgumentParser) -> None:
    """--payload."""
    parser.add_argument(
        "--payload",
        metavar="SIZE",
        default="100MB",
        help="bytes to sum, as 100MB or 64KiB (default: 100MB)",
    )


def add_network(parser: argparse.ArgumentParser) -> None:
    """--tpu, --link, --latency, --overhead, --wires-only."""
    parser.add_argument(
        "--tpu",
        choices=NETWORKS,
        help="take the published link rate of a TPU generation, 1us a hop, and what ftmesh's "
        "executor costs there, where it is known",
    )
    parser.add_argument(
        "--link",
        metavar="RATE",
        help=f"bytes per second of a link, each way (default: {format_rate(DEFAULT.bandwidth)})",
    )
    parser.add_argument(
        "--latency", metavar="TIME", help=f"per hop (default: {format_time(DEFAULT.latency)})"
    )
    parser.add_argument(
        "--overhead", metavar="TIME", help="per transfer at its sender (default: none)"
    )
    parser.add_argument(
        "--wires-only", action="store_true", help="leave out what the executor of --tpu costs"
    )


def network_of(args: argparse.Namespace) -> Network:
    """The network that the arguments of `add_network` describe."""
    base = network(args.tpu or DEFAULT, args.latency, args.overhead)
    if args.link:
        base = replace(base, bandwidth=parse_rate(args.link), source="as given")
    return base.wires if args.wires_only else base


def topology_of(args: argparse.Namespace) -> Topology:
    """The topology that the arguments of `add_mesh` describe, in tiles where `add_tile`'s say."""
    axes = "xyz"[: len(parse_shape(args.mesh))]
    wrong = sorted(set(args.wrap) - set(axes))
    if wrong:
        raise ArgumentError(f"--wrap {args.wrap}: mesh {args.mesh} has no axis {wrong[0]!r}")
    chips = Topology.grid(
        args.mesh,
        failed=args.failed,
        failed_links=args.failed_links,
        wrap=[axis in args.wrap for axis in axes],
    )
    tile = getattr(args, "tile", None)
    topology = chips if tile is None else TiledTopology.of(chips, tile)
    registry.check_size(topology)
    return topology


def mesh_summary(topology: Topology) -> dict[str, Any]:
    """What a program would want to know of a mesh; `live` counts ranks, which may be tiles."""
    chips = {"mesh": topology.wires.name, "failed": sorted(topology.wires.failed)}
    summary: dict[str, Any] = {**chips, "live": topology.num_live}
    if isinstance(topology, TiledTopology):
        summary |= {
            "tile": topology.tile,
            "positions": topology.num_positions,
            "failed_tiles": sorted(topology.failed),
            "wasted": topology.num_wasted,
        }
    return summary


class Stages:
    """Says on a terminal what long work is under way, and remembers how long each part took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, name: str, work: Callable[[], T]) -> T:
        """Do `work`, under the name of what is being done."""
        shown = sys.stderr is not None and sys.stderr.isatty()
        if shown:
            print(f"{name} ...", end="", file=sys.stderr, flush=True)
        start = time.perf_counter()
        try:
            return work()
        finally:
            self.seconds[name] = time.perf_counter() - start
            if shown:
                print("\r\033[K", end="", file=sys.stderr, flush=True)

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())


class Progress:
    """A bar on a terminal; elsewhere a line every ten seconds, so that nobody waits in silence."""

    EVERY = 10.0  # seconds

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, done: int, total: int, what: str = "") -> None:
        """So much is done, and `what` comes next."""
        if sys.stderr is None:
            return
        if sys.stderr.isatty():
            filled = 30 * done // total
            bar = "#" * filled + "." * (30 - filled)
            end = "\r\033[K" if done == total else ""
            print(
                f"\r\033[K[{bar}] {done}/{total} {what}{end}", end="", file=sys.stderr, flush=True
            )
        elif done < total and time.monotonic() - self._said >= self.EVERY:
            self._said = time.monotonic()
            say(f"{done}/{total} {what}")
