"""``ftmesh paper``: the paper's measurements beside our simulation of them."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import Any

from ftmesh.cli.arguments import Stages
from ftmesh.cost.links import NETWORKS
from ftmesh.planning import paper_tables
from ftmesh.planning.paper_tables import Best, Ours, Run
from ftmesh.units import format_time

MIDDLE = paper_tables.RATES[1]
EXPLANATION = (
    "'As printed' is what the paper's ratio can be, given that its shares are printed to two "
    "digits. Ours is below it in every row. Our forwarding from the chips beside the block costs "
    "at most a round, because it runs beside the rings; the paper does not say how much of its "
    "own does. What our damage does cost is in the second phase, where hops go around the block "
    "and queue for the links beside it; less of it where transfers need not wait for the round "
    "(dataflow). The paper's figures come from runs that vary by up to 2% of a step, which is a "
    "quarter to a half of a whole all-reduce."
)


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "paper",
        help="the paper's tables beside our simulation of them",
        description="Tables 1 and 2 of Kumar and Jouppi (2020), measured on 512 and 1024 chips of "
        "TPU v3, beside the same four runs as ftmesh simulates them.",
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def run(args: argparse.Namespace) -> None:
    """Simulate the paper's runs and print both."""
    stages = Stages()
    found = stages.run("simulating", paper_tables.simulate_runs)
    device_model = NETWORKS["v3"].device_model
    as_run = stages.run("with the executor", lambda: paper_tables.simulate_runs(device_model=device_model))
    best = stages.run(
        "planning trees", lambda: {row: paper_tables.best_of(row) for row in paper_tables.RUNS}
    )
    if args.json:
        rows = [_as_dict(row, ours, as_run[row], best[row]) for row, ours in found.items()]
        print(json.dumps(rows, indent=2))
        return
    tables = (_ratios(found), _overheads(found), _as_run(found, as_run), _best(best))
    print(*tables, "Assumptions:", sep="\n\n")
    for text in paper_tables.ASSUMPTIONS:
        print(textwrap.fill(text, 100, initial_indent="- ", subsequent_indent="  "))
    print(stages)


def _pick(ours: list[Ours], mode: str, rate: float = MIDDLE) -> Ours:
    return next(one for one in ours if one.mode == mode and one.network.bandwidth == rate)


def _ratios(found: dict[Run, list[Ours]]) -> str:
    lines = [
        "How much longer the all-reduce takes on the damaged mesh (Table 2 as ratios)",
        f"  {'':<27}{'paper':>6}{'as printed':>12}{'ours':>7}{'algorithm x damage':>20}"
        f"{'70-100 GB/s':>13}{'dataflow':>10}{'ours - paper':>14}",
    ]
    for row, ours in found.items():
        one = _pick(ours, "synchronous")
        low, high = row.ratio_range
        ratios = [each.ratio for each in ours if each.mode == "synchronous"]
        algorithm, damage = one.parts
        lines.append(
            f"  {_name(row):<27}{row.ratio:>6.2f}{f'{low:.2f}-{high:.2f}':>12}{one.ratio:>7.2f}"
            f"{f'{algorithm:.2f} x {damage:.2f}':>20}{f'{min(ratios):.2f}-{max(ratios):.2f}':>13}"
            f"{_pick(ours, 'dataflow').ratio:>10.2f}{one.ratio - row.ratio:>+14.2f}"
        )
    return "\n".join([*lines, "", textwrap.fill(EXPLANATION, 100)])


def _overheads(found: dict[Run, list[Ours]]) -> str:
    lines = [
        "The all-reduce's share of the step (Table 2), and relative efficiency with the lost chips "
        "included (Table 1)",
        f"  {'':<27}{'full: paper':>12}{'ours':>7}{'damaged: paper':>16}{'ours':>7}"
        f"{'efficiency: paper':>19}{'ours':>7}{'all-reduce: full':>18}{'damaged':>9}",
    ]
    for row, ours in found.items():
        one = _pick(ours, "synchronous")
        lines.append(
            f"  {_name(row):<27}{row.full_share:>12.1%}{one.shares[0]:>7.1%}"
            f"{row.damaged_share:>16.1%}{one.shares[1]:>7.1%}{row.efficiency:>19.3f}"
            f"{one.efficiency:>7.3f}{format_time(one.full):>18}{format_time(one.damaged):>9}"
        )
    return "\n".join(lines)


def _as_run(found: dict[Run, list[Ours]], as_run: dict[Run, list[Ours]]) -> str:
    """The same ratios with what ftmesh's own executor costs."""
    device_model = next(iter(as_run.values()))[0].network.device_model
    lines = [
        "The same as ftmesh's executor would run both all-reduces, by the TPU compiler's estimates",
        f"  {'ratios':<27}{'paper':>6}{'wires alone':>13}{'as run':>8}{'algorithm x damage':>20}"
        f"{'dataflow':>10}{'all-reduce: full':>18}{'damaged':>9}",
    ]
    for row, ours in as_run.items():
        one = _pick(ours, "synchronous")
        algorithm, damage = one.parts
        lines.append(
            f"  {_name(row):<27}{row.ratio:>6.2f}{_pick(found[row], 'synchronous').ratio:>13.2f}"
            f"{one.ratio:>8.2f}{f'{algorithm:.2f} x {damage:.2f}':>20}"
            f"{_pick(ours, 'dataflow').ratio:>10.2f}{format_time(one.full):>18}"
            f"{format_time(one.damaged):>9}"
        )
    return "\n".join([*lines, f"  executor: {device_model}"])


def _best(best: dict[Run, Best]) -> str:
    """The ratios of the fastest all-reduces there are, and these."""
    lines = [
        "The best algorithms that ftmesh has, on either mesh, on the wires alone",
        f"  {'ratios':<27}{'paper':>6}{'best':>7}{'full mesh':>22}{'damaged mesh':>22}",
    ]
    for row, one in best.items():
        full, damaged = (
            f"{each.algorithm}, {format_time(each.seconds)}" for each in (one.full, one.damaged)
        )
        lines.append(f"  {_name(row):<27}{row.ratio:>6.2f}{one.ratio:>7.2f}{full:>22}{damaged:>22}")
    return "\n".join(lines)


def _name(row: Run) -> str:
    full, damaged = (topology.num_live for topology in row.topologies)
    return f"{row.benchmark}, {full}/{damaged} chips"


def _as_dict(row: Run, ours: list[Ours], as_run: list[Ours], best: Best) -> dict[str, Any]:
    low, high = row.ratio_range
    return {
        "benchmark": row.benchmark,
        "mesh": row.mesh,
        "failed": row.failed,
        "payload_bytes": row.payload_bytes,
        "paper": {
            "ratio": row.ratio,
            "ratio_low": low,
            "ratio_high": high,
            "full_share": row.full_share,
            "damaged_share": row.damaged_share,
            "efficiency": row.efficiency,
        },
        "ours": [_times(one) for one in ours],
        "ours_as_run": [_times(one) for one in as_run],
        "best": {
            "ratio": best.ratio,
            "full": best.full.algorithm,
            "full_us": 1e6 * best.full.seconds,
            "damaged": best.damaged.algorithm,
            "damaged_us": 1e6 * best.damaged.seconds,
        },
    }


def _times(one: Ours) -> dict[str, Any]:
    return {
        "mode": one.mode,
        "link_bytes_per_second": one.network.bandwidth,
        "full_us": 1e6 * one.full,
        "damaged_us": 1e6 * one.damaged,
        "ratio": one.ratio,
        "full_share": one.shares[0],
        "damaged_share": one.shares[1],
        "efficiency": one.efficiency,
    }
