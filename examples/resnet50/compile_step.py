"""Compile the training step of ResNet-50 for TPUs without having any.

    python -m examples.resnet50.compile_step v6e:16x16 --failed 2x2@2,2 --preset mlperf-32768

Needs libtpu, the TPU compiler. Prints the memory per device, and with `--overlap` how many
permutations overlap with convolutions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from examples.common.arguments import step_options
from examples.common.compile_step import start
from examples.common.trainer import Trainer
from examples.resnet50.config import PRESETS, Config
from examples.resnet50.trainer import resnet50_trainer
from ftmesh.command_line import Parser
from ftmesh.topology.topology import Topology


def main(argv: Sequence[str] | None = None) -> int:
    """Compile from the command line; return the exit status."""
    parser = Parser(
        prog="python -m examples.resnet50.compile_step",
        description="Compile the training step of ResNet-50 for TPUs without having any.",
    )

    def make_trainer(config: Config, topology: Topology, args: argparse.Namespace) -> Trainer:
        return resnet50_trainer(config, topology, step_options(args))

    return start("resnet50", parser, PRESETS, make_trainer, argv)


if __name__ == "__main__":
    sys.exit(main())
