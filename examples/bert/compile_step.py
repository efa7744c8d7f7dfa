"""Compile the training step of BERT for TPUs without having any.

    python -m examples.bert.compile_step v6e:16x16 --failed 2x2@2,2 --preset mlperf-8192
    python -m examples.bert.compile_step v6e:16x16 --failed 2x2@2,2 --preset mlperf-8192 \
        --whole-optimizer

Needs libtpu, the TPU compiler. Prints the memory per device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from examples.bert.config import PRESETS, Config
from examples.bert.trainer import add_bert_step, bert_options, bert_trainer
from examples.common.arguments import step_options
from examples.common.compile_step import start
from examples.common.trainer import Trainer
from ftmesh.command_line import Parser
from ftmesh.topology.topology import Topology


def main(argv: Sequence[str] | None = None) -> int:
    """Compile from the command line; return the exit status."""
    parser = Parser(
        prog="python -m examples.bert.compile_step",
        description="Compile the training step of BERT for TPUs without having any.",
    )
    add_bert_step(parser)

    def make_trainer(config: Config, topology: Topology, args: argparse.Namespace) -> Trainer:
        return bert_trainer(config, topology, step_options(args), **bert_options(args))

    return start("bert", parser, PRESETS, make_trainer, argv)


if __name__ == "__main__":
    sys.exit(main())
