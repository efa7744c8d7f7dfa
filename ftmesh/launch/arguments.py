"""The command-line arguments that say which processes take part, the same wherever they are."""

from __future__ import annotations

import argparse

from ftmesh.commands import whole_number


def add_processes(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add them; where JAX finds that out by itself, nothing is to be given."""
    group = parser.add_argument_group(
        "several processes",
        "one for each host; nothing need be given on Cloud TPU, Slurm and GKE, nor under 'ftmesh "
        "launch'",
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 is to be found")
    group.add_argument(
        "--num-processes", type=whole_number(1), metavar="N", help="how many there are"
    )
    group.add_argument(
        "--process-id", type=whole_number(0), metavar="I", help="which this one is, from 0 on"
    )
    return group
