"""``ftmesh advise``: what to do about failed boards, and what each answer is worth."""

from __future__ import annotations

import argparse
import json
import statistics
import textwrap
from dataclasses import replace
from functools import partial

from ftmesh.cli.arguments import (
    Progress,
    add_mesh,
    add_network,
    add_payload,
    network_of,
    topology_of,
)
from ftmesh.command_line import MAX_SEED, whole_number
from ftmesh.files import check_output_files
from ftmesh.planning import advise
from ftmesh.planning.advise import AtHand, Outcome, RouteAround, Site, SubMesh, Wait
from ftmesh.planning.leaf_chips import IDLE, Ways
from ftmesh.topology.notation import format_failed
from ftmesh.topology.topology import Topology
from ftmesh.units import format_time, parse_bytes, parse_time

MAX_RUNS, MAX_SPARES = 10_000, 100_000
SHARES = ("trained", "slower", "thrown_away", "restarting", "waiting")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "advise",
        help="wait, shrink, keep spares or route around: what each is worth",
        description="Play failures and repairs against the four answers to a failed board: wait "
        "for repair, go on with the largest whole sub-mesh, keep hot spares, or route around the "
        "hole; and say what to do about the damage at hand (--failed). Times are written 0.5us, "
        "50ms, 10min, 8h or 90d.",
        epilog="example: ftmesh advise 16x32 --failed 4x2@6,14 --mtbf 3000d --repair 8h "
        "--checkpoint 30min --step 43ms --payload 102MB --tpu v3",
    )
    add_mesh(parser)
    parser.add_argument(
        "--mtbf",
        metavar="TIME",
        default="3000d",
        help="mean time between failures of one board of 2x2 chips (default: 3000d)",
    )
    parser.add_argument(
        "--repair", metavar="TIME", default="8h", help="time to repair a board (default: 8h)"
    )
    parser.add_argument(
        "--checkpoint",
        metavar="TIME",
        default="30min",
        help="time between checkpoints (default: 30min)",
    )
    parser.add_argument(
        "--restart",
        metavar="TIME",
        default="10min",
        help="time to start again after a failure, or to go back to more chips (default: 10min)",
    )
    parser.add_argument(
        "--step",
        metavar="TIME",
        default="50ms",
        help="a training step on the full mesh, its all-reduce included (default: 50ms)",
    )
    add_payload(parser)
    add_network(parser)
    parser.add_argument(
        "--spares",
        type=whole_number(0, MAX_SPARES),
        metavar="N",
        help="spare boards kept, and paid for (default: as many as lie along the shortest side)",
    )
    parser.add_argument("--horizon", metavar="TIME", default="365d", help="time played per run")
    parser.add_argument(
        "--runs",
        type=whole_number(1, MAX_RUNS),
        default=20,
        metavar="N",
        help="histories played (20)",
    )
    parser.add_argument(
        "--seed",
        type=whole_number(0, MAX_SEED),
        default=0,
        metavar="N",
        help="of the failures (0)",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw where the time goes (matplotlib)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(args: argparse.Namespace) -> None:
    """Play, and print the table and the advice."""
    check_output_files(args.plot)
    damaged = topology_of(args)
    site = _site(args, replace(damaged, failed=frozenset(), failed_links=frozenset()))
    horizon = parse_time(args.horizon)
    outcomes = advise.play_all(
        site,
        horizon=horizon,
        runs=args.runs,
        seed=args.seed,
        progress=partial(Progress(), what="histories"),
    )
    hurt = bool(damaged.failed or damaged.failed_links)
    now = advise.at_hand(site, damaged) if hurt else None
    wires = None
    if hurt and site.network.device_model:
        wires = advise.at_hand(replace(site, network=site.network.wires), damaged)
    hanging = advise.with_pendants(site, damaged) if hurt else None
    if args.plot:
        from ftmesh.draw import plots

        plots.save(plots.where_time_goes(outcomes, site), args.plot)
    if args.json:
        print(json.dumps(_as_dict(site, outcomes, now, wires, hanging), indent=2))
        return
    print(_table(site, outcomes, horizon))
    print(textwrap.fill(_sentence(outcomes, now, wires), 100))
    if hanging:
        print(textwrap.fill(_about(*hanging), 100))
    print("\nThe model:")
    for text in advise.ASSUMPTIONS:
        print(textwrap.fill(text, 100, initial_indent="- ", subsequent_indent="  "))
    if args.plot:
        print(f"wrote {args.plot}")


def _site(args: argparse.Namespace, whole: Topology) -> Site:
    spares = args.spares
    if spares is None:
        shortest = min(whole.shape) if len(whole.shape) > 1 else 1
        spares = -(-shortest // advise.BOARD)
    return Site(
        topology=whole,
        mtbf=parse_time(args.mtbf),
        repair=parse_time(args.repair),
        checkpoint=parse_time(args.checkpoint),
        step=parse_time(args.step),
        payload_bytes=parse_bytes(args.payload),
        restart=parse_time(args.restart),
        spares=spares,
        network=network_of(args),
    )


def _mean(outcomes: list[Outcome], name: str) -> float:
    return statistics.fmean(getattr(one, name) for one in outcomes)


def _table(site: Site, outcomes: dict[str, list[Outcome]], horizon: float) -> str:
    runs = len(next(iter(outcomes.values())))
    rate = len(site.boards) * horizon / (site.mtbf + site.repair)
    lines = [
        f"{site.topology}, {len(site.boards)} boards, each failing every {format_time(site.mtbf)} "
        f"and repaired in {format_time(site.repair)}:",
        f"about {rate:.0f} failures in {format_time(horizon)}; means of {runs} histories, as "
        "shares of what the full mesh would do without failures",
        f"  {'answer':<18}{'goodput':>9}{'+-':>8}{'per chip paid':>15}{'fewer chips':>13}"
        f"{'thrown away':>13}{'restarting':>12}{'waiting':>9}",
    ]
    ranked = sorted(outcomes.items(), key=lambda item: -_mean(item[1], "trained"))
    for name, each in ranked:
        goodputs = [one.trained for one in each]
        error = statistics.stdev(goodputs) / runs**0.5 if runs > 1 else 0.0
        label = f"{name} ({site.spares})" if each[0].paid > 1 else name
        lines.append(
            f"  {label:<18}{_mean(each, 'trained'):>9.4f}{error:>8.4f}"
            f"{_mean(each, 'per_chip'):>15.4f}{_mean(each, 'slower'):>13.4f}"
            f"{_mean(each, 'thrown_away'):>13.4f}{_mean(each, 'restarting'):>12.4f}"
            f"{_mean(each, 'waiting'):>9.4f}"
        )
    return "\n".join(lines)


def _sentence(outcomes: dict[str, list[Outcome]], now: AtHand | None, wires: AtHand | None) -> str:
    if now is None:
        best = max(outcomes, key=lambda name: _mean(outcomes[name], "per_chip"))
        return (
            f"Advice: over time, '{best}' does most per chip paid for: "
            f"{_mean(outcomes[best], 'per_chip'):.1%} of what it could."
        )
    box = now.topology.largest_rectangle()
    hours = {name: format_time(done) for name, done in now.done.items()}
    wait, sub_mesh, around = Wait.name, SubMesh.name, RouteAround.name
    verb = {
        wait: "wait for the repair",
        sub_mesh: f"go on with the sub-mesh {box}",
        around: f"route around the damage and go on with all {now.topology.num_live} live chips",
    }[now.best]
    if now.best == wait:
        return (
            f"Advice for {now.topology}: {verb}; it is done in {format_time(now.repair)}, too soon "
            "to be worth a restart."
        )
    other = sub_mesh if now.best == around else around
    alone = f" ({wires.speeds[now.best]:.1%} on the wires alone)" if wires else ""
    return (
        f"Advice for {now.topology}: {verb}, at {now.speeds[now.best]:.1%} of full speed{alone}. "
        f"In the {format_time(now.repair)} until repair that does {hours[now.best]} of full-mesh "
        f"work, the restart paid, where '{other}' would do {hours[other]} and waiting none."
    )


def _about(hanging: Ways, compute: float) -> str:
    """What to do with chips that hang on one link."""
    steps = hanging.steps(compute)
    best = hanging.best(compute)
    todo = "leave all live chips in"
    if best == IDLE:
        todo = f"plan with --failed {format_failed(hanging.without.failed)!r}"
    return (
        f"Of these, {hanging}. With what is computed, a step takes "
        + ", ".join(f"{format_time(seconds)} {name}" for name, seconds in steps.items())
        + f": {todo}."
    )


def _as_dict(
    site: Site,
    outcomes: dict[str, list[Outcome]],
    now: AtHand | None,
    wires: AtHand | None,
    hanging: tuple[Ways, float] | None,
) -> dict[str, object]:
    return {
        "mesh": site.topology.name,
        "boards": len(site.boards),
        "spares": site.spares,
        "answers": [
            {
                "answer": name,
                "goodput": _mean(each, "trained"),
                "per_chip": _mean(each, "per_chip"),
                **{share: _mean(each, share) for share in SHARES},
            }
            for name, each in outcomes.items()
        ],
        "at_hand": None
        if now is None
        else {
            "best": now.best,
            "speeds": now.speeds,
            "wires_speeds": (wires or now).speeds,
            "full_mesh_seconds": now.done,
        },
        "pendants": None
        if hanging is None
        else {
            "chips": [list(chip) for chip in hanging[0].pendants],
            "all_reduce_seconds": hanging[0].seconds,
            "step_seconds": hanging[0].steps(hanging[1]),
            "best": hanging[0].best(hanging[1]),
        },
    }
