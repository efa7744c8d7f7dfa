"""Compile the whole step of BERT for TPUs that are not there.

    python -m examples.bert.compile_step v6e:16x16 --failed 2x2@2,2 --preset mlperf-8192
    python -m examples.bert.compile_step v6e:16x16 --failed 2x2@2,2 --preset mlperf-8192 \
        --whole-optimizer

Needs libtpu, the TPU compiler, and no TPU. Says what each device must hold.
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
    """Compile from the command line; the exit status."""
    parser = Parser(
        prog="python -m examples.bert.compile_step",
        description="Compile the whole step of BERT for TPUs that are not there.",
    )
    add_bert_step(parser)

    def make(config: Config, topology: Topology, args: argparse.Namespace) -> Trainer:
        return bert_trainer(config, topology, step_options(args), **bert_options(args))

    return start("bert", parser, PRESETS, make, argv)


if __name__ == "__main__":
    sys.exit(main())
