"""Arguments and progress displays that several commands share."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from ftmesh.algorithms import registry
from ftmesh.algorithms.registry import current_name
from ftmesh.command_line import say
from ftmesh.cost.links import DEFAULT, NETWORKS, Network, parse_network
from ftmesh.cost.profile import Profile
from ftmesh.errors import ArgumentError
from ftmesh.execute.lowering import EXECUTORS
from ftmesh.planning.profiles import find_costs, is_profile_path
from ftmesh.planning.selection import ALGORITHMS, AUTO
from ftmesh.topology import damage
from ftmesh.topology.damage import CoordFrame, environment_failed_chips
from ftmesh.topology.devices import (
    TPU_GENERATIONS,
    WRAP_AS_GIVEN,
    check_slice,
    describe_slice_wraps,
    slice_wraps,
    tpu_generation,
)
from ftmesh.topology.notation import parse_links, parse_shape, parse_wrap_axes
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Topology
from ftmesh.units import format_rate, format_time, parse_rate

P = ParamSpec("P")
T = TypeVar("T")
_CLEAR = "\r\033[K"  # the line of a terminal


def add_option(
    parser: ArgumentParser, name: str, metavar: str, text: str, default: Any = None, type: Any = str
) -> None:
    """Add an option that takes a value, with its default in the help text."""
    if default not in (None, ""):
        text += f" (default: {default})"
    parser.add_argument(name, metavar=metavar, type=type, default=default, help=text)


def add_mesh(parser: ArgumentParser, *, optional: bool = False) -> None:
    """Add MESH, --failed, --failed-links and --wrap."""
    text = "mesh shape, x first, such as 16x32 or 4x4x8, or a TPU slice, such as v6e:16x16"
    parser.add_argument("mesh", metavar="MESH", nargs="?" if optional else None, help=text)
    add_damage(parser)
    add_wrap(parser)


def add_wrap(parser: ArgumentParser) -> None:
    """Add --wrap."""
    text = (
        "axes that wrap around, 'x' or 'xyz', or 'none' (default: those of such a slice of TPUs, "
        "where the generation is given, and else none)"
    )
    add_option(parser, "--wrap", "AXES", text)


def add_damage(parser: ArgumentParser) -> None:
    """Add --failed and --failed-links."""
    blocks = "'4x2@6,14' or '2x2@2,2;2x2@8,4', in 3D '2x2x1@0,0,4'"
    default = "(default: the environment variable FTMESH_FAILED)"
    add_option(parser, "--failed", "BLOCKS", f"failed chips, as blocks: {blocks} {default}")
    add_option(parser, "--failed-links", "LINKS", "failed links: '3,2-4,2;0,0-0,1'", "")


def add_tile(parser: ArgumentParser) -> None:
    """Add --tile."""
    text = (
        "divide the mesh into tiles of this shape, such as 2x2; a tile is one rank, for example a "
        "model-parallel group, and fails with any of its chips (default: every chip is a rank)"
    )
    add_option(parser, "--tile", "SHAPE", text)


def add_algorithm(
    parser: ArgumentParser,
    text: str = "all-reduce algorithm; auto, the default, is the fastest of them by simulation",
    choices: tuple[str, ...] = ALGORITHMS,
    default: str | None = AUTO,
) -> None:
    """Add --algorithm."""
    parser.add_argument(
        "--algorithm", type=current_name, choices=choices, default=default, help=text
    )


def algorithm_names(text: str | None) -> list[str]:
    """Return the algorithms that --algorithms lists, separated by commas; none without it."""
    names = [] if text is None else [current_name(name.strip()) for name in text.split(",")]
    for name in names:
        if name not in registry.ALGORITHMS:
            known = ", ".join(registry.ALGORITHMS)
            raise ArgumentError(f"--algorithms: there is no {name!r:.40}; choose from {known}")
    return names


def add_executor(parser: ArgumentParser) -> None:
    """Add --executor."""
    parser.add_argument(
        "--executor",
        choices=(AUTO, *EXECUTORS),
        default=AUTO,
        help="what runs the sum: XLA's own ring, rounds of ppermute, in loops or unrolled, or one "
        "Pallas kernel; auto takes xla or ppermute, the cheaper by simulation, and ppermute for a "
        "named algorithm (default: %(default)s)",
    )


def add_payload(parser: ArgumentParser) -> None:
    """Add --payload."""
    text = "bytes to sum on every chip, such as 100MB or 64KiB"
    add_option(parser, "--payload", "SIZE", text, "100MB")


def add_network(parser: ArgumentParser) -> None:
    """Add --tpu, --link, --latency, --overhead and --wires-only."""
    parser.add_argument(
        "--tpu",
        choices=NETWORKS,
        help="use the link rate of a TPU generation, measured or published, 1us per hop, the wrap "
        "links of such slices, and the cost of ftmesh's executor on it",
    )
    rate, latency = format_rate(DEFAULT.bandwidth), format_time(DEFAULT.latency)
    text = (
        "bytes per second of a link, each way, or the profile of this mesh, FILE.json, that ftmesh "
        f"selftest has written (default: {rate})"
    )
    add_option(parser, "--link", "RATE", text)
    add_option(parser, "--latency", "TIME", f"latency per hop (default: {latency})")
    add_option(parser, "--overhead", "TIME", "time per transfer at the sender (default: none)")
    parser.add_argument("--wires-only", action="store_true", help="ignore device time (with --tpu)")


def network_of(args: Namespace) -> Network:
    """Build the network from the arguments of `add_mesh` and `add_network`."""
    if args.link and is_profile_path(args.link):
        network = parse_network(_profile_network(args), args.latency, args.overhead)
        return network.wires_only if args.wires_only else network
    base = parse_network(generation_of(args) or DEFAULT, args.latency, args.overhead)
    if args.link:
        rate, spread = parse_rate(args.link), base.spread
        spread = spread and replace(spread, bandwidth=(rate, rate))
        base = replace(base, bandwidth=rate, source="as given", spread=spread)
    return base.wires_only if args.wires_only else base


def _profile_network(args: Namespace) -> Network:
    """The network of the profile that --link names, which must be of the mesh that is given."""
    profile, generation = Profile.load(args.link), generation_of(args)
    if generation and generation != tpu_generation(profile.device_kind):
        raise ArgumentError(
            f"--link {args.link} was measured on {profile.mesh_name}, and not on {generation}"
        )
    if args.mesh.endswith(".npz"):
        return profile.network()
    return find_costs(topology_of(args), profile).network


def topology_of(args: Namespace) -> Topology:
    """Build the topology from the arguments of `add_mesh`, `add_tile` and `add_network`."""
    generation, shape = generation_of(args), parse_shape(_split_slice(args.mesh)[1])
    failed_links = parse_links(args.failed_links)
    if ":" in args.mesh:  # a slice: as its devices would be placed
        check_slice(generation or "", shape)
        frame = CoordFrame.for_slice(shape)
        failed_links = damage.failed_links(failed_links, frame)
    else:
        frame = CoordFrame.for_grid(shape)
    wrap, wrap_source = parse_wrap_axes(args.wrap, frame.shape), ""
    if generation and wrap is None:
        wrap = slice_wraps(generation, frame.shape)
        wrap_source = describe_slice_wraps(generation, frame.shape)
    elif generation:
        wrap_source = WRAP_AS_GIVEN
    if args.failed is None:
        failed = environment_failed_chips(frame)
    else:
        failed = damage.failed_chips(args.failed, frame)
    chips = Topology.grid(frame.shape, failed=failed, failed_links=failed_links, wrap=wrap or False)
    chips = replace(chips, wrap_source=wrap_source)
    tile = getattr(args, "tile", None)
    topology = chips if tile is None else TiledTopology.from_topology(chips, tile)
    registry.check_size(topology)
    return topology


def generation_of(args: Namespace) -> str | None:
    """Return the TPU generation that MESH or --tpu names, or None."""
    named, given = _split_slice(args.mesh or "")[0], getattr(args, "tpu", None)
    if named and given and named != given:
        raise ArgumentError(
            f"{args.mesh} is a slice of {named}, and --tpu says {given}: give one of the two"
        )
    return named or given


def _split_slice(mesh: str) -> tuple[str | None, str]:
    """Return the generation and the shape of MESH; of no generation unless it is a slice."""
    name, colon, shape = mesh.rpartition(":")
    if not colon or mesh.endswith(".npz"):
        return None, mesh
    generation = tpu_generation(name)
    if generation is None:
        raise ArgumentError(
            f"{name!r:.60} is not a TPU generation: write one of {', '.join(TPU_GENERATIONS)}, "
            "as in 'v6e:16x16', or a mesh alone, as in '16x16'"
        )
    return generation, shape


def mesh_summary(topology: Topology) -> dict[str, Any]:
    """Describe a mesh as JSON values; `live` counts ranks, which may be tiles."""
    chips = topology.physical
    summary = {
        "mesh": chips.name,
        "wrap": chips.wrap,
        "failed": sorted(chips.failed),
        "live": topology.num_live,
    }
    if isinstance(topology, TiledTopology):
        summary |= {
            "tile": topology.tile,
            "positions": topology.num_positions,
            "failed_tiles": sorted(topology.failed),
            "wasted": topology.num_wasted,
        }
    return summary


class Stages:
    """Shows on a terminal which stage of a command is running, and records how long each took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, name: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work` as the stage `name`."""
        shown = sys.stderr is not None and sys.stderr.isatty()
        if shown:
            print(f"{name} ...", end="", file=sys.stderr, flush=True)
        start = time.perf_counter()
        try:
            return work(*args, **kwargs)
        finally:
            self.seconds[name] = time.perf_counter() - start
            if shown:
                print(_CLEAR, end="", file=sys.stderr, flush=True)

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())


class Progress:
    """A progress bar on a terminal; elsewhere a line every ten seconds."""

    INTERVAL = 10.0  # seconds

    def __init__(self) -> None:
        self._last_line = time.monotonic()

    def __call__(self, done: int, total: int, what: str = "") -> None:
        """Show that `done` of `total` steps are done, and `what` comes next."""
        if sys.stderr is None:
            return
        if sys.stderr.isatty():
            filled = 30 * done // total
            bar = "#" * filled + "." * (30 - filled)
            line = f"{_CLEAR}[{bar}] {done}/{total} {what}{_CLEAR * (done == total)}"
            print(line, end="", file=sys.stderr, flush=True)
        elif done < total and time.monotonic() - self._last_line >= self.INTERVAL:
            self._last_line = time.monotonic()
            say(f"{done}/{total} {what}")
