"""Train BERT on a mesh with failed chips, as MLPerf has it.

    python -m examples.bert.train --preset tiny --mesh 8x8 --failed 4x2@2,2 --emulate one
    python -m examples.bert.train --preset mlperf-8192 --data /data/bert --init first.npz \
        --checkpoint-dir /data/run1 --mllog run1.log

`train` reads from top to bottom: the data, the trainer on the mesh, and the loop.
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
from ftmesh.distributed.process_group import ALONE, Cluster
from ftmesh.topology.topology import Topology


def main(argv: Sequence[str] | None = None) -> int:
    """Train from the command line; the exit status."""
    parser = Parser(
        prog="python -m examples.bert.train",
        description="Train BERT on a mesh with failed chips, as MLPerf has it.",
    )
    add_bert(parser)
    return start("bert", parser, PRESETS, train, argv)


def add_bert(parser: argparse.ArgumentParser) -> None:
    """The arguments that only this trainer takes."""
    parser.add_argument(
        "--init",
        metavar="FILE",
        help="start from the arrays in this .npz file, under their published names",
    )
    parser.add_argument(
        "--packed",
        type=positive,
        default=1,
        metavar="N",
        help="sequences in a row of the data, at most, as pack_records puts them there (1)",
    )
    add_bert_step(parser)


def train(
    config: Config, topology: Topology, args: argparse.Namespace, cluster: Cluster = ALONE
) -> Report:
    """The whole run, in one of the processes that take part in it."""
    config = replace(config, packed=args.packed)
    log = start_log(args, cluster)

    # The data. What is wrong with it is said before anything is compiled.
    open_split = partial(
        open_sequences,
        args.data,
        length=config.length,
        predictions=config.predictions,
        packed=config.packed,
        vocabulary=config.vocabulary,
        show=cluster.speaks,
    )
    sequences, eval_sequences = open_data(
        cluster,
        partial(open_split, "train", num_sequences=config.train_sequences),
        partial(open_split, "validation", num_sequences=config.eval_sequences),
    )
    config = replace(config, train_sequences=len(sequences), eval_sequences=len(eval_sequences))

    # The trainer, made for the mesh, and the rows of a batch that this process reads.
    make: Callable[..., Trainer] = partial(
        bert_trainer, config, options=step_options(args), **bert_options(args)
    )
    trainer = make(topology, cluster=cluster)
    rows = trainer.parallel.local_rows(trainer.shares)
    batches_of = partial(
        Batches,
        length=config.length,
        predictions=config.predictions,
        packed=config.packed,
        batch=config.batch,
        rows=rows,
    )

    job = Job(
        benchmark="bert",
        settings=config.mlperf_settings(),
        steps_per_eval=config.steps_per_eval,
        target=config.target,
        trainer=trainer,
        first=partial(first_state, config, trainer, seed=args.seed, published=args.init),
        train=batches_of(sequences, num_steps=args.steps or config.total_steps, seed=args.seed),
        validation=batches_of(eval_sequences),
        remake=make,
    )
    report = run(job, args, log)
    if cluster.speaks:
        baseline = unigram_accuracy(sequences, eval_sequences)
        print(f"bert: predicting the commonest word everywhere has accuracy {baseline:.4f}")
    return report


if __name__ == "__main__":
    sys.exit(main())
