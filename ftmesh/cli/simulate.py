"""``ftmesh simulate``: what all-reduces cost, compared with the lower bound."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from ftmesh.algorithms import registry
from ftmesh.cli import arguments
from ftmesh.cost.executors import kernel_seconds, lax_psum_peers
from ftmesh.cost.links import Network
from ftmesh.cost.lower_bounds import limits
from ftmesh.cost.references import ReferenceTimes, reference_times
from ftmesh.cost.simulate import MODES, SYNCHRONOUS, Simulation, Simulator
from ftmesh.errors import ArgumentError, PlanError
from ftmesh.execute.lowering import XLA
from ftmesh.files import check_output_files
from ftmesh.planning.advise import leaf_chip_costs
from ftmesh.planning.job_model import MEMORY_TRAFFIC, known_memory_bandwidth, optimizer_costs
from ftmesh.planning.plan_cache import cached_schedule, kernel_schedule
from ftmesh.planning.selection import (
    ALGORITHMS,
    AUTO,
    select_algorithm,
)
from ftmesh.schedule.schedule import Schedule
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Topology
from ftmesh.units import format_bytes, format_time, parse_bytes

ALL = "all"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "simulate",
        help="what an all-reduce costs, compared with lax.psum and with the physical limit",
        description="Simulate all-reduces on a mesh, link by link, and compare them with lax.psum "
        "and with the least time that any all-reduce could take. With --tpu, the cost of ftmesh's "
        "executor is included, and the time on the wires alone is shown as well; where sources "
        "differ about a chip, times come with a range. Nothing is run on devices.",
        epilog="example: ftmesh simulate 32x32 --failed 4x2@14,14 --algorithm all --tpu v3",
    )
    arguments.add_mesh(parser)
    arguments.add_tile(parser)
    text = "one algorithm, in detail, or all that work on the mesh (default: all)"
    arguments.add_algorithm(parser, text, (ALL, *ALGORITHMS), ALL)
    arguments.add_payload(parser)
    arguments.add_network(parser)
    parser.add_argument(
        "--mode",
        choices=MODES,
        default=MODES[0],
        help="the clock that ranks them, and that trees are planned for: rounds start together on "
        "all chips (synchronous, the default), or each transfer starts as soon as it can",
    )
    parser.add_argument(
        "--optimizer",
        choices=tuple(MEMORY_TRAFFIC),
        help="also show the cost of the weight update on a chip of --tpu, with optimizer state "
        "sharded over the chips and replicated",
    )
    parser.add_argument("--plot", metavar="FILE", help="plot time over payload (needs matplotlib)")
    parser.add_argument("--heat-map", metavar="FILE", help="plot the load of every link")
    parser.add_argument("--json", action="store_true", help="print a list of results as JSON")


def run(args: argparse.Namespace) -> None:
    """Plan, simulate, and print the costs."""
    check_output_files(args.plot, args.heat_map)
    topology, network = arguments.topology_of(args), arguments.network_of(args)
    payload_bytes = parse_bytes(args.payload)
    if args.optimizer:
        known_memory_bandwidth(network)
        if args.json:
            raise ArgumentError("--optimizer has no JSON output: give --optimizer or --json")
    stages = arguments.Stages()
    schedules, errors = stages.run("planning", _schedules, args, topology, network)
    simulators = {name: Simulator(schedule) for name, schedule in schedules.items()}

    def simulate(simulator: Simulator) -> dict[str, Simulation]:
        return {mode: simulator.run(payload_bytes, network, mode) for mode in MODES}

    simulations = stages.run("simulating", lambda: [*map(simulate, simulators.values())])
    simulations.sort(key=lambda by_mode: by_mode[args.mode].seconds)
    references = stages.run(
        "finding the limits", lambda: reference_times(limits(topology), payload_bytes, network)
    )
    if args.plot or args.heat_map:
        from ftmesh.draw import plots

        if args.plot:
            plots.save(plots.time_against_payload(simulators, network), args.plot)
        if args.heat_map:
            plots.save(plots.link_loads(simulations[0][args.mode]), args.heat_map)
    if args.json:
        summaries = [summary(by_mode, args.mode, references) for by_mode in simulations]
        print(json.dumps(summaries, indent=2))
        return
    if args.algorithm == ALL:
        print(_table(simulations, errors, args.mode, references))
    else:
        fastest, limit = simulations[0][args.mode], references.lower_bound
        print(fastest)
        print(f"  {fastest.seconds / limit:.2f} times the limit, {format_time(limit)}")
        for psum in lax_psum_peers(topology, payload_bytes, network)[:1]:
            times = f"{fastest.seconds / psum.seconds:.2f} times {psum.name}"
            print(f"  {times}, {format_time(psum.seconds)}: {psum.note}")
    job = (topology, payload_bytes, network)
    leaf_costs = stages.run("looking for chips on one link", leaf_chip_costs, *job, args.mode)
    if leaf_costs:
        print(f"  {leaf_costs}")
    if args.optimizer:
        print(stages.run("updating", optimizer_costs, *job, args.optimizer))
    if topology.physical.wrap_source:
        print(f"  {topology.physical.wrap_source}")
    if isinstance(topology, TiledTopology):
        print(topology.describe())
    print(stages)
    for path in filter(None, (args.plot, args.heat_map)):
        print(f"wrote {path}")


def _schedules(
    args: argparse.Namespace, topology: Topology, network: Network
) -> tuple[dict[str, Schedule], dict[str, PlanError]]:
    """Plan the schedules to simulate; also return why some algorithms do not work."""
    name, payload_bytes = args.algorithm, parse_bytes(args.payload)
    if name == AUTO:
        candidates = select_algorithm(topology, payload_bytes, network, with_native=True).candidates
        name = next(one.algorithm for one in candidates if one.executor != XLA)
        if candidates[0].executor == XLA:
            print(
                f"auto leaves this sum to XLA, {format_time(candidates[0].seconds)}; "
                "the fastest in permutations:",
                file=sys.stderr,
            )
    if name != ALL:
        return {name: cached_schedule(topology, name, payload_bytes, network, args.mode)}, {}
    outcomes = registry.try_algorithms(topology)
    for name in registry.CHUNKED_BY_PAYLOAD:
        outcomes[name] = cached_schedule(topology, name, payload_bytes, network, args.mode)
    schedules = {name: x for name, x in outcomes.items() if isinstance(x, Schedule)}
    return schedules, {name: x for name, x in outcomes.items() if isinstance(x, PlanError)}


def _table(
    simulations: list[dict[str, Simulation]],
    errors: dict[str, PlanError],
    mode: str,
    references: ReferenceTimes,
) -> str:
    limit = references.lower_bound
    first = simulations[0][mode]
    network, device_model = first.network, first.network.device_model
    peers = {
        end: lax_psum_peers(first.schedule.topology, first.payload_bytes, end)
        for end in dict.fromkeys((network, network.fastest, network.slowest))
    }
    psum = peers[network][0].seconds if peers[network] else None
    has_range = network.spread is not None
    has_kernel = network.has_kernel and device_model is not None

    def costs(times: list[float]) -> str:
        """A time and its range, and its ratios to the limit and to lax.psum."""
        text = f"{format_time(times[0]):>13}"
        if has_range:
            text += f"{' to '.join(map(format_time, times[1:])):>22}"
        text += f"{times[0] / limit:>9.2f}"
        return text if psum is None else f"{text}{times[0] / psum:>12.2f}"

    lines = [
        f"{format_bytes(first.payload_bytes)} on {first.schedule.topology}, {network}",
        f"  {'algorithm':<12}{'rounds':>7}{mode:>13}"
        + f"{'range':>22}" * has_range
        + f"{'x limit':>9}"
        + f"{'x lax.psum':>12}" * (psum is not None)
        + f"{_other(mode):>13}{'latency':>10}{'contention':>12}{'links used':>12}"
        + f"{'wires alone':>13}" * bool(device_model),
    ]
    for by_mode in simulations:
        ranked = by_mode[mode]
        simulator = Simulator(ranked.schedule)
        times = [
            ranked.seconds if end == network else simulator.seconds(ranked.payload_bytes, end, mode)
            for end in peers
        ]
        lines.append(
            f"  {ranked.schedule.algorithm:<12}{ranked.schedule.num_rounds:>7}{costs(times)}"
            f"{format_time(by_mode[_other(mode)].seconds):>13}"
            f"{format_time(ranked.lost_to_latency):>10}"
            f"{format_time(ranked.lost_to_contention):>12}{ranked.utilisation:>12.0%}"
            + f"{format_time(ranked.wires_seconds):>13}"
            * bool(device_model)
        )
    lines += [f"  {name:<12}cannot: {error}" for name, error in errors.items()]
    if peers[network]:
        lines.append("by XLA itself" + ", and in a kernel" * has_kernel + ":")
    for same in zip(*peers.values(), strict=True):
        lines.append(f"  {same[0].name:<24}{costs([peer.seconds for peer in same])[5:]}")
        lines.append(f"    {same[0].note}")
    if has_kernel:
        name, times = _fastest_kernel(simulations, list(peers))
        lines.append(f"  {f'{name} in a kernel':<24}{costs(times)[5:]}")
        note = "as measured" if network.kernel else "taken only on request: nobody has measured it"
        lines.append(f"    {note}")
    if device_model:
        lines.append(first.device_model_line)
    return "\n".join([*lines, str(references)])


def _other(mode: str) -> str:
    return next(other for other in MODES if other != mode)


def _fastest_kernel(
    simulations: Sequence[dict[str, Simulation]], networks: Sequence[Network]
) -> tuple[str, list[float]]:
    """The schedule that takes least in the Pallas kernel, and its time on each network."""
    (first, *_), nominal = simulations[0].values(), networks[0]
    topology, size = first.schedule.topology, first.payload_bytes
    schedules = [simulation[SYNCHRONOUS].schedule for simulation in simulations]
    schedules += [kernel_schedule(topology, "tree", size, nominal)]
    timed = [
        (schedule.algorithm, [kernel_seconds(schedule, size, network) for network in networks])
        for schedule in schedules
    ]
    return min(timed, key=lambda pair: pair[1][0])


def summary(
    by_mode: dict[str, Simulation], mode: str, references: ReferenceTimes
) -> dict[str, Any]:
    """Describe a simulated schedule as JSON values; times are in microseconds."""
    ranked = by_mode[mode]
    network, size = ranked.network, ranked.payload_bytes
    simulator = Simulator(ranked.schedule)
    peers = lax_psum_peers(ranked.schedule.topology, size, network)
    return {
        "algorithm": ranked.schedule.algorithm,
        "rounds": ranked.schedule.num_rounds,
        "mode": mode,
        "time_us": 1e6 * ranked.seconds,
        "low_us": 1e6 * simulator.seconds(size, network.fastest, mode),
        "high_us": 1e6 * simulator.seconds(size, network.slowest, mode),
        "lax_psum_us": 1e6 * peers[0].seconds if peers else None,
        "lax_psum_along_ring_us": 1e6 * peers[1].seconds if len(peers) > 1 else None,
        "times_lax_psum": ranked.seconds / peers[0].seconds if peers else None,
        **references.as_json(),
        "times_limit": ranked.seconds / references.lower_bound,
        "wires_us": 1e6 * ranked.wires_seconds,
        "around_us": 1e6 * ranked.setup_seconds,
        **{f"{name}_us": 1e6 * simulation.seconds for name, simulation in by_mode.items()},
        "lost_to_latency_us": 1e6 * ranked.lost_to_latency,
        "lost_to_contention_us": 1e6 * ranked.lost_to_contention,
        "utilisation": ranked.utilisation,
        "busiest_links": [
            {"from": list(a), "to": list(b), "bytes": amount}
            for (a, b), amount in ranked.busiest_links()
        ],
        "phases": [
            {
                "name": phase.name,
                "rounds": phase.rounds,
                "time_us": 1e6 * phase.seconds,
                "utilisation": phase.utilisation,
                "busiest_link_bytes": phase.busiest_link_bytes,
            }
            for phase in ranked.phases
        ],
    }
