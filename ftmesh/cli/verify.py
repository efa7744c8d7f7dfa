"""``ftmesh verify``: is the schedule in a file right?"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import ftmesh
from ftmesh.cli.arguments import Stages
from ftmesh.errors import VerificationError
from ftmesh.topology.routing import around, dimension_order

ROUTERS = {"around": around, "dimension_order": dimension_order}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "verify",
        help="prove a saved schedule right, or say where it is not",
        description="Prove a saved schedule right: every live chip ends with every contribution "
        "exactly once, nothing crosses failed hardware, and no routes can deadlock.",
        epilog="example: ftmesh verify plan.npz",
    )
    parser.add_argument("file", metavar="FILE.npz")
    parser.add_argument(
        "--router",
        choices=ROUTERS,
        default="around",
        help="how longer hops travel: around the damage (default), or by plain dimension order, "
        "as on hardware that does not know of it",
    )
    parser.add_argument("--json", action="store_true", help="print what was counted as JSON")


def run(args: argparse.Namespace) -> None:
    """Load and verify."""
    stages = Stages()
    schedule = stages.run("loading", lambda: ftmesh.load(args.file, verify=False))
    try:
        proof = stages.run(
            "verifying", lambda: ftmesh.verify(schedule, router=ROUTERS[args.router])
        )
    except VerificationError as error:
        raise VerificationError(f"{args.file}: {error}") from error
    print(json.dumps(asdict(proof), indent=2) if args.json else f"{schedule}\n{proof}\n{stages}")
