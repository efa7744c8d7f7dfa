"""``ftmesh advise``: compare strategies for failed boards, or replicas of a model."""

from __future__ import annotations

import argparse
import json
import statistics
import textwrap
from dataclasses import asdict, replace
from functools import partial

from ftmesh.cli import arguments
from ftmesh.command_line import MAX_SEED, whole_number
from ftmesh.errors import ArgumentError
from ftmesh.files import check_output_files
from ftmesh.planning import advise
from ftmesh.planning.advise import IDLE, DamageComparison, LeafChipCosts, Outcome, TrainingJob
from ftmesh.planning.job_model import (
    EVERY_CHIP,
    MAX_WASTE,
    STATE_BYTES,
    WEIGHT_BYTES,
    ReplicaOption,
    best_replicas,
    replica_options,
)
from ftmesh.topology.notation import format_failed
from ftmesh.topology.topology import Topology
from ftmesh.units import format_bytes, format_time, parse_bytes, parse_time

REPLICA_MODEL = (
    f"State: {STATE_BYTES} bytes per weight, for float32 weights and gradients and the two moments "
    "of Adam, sharded over the chips of a replica. Activations come on top.",
    "Gathers: the weights in bfloat16, in the forward and the backward pass, and the scatter of "
    "float32 gradients, among the chips of a replica. Sums: their float32 gradients over replicas. "
    "Both simulated, one after the other, each as one collective.",
)
MAX_RUNS, MAX_SPARES = 10_000, 100_000
COLUMNS = {"per_chip": 15, "slower": 13, "thrown_away": 13, "restarting": 12, "waiting": 9}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "advise",
        help="compare strategies for failed boards: wait, shrink, keep spares, route around",
        description="Simulate failures and repairs under four strategies for a failed board: wait "
        "for the repair, continue on the largest intact sub-mesh, keep hot spares, or route around "
        "the hole. With --failed, recommend what to do now. With --model-bytes, compare instead "
        "the tiles of chips that replicas of a model may have. Times are written 0.5us, 50ms, "
        "10min, 8h or 90d.",
        epilog="example: ftmesh advise 16x32 --failed 4x2@6,14 --mtbf 3000d --repair 8h "
        "--checkpoint 30min --step 43ms --payload 102MB --tpu v3",
    )
    arguments.add_mesh(parser)
    for name, default, text in (
        ("--mtbf", "3000d", "mean time between failures of one board of 2x2 chips"),
        ("--repair", "8h", "time to repair a board"),
        ("--checkpoint", "30min", "time between checkpoints"),
        ("--restart", "10min", "time to restart after a failure, or to return to more chips"),
        ("--step", "50ms", "time of a training step on the full mesh, all-reduce included"),
        ("--horizon", "365d", "simulated time per run"),
    ):
        arguments.add_option(parser, name, "TIME", text, default)
    arguments.add_payload(parser)
    arguments.add_network(parser)
    spares = "spare boards to keep, and pay for (default: as many as fit along the shortest side)"
    arguments.add_option(parser, "--spares", "N", spares, type=whole_number(0, MAX_SPARES))
    arguments.add_option(parser, "--runs", "N", "simulated runs", 20, whole_number(1, MAX_RUNS))
    seed = "random seed of the failures"
    arguments.add_option(parser, "--seed", "N", seed, 0, whole_number(0, MAX_SEED))
    arguments.add_option(parser, "--plot", "FILE", "plot where the time goes (needs matplotlib)")
    size = "bytes of a model's weights in float32, as 8GB: compare replicas instead"
    arguments.add_option(parser, "--model-bytes", "SIZE", size)
    memory = "memory of a chip for weights, gradients and optimizer: recommend a replica that fits"
    arguments.add_option(parser, "--memory", "SIZE", memory)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(args: argparse.Namespace) -> None:
    """Simulate, and print the table and the recommendation."""
    check_output_files(args.plot)
    damaged = arguments.topology_of(args)
    if args.model_bytes is not None:
        _compare_replicas(args, damaged)
        return
    if args.memory is not None:
        raise ArgumentError("--memory says which replicas fit: give --model-bytes too")
    job = _training_job(args, replace(damaged, failed=frozenset(), failed_links=frozenset()))
    horizon, progress = parse_time(args.horizon), partial(arguments.Progress(), what="runs")
    outcomes = advise.simulate_strategies(
        job, horizon=horizon, runs=args.runs, seed=args.seed, progress=progress
    )
    is_damaged = bool(damaged.failed or damaged.failed_links)
    now = advise.compare_for_damage(job, damaged) if is_damaged else None
    wires = None
    if is_damaged and job.network.device_model:
        wires = advise.compare_for_damage(replace(job, network=job.network.wires_only), damaged)
    leaf_costs = advise.compare_leaf_chips(job, damaged) if is_damaged else None
    if args.plot:
        from ftmesh.draw import plots

        plots.save(plots.where_time_goes(outcomes, job), args.plot)
    if args.json:
        print(json.dumps(_as_dict(job, outcomes, now, wires, leaf_costs), indent=2))
        return
    print(_table(job, outcomes, horizon))
    if damaged.wrap_source:
        print(damaged.wrap_source)
    print(textwrap.fill(_advice(outcomes, now, wires), 100))
    if leaf_costs:
        print(textwrap.fill(_leaf_chip_advice(*leaf_costs), 100))
    print("\nThe model:")
    for text in advise.ASSUMPTIONS:
        print(textwrap.fill(text, 100, initial_indent="- ", subsequent_indent="  "))
    if args.plot:
        print(f"wrote {args.plot}")


def _compare_replicas(args: argparse.Namespace, topology: Topology) -> None:
    """Print the replicas that a model may have, and which of them to take."""
    if args.plot:
        raise ArgumentError("--plot shows strategies: leave it out with --model-bytes")
    model_bytes, network = parse_bytes(args.model_bytes), arguments.network_of(args)
    memory = None if args.memory is None else parse_bytes(args.memory)
    options = replica_options(topology, model_bytes, network)
    best = None if memory is None else best_replicas(options, memory)
    if args.json:
        rows = [{**asdict(one), "fits": memory and one.fits(memory)} for one in options]
        print(json.dumps({"options": rows, "best": best and best.tile}, indent=2))
        return
    print(
        f"{topology}: {format_bytes(model_bytes)} of float32 weights, "
        f"{format_bytes(STATE_BYTES // WEIGHT_BYTES * model_bytes)} of state\n"
        f"  {'replica':<9}{'replicas':>9}{'live chips wasted':>19}{'state per chip':>16}{'fits':>6}"
        f"{'gathers':>10}{'sums':>10}"
    )
    for one in options:
        fits = "" if memory is None else "yes" if one.fits(memory) else "no"
        by = f"  {one.algorithm}" if one.algorithm else ""
        print(
            f"  {one.tile:<9}{one.replicas:>9}{one.wasted:>19}{format_bytes(one.state_bytes):>16}"
            f"{fits:>6}{_or_none(one.gather_seconds):>10}{_or_none(one.sum_seconds):>10}{by}"
        )
    print(textwrap.fill(_replica_advice(options, best, memory), 100))
    print()
    for text in REPLICA_MODEL:
        print(textwrap.fill(text, 100, initial_indent="- ", subsequent_indent="  "))


def _or_none(seconds: float) -> str:
    return format_time(seconds) if seconds else "none"


def _replica_advice(
    options: list[ReplicaOption], best: ReplicaOption | None, memory: int | None
) -> str:
    if best is None or memory is None:
        return "Advice: give --memory, what the state may take of a chip, for a recommendation."
    state = f"{format_bytes(best.state_bytes)} of {format_bytes(memory)}"
    if best.tile == EVERY_CHIP:
        return (
            f"Advice: one replica over all {best.chips} live chips, {state} on each: no tile fits "
            f"that wastes at most {MAX_WASTE:.0%} of them."
        )
    advice = (
        f"Advice: replicas of {best.tile}, {state} on each chip. Of the tiles that fit, they waste "
        f"the fewest live chips, {best.wasted}, and with that few have the fastest collectives, "
        f"{format_time(best.seconds)} a step."
    )
    if options[-1].tile != EVERY_CHIP:
        return f"{advice} No ring clear of failures joins all live chips to one replica."
    return (
        f"{advice} One replica over all live chips takes {format_time(options[-1].seconds)}, but "
        f"pads weights to {options[-1].chips} shards, gathers each layer from all of them, and "
        "seldom continues in place after a loss."
    )


def _training_job(args: argparse.Namespace, full_mesh: Topology) -> TrainingJob:
    shortest = min(full_mesh.shape) if len(full_mesh.shape) > 1 else 1
    spares = -(-shortest // advise.BOARD) if args.spares is None else args.spares
    return TrainingJob(
        topology=full_mesh,
        mtbf=parse_time(args.mtbf),
        repair_time=parse_time(args.repair),
        checkpoint_interval=parse_time(args.checkpoint),
        step_time=parse_time(args.step),
        payload_bytes=parse_bytes(args.payload),
        restart_time=parse_time(args.restart),
        num_spares=spares,
        network=arguments.network_of(args),
    )


def _mean(outcomes: list[Outcome], name: str) -> float:
    return statistics.fmean(getattr(outcome, name) for outcome in outcomes)


def _table(job: TrainingJob, outcomes: dict[str, list[Outcome]], horizon: float) -> str:
    runs = len(next(iter(outcomes.values())))
    rate = len(job.boards) * horizon / (job.mtbf + job.repair_time)
    lines = [
        f"{job.topology}, {len(job.boards)} boards, each failing every {format_time(job.mtbf)} "
        f"and repaired in {format_time(job.repair_time)}:",
        f"about {rate:.0f} failures in {format_time(horizon)}; means of {runs} runs, as fractions "
        "of the full mesh without failures",
        f"  {'strategy':<18}{'goodput':>9}{'+-':>8}{'per chip paid':>15}{'fewer chips':>13}"
        f"{'lost work':>13}{'restarting':>12}{'waiting':>9}",
    ]
    for name, results in sorted(outcomes.items(), key=lambda item: -_mean(item[1], "trained")):
        goodputs = [result.trained for result in results]
        error = statistics.stdev(goodputs) / runs**0.5 if runs > 1 else 0.0
        label = f"{name} ({job.num_spares})" if results[0].paid > 1 else name
        means = (f"{_mean(results, name):>{width}.4f}" for name, width in COLUMNS.items())
        lines.append(
            f"  {label:<18}{statistics.fmean(goodputs):>9.4f}{error:>8.4f}{''.join(means)}"
        )
    return "\n".join(lines)


def _advice(
    outcomes: dict[str, list[Outcome]], now: DamageComparison | None, wires: DamageComparison | None
) -> str:
    if now is None:
        best = max(outcomes, key=lambda name: _mean(outcomes[name], "per_chip"))
        return (
            f"Advice: over time, '{best}' does the most work per chip paid for: "
            f"{_mean(outcomes[best], 'per_chip'):.1%} of the maximum."
        )
    wait, around = advise.WaitForRepair.name, advise.RouteAround.name
    sub_mesh = advise.LargestSubMesh.name
    hours = {name: format_time(done) for name, done in now.done.items()}
    if now.best == wait:
        return (
            f"Advice for {now.topology}: wait for the repair; it takes "
            f"{format_time(now.repair_time)}, too short to be worth a restart."
        )
    todo = f"continue on the sub-mesh {now.topology.largest_rectangle()}"
    if now.best == around:
        todo = f"route around the damage and continue on all {now.topology.num_live} live chips"
    other = sub_mesh if now.best == around else around
    wires_speed = f" ({wires.speeds[now.best]:.1%} on the wires alone)" if wires else ""
    return (
        f"Advice for {now.topology}: {todo}, at {now.speeds[now.best]:.1%} of full speed"
        f"{wires_speed}. In the {format_time(now.repair_time)} until the repair this does "
        f"{hours[now.best]} of full-mesh work, restart included; '{other}' would do "
        f"{hours[other]} and waiting none."
    )


def _leaf_chip_advice(leaf_costs: LeafChipCosts, compute: float) -> str:
    steps = leaf_costs.step_seconds(compute)
    best = leaf_costs.best(compute)
    todo = "use all live chips"
    if best == IDLE:
        todo = f"plan with --failed {format_failed(leaf_costs.idle_topology.failed)!r}"
    return (
        f"Of these, {leaf_costs}. With the computation, a step takes "
        + ", ".join(f"{format_time(seconds)} {name}" for name, seconds in steps.items())
        + f": {todo}."
    )


def _as_dict(
    job: TrainingJob,
    outcomes: dict[str, list[Outcome]],
    now: DamageComparison | None,
    wires: DamageComparison | None,
    leaf_costs: tuple[LeafChipCosts, float] | None,
) -> dict[str, object]:
    at_hand = pendants = None
    if now is not None:
        at_hand = {
            "best": now.best,
            "speeds": now.speeds,
            "wires_speeds": (wires or now).speeds,
            "full_mesh_seconds": now.done,
        }
    if leaf_costs is not None:
        costs, compute = leaf_costs
        pendants = {
            "chips": [list(chip) for chip in costs.leaf_chips],
            "all_reduce_seconds": costs.seconds,
            "step_seconds": costs.step_seconds(compute),
            "best": costs.best(compute),
        }
    return {
        "mesh": job.topology.name,
        "boards": len(job.boards),
        "spares": job.num_spares,
        "answers": [
            {
                "answer": name,
                "goodput": _mean(results, "trained"),
                "trained": _mean(results, "trained"),
                **{share: _mean(results, share) for share in COLUMNS},
            }
            for name, results in outcomes.items()
        ],
        "at_hand": at_hand,
        "pendants": pendants,
    }
