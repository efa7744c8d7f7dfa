"""``ftmesh verify``: prove that a saved schedule is correct."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import ftmesh
from ftmesh.cli.arguments import Stages
from ftmesh.errors import VerificationError
from ftmesh.topology.routing import around_failures, dimension_order

ROUTERS = {"around": around_failures, "dimension_order": dimension_order}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "verify",
        help="prove that a saved schedule is correct, or show where it fails",
        description="Prove that a saved schedule is correct: every live chip ends up with every "
        "contribution exactly once, no transfer crosses failed hardware, and no routes deadlock.",
        epilog="example: ftmesh verify plan.npz",
    )
    parser.add_argument("file", metavar="FILE.npz", help="a schedule written by ftmesh plan --out")
    parser.add_argument(
        "--router",
        choices=ROUTERS,
        default="around",
        help="how transfers of several hops are routed: around failed chips (default), or in "
        "dimension order, as on hardware that does not know of the failures",
    )
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")


def run(args: argparse.Namespace) -> None:
    """Load and verify the schedule."""
    stages = Stages()
    schedule = stages.run("loading", ftmesh.load, args.file, verify=False)
    try:
        proof = stages.run("verifying", ftmesh.verify, schedule, router=ROUTERS[args.router])
    except VerificationError as error:
        raise VerificationError(f"{args.file}: {error}") from error
    print(json.dumps(asdict(proof), indent=2) if args.json else f"{schedule}\n{proof}\n{stages}")
