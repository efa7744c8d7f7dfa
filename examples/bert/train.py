"""Train MLPerf's BERT on a mesh with failed chips.

    python -m examples.bert.train --preset tiny --mesh 8x8 --failed 4x2@2,2 --emulate one
    python -m examples.bert.train --preset mlperf-8192 --data /data/bert --init first.npz \
        --checkpoint-dir /data/run1 --mllog run1.log

`train` reads from top to bottom: data, trainer, loop.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from examples.bert.config import PRESETS, Config
from examples.bert.data import Batches, open_sequences, unigram_accuracy
from examples.bert.trainer import add_bert_step, bert_options, bert_trainer, first_state
from examples.common.arguments import positive, start, step_options
from examples.common.loop import Job, open_data, run, start_log
from examples.common.report import Report
from examples.common.trainer import Trainer
from ftmesh.command_line import Parser
from ftmesh.elastic.attempt import Attempt


def main(argv: Sequence[str] | None = None) -> int:
    """Train from the command line; return the exit status."""
    parser = Parser(
        prog="python -m examples.bert.train",
        description="Train MLPerf's BERT on a mesh with failed chips.",
    )
    add_bert(parser)
    return start("bert", parser, PRESETS, train, argv)


def add_bert(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that only this trainer takes."""
    parser.add_argument(
        "--init",
        metavar="FILE",
        help="start from this .npz file of arrays under their published names",
    )
    parser.add_argument(
        "--packed",
        type=positive,
        default=1,
        metavar="N",
        help="maximum number of sequences per row of the data (see pack_records) (default: 1)",
    )
    add_bert_step(parser)


def train(config: Config, attempt: Attempt, args: argparse.Namespace) -> Report:
    """Train to the end, or until a host is lost."""
    topology, group = attempt.topology, attempt.group
    config = replace(config, packed=args.packed)
    log = start_log(args, group)

    # Data: opened first, so that errors come before anything is compiled.
    open_split = partial(
        open_sequences,
        args.data,
        length=config.length,
        predictions=config.predictions,
        packed=config.packed,
        vocabulary=config.vocabulary,
        show=group.is_primary,
    )
    sequences, eval_sequences = open_data(
        group,
        partial(open_split, "train", num_sequences=config.train_sequences),
        partial(open_split, "validation", num_sequences=config.eval_sequences),
    )
    config = replace(config, train_sequences=len(sequences), eval_sequences=len(eval_sequences))

    # Trainer on the mesh, and the rows of a batch that this process reads.
    make_trainer: Callable[..., Trainer] = partial(
        bert_trainer, config, options=step_options(args), **bert_options(args)
    )
    trainer = make_trainer(topology, group=group)
    rows = trainer.parallel.local_rows(trainer.shares)
    make_batches = partial(
        Batches,
        length=config.length,
        predictions=config.predictions,
        packed=config.packed,
        batch=config.batch,
        rows=rows,
    )

    # Loop.
    job = Job(
        benchmark="bert",
        settings=config.mlperf_settings(),
        steps_per_eval=config.steps_per_eval,
        target=config.target,
        trainer=trainer,
        first=partial(first_state, config, trainer, seed=args.seed, published=args.init),
        train=make_batches(sequences, num_steps=args.steps or config.total_steps, seed=args.seed),
        validation=make_batches(eval_sequences),
        remake=make_trainer,
    )
    report = run(job, attempt, args, log)
    if group.is_primary:
        baseline = unigram_accuracy(sequences, eval_sequences)
        print(f"bert: always predicting the commonest word has accuracy {baseline:.4f}")
    return report


if __name__ == "__main__":
    sys.exit(main())
