"""``ftmesh simulate``: what schedules cost, and how far that is from the limit of the wires."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ftmesh.algorithms import registry
from ftmesh.cli.arguments import (
    Stages,
    add_mesh,
    add_network,
    add_payload,
    add_tile,
    network_of,
    topology_of,
)
from ftmesh.cost.links import Network
from ftmesh.cost.lower_bounds import limits
from ftmesh.cost.references import Yardsticks, yardsticks
from ftmesh.cost.simulate import MODES, Simulation, Simulator
from ftmesh.errors import ArgumentError, PlanError
from ftmesh.files import check_output_files
from ftmesh.planning.chunking import schedule_for
from ftmesh.planning.leaf_chips import ways
from ftmesh.planning.optimizer_cost import TOUCHED, memory_of, weigh
from ftmesh.planning.selection import ALGORITHMS, BEST, CHOSEN, choose
from ftmesh.schedule.schedule import Schedule
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Topology
from ftmesh.units import format_bytes, format_time, parse_bytes

ALL = "all"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "simulate",
        help="what an all-reduce costs, beside the physical limit",
        description="Simulate all-reduces on a mesh, link by link, and set them beside the least "
        "time that any all-reduce could take there. With --tpu, what ftmesh's executor costs is "
        "added, and the wires alone are shown beside it. Nothing is run.",
        epilog="example: ftmesh simulate 32x32 --failed 4x2@14,14 --algorithm all --tpu v3",
    )
    add_mesh(parser)
    add_tile(parser)
    parser.add_argument(
        "--algorithm",
        choices=(ALL, *ALGORITHMS),
        default=ALL,
        help="one algorithm, in detail, or all that can serve the mesh (default: all)",
    )
    add_payload(parser)
    add_network(parser)
    parser.add_argument(
        "--mode",
        choices=MODES,
        default=MODES[0],
        help="the clock that ranks them, and that trees are planned for: rounds that start "
        "together everywhere, or each transfer as soon as it can (default: synchronous)",
    )
    parser.add_argument(
        "--optimizer",
        choices=tuple(TOUCHED),
        help="price the update of the weights too, on a chip of --tpu: with the optimizer's state "
        "shared out among the chips, and whole at each",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw time against payload (matplotlib)")
    parser.add_argument("--heat-map", metavar="FILE", help="draw what each link carries, likewise")
    parser.add_argument("--json", action="store_true", help="print a list of results as JSON")


def run(args: argparse.Namespace) -> None:
    """Plan, simulate, and print."""
    check_output_files(args.plot, args.heat_map)
    topology, network = topology_of(args), network_of(args)
    payload_bytes = parse_bytes(args.payload)
    if args.optimizer:
        memory_of(network)
        if args.json:
            raise ArgumentError("--optimizer prints two lines, and --json none of them: give one")
    stages = Stages()
    schedules, refusals = stages.run("planning", lambda: _schedules(args, topology, network))
    simulators = {name: Simulator(schedule) for name, schedule in schedules.items()}
    priced = stages.run(
        "simulating",
        lambda: [
            {mode: simulator.run(payload_bytes, network, mode) for mode in MODES}
            for simulator in simulators.values()
        ],
    )
    priced.sort(key=lambda one: one[args.mode].seconds)
    beside = stages.run(
        "finding the limits", lambda: yardsticks(limits(topology), payload_bytes, network)
    )
    limit = beside.limit
    if args.plot or args.heat_map:
        from ftmesh.draw import plots

        if args.plot:
            plots.save(plots.time_against_payload(simulators, network), args.plot)
        if args.heat_map:
            plots.save(plots.link_loads(priced[0][args.mode]), args.heat_map)
    if args.json:
        print(json.dumps([summary(one, args.mode, beside) for one in priced], indent=2))
        return
    if args.algorithm == ALL:
        print(_table(priced, refusals, args.mode, beside))
    else:
        print(priced[0][args.mode])
        print(f"  {priced[0][args.mode].seconds / limit:.2f} times the limit, {format_time(limit)}")
    hanging = stages.run(
        "looking for chips on one link", lambda: ways(topology, payload_bytes, network, args.mode)
    )
    if hanging:
        print(f"  {hanging}")
    if args.optimizer:
        print(
            stages.run("updating", lambda: weigh(topology, payload_bytes, network, args.optimizer))
        )
    if isinstance(topology, TiledTopology):
        print(topology.describe())
    print(stages)
    for path in filter(None, (args.plot, args.heat_map)):
        print(f"wrote {path}")


def _schedules(
    args: argparse.Namespace, topology: Topology, network: Network
) -> tuple[dict[str, Schedule], dict[str, PlanError]]:
    """What there is to price, and why some algorithms are left out."""
    name, payload_bytes = args.algorithm, parse_bytes(args.payload)
    if name in CHOSEN:
        name = choose(topology, payload_bytes, network, best=name == BEST).algorithm
    if name != ALL:
        return {name: schedule_for(topology, name, payload_bytes, network, args.mode)}, {}
    found = registry.outcomes(topology)
    for name in registry.CUT_BY_SIZE:
        found[name] = schedule_for(topology, name, payload_bytes, network, args.mode)
    return (
        {name: outcome for name, outcome in found.items() if isinstance(outcome, Schedule)},
        {name: outcome for name, outcome in found.items() if isinstance(outcome, PlanError)},
    )


def _table(
    priced: list[dict[str, Simulation]],
    refusals: dict[str, PlanError],
    mode: str,
    beside: Yardsticks,
) -> str:
    limit = beside.limit
    any_one = priced[0][mode]
    device_model = any_one.network.device_model
    lines = [
        f"{format_bytes(any_one.payload_bytes)} on {any_one.schedule.topology}, {any_one.network}",
        f"  {'algorithm':<12}{'rounds':>7}{'synchronous':>13}{'dataflow':>11}{'x limit':>9}"
        f"{'latency costs':>15}{'waiting costs':>15}{'links used':>12}"
        + f"{'wires alone':>13}{'x limit':>9}"
        * bool(device_model),
    ]
    for one in priced:
        ranked = one[mode]
        lines.append(
            f"  {ranked.schedule.algorithm:<12}{ranked.schedule.num_rounds:>7}"
            f"{format_time(one['synchronous'].seconds):>13}"
            f"{format_time(one['dataflow'].seconds):>11}{ranked.seconds / limit:>9.2f}"
            f"{format_time(ranked.lost_to_latency):>15}"
            f"{format_time(ranked.lost_to_contention):>15}{ranked.utilisation:>12.0%}"
            + f"{format_time(ranked.wires_seconds):>13}{ranked.wires_seconds / limit:>9.2f}"
            * bool(device_model)
        )
    lines += [f"  {name:<12}cannot: {refusal}" for name, refusal in refusals.items()]
    if device_model:
        lines.append(any_one.executor_line)
    return "\n".join([*lines, str(beside)])


def summary(one: dict[str, Simulation], mode: str, beside: Yardsticks) -> dict[str, Any]:
    """What a program would want to know of a simulated schedule; times in microseconds."""
    ranked = one[mode]
    return {
        "algorithm": ranked.schedule.algorithm,
        "rounds": ranked.schedule.num_rounds,
        "mode": mode,
        "time_us": 1e6 * ranked.seconds,
        **beside.as_json(),
        "times_limit": ranked.seconds / beside.limit,
        "wires_us": 1e6 * ranked.wires_seconds,
        "around_us": 1e6 * ranked.around_seconds,
        **{f"{name}_us": 1e6 * each.seconds for name, each in one.items()},
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
