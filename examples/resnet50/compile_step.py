"""Compile the whole step of ResNet-50 for TPUs that are not there.

    python -m examples.resnet50.compile_step v6e:16x16 --failed 2x2@2,2 --preset mlperf-32768

Needs libtpu, the TPU compiler, and no TPU. Says what each device must hold, and with `--overlap`
how many permutations travel while convolutions are computed.
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
    """Compile from the command line; the exit status."""
    parser = Parser(
        prog="python -m examples.resnet50.compile_step",
        description="Compile the whole step of ResNet-50 for TPUs that are not there.",
    )

    def make(config: Config, topology: Topology, args: argparse.Namespace) -> Trainer:
        return resnet50_trainer(config, topology, step_options(args))

    return start("resnet50", parser, PRESETS, make, argv)


if __name__ == "__main__":
    sys.exit(main())
