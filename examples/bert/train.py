"""Train BERT on a mesh with failed chips, as MLPerf has it.

    python -m examples.bert.train --preset tiny --mesh 8x8 --failed 4x2@2,2 --emulate one
    python -m examples.bert.train --preset mlperf-8192 --data /data/bert --init first.npz \
        --checkpoint-dir /data/run1 --mllog run1.log

`train` reads from top to bottom: the data, the programs on the mesh, and the loop.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import jax

from examples.bert.batch import Batch
from examples.bert.config import PRESETS, Config
from examples.bert.data import Batches, Reader, open_sequences, unigram_accuracy
from examples.bert.model import init
from examples.bert.programs import add_bert_step, bert_options, make_programs
from examples.bert.published import read_published
from examples.bert.steps import State, make_model
from ftmesh.mesh.topology import Topology
from ftmesh.train.arguments import positive, start, step_options
from ftmesh.train.loop import Job, run
from ftmesh.train.mllog import MLLog
from ftmesh.train.report import Report


def main(argv: Sequence[str] | None = None) -> int:
    """Train from the command line; the exit status."""
    parser = argparse.ArgumentParser(
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


def train(config: Config, topology: Topology, args: argparse.Namespace) -> Report:
    """The whole run."""
    config = replace(config, packed=args.packed)
    log = MLLog(args.mllog if jax.process_index() == 0 else None, append=args.resume)
    log.event("cache_clear", True)
    log.start("init")

    # The data. What is wrong with it is said before anything is compiled.
    open_split = partial(
        open_sequences,
        args.data,
        length=config.length,
        predictions=config.predictions,
        vocabulary=config.vocabulary,
        packed=config.packed,
    )
    sequences = open_split("train", num_sequences=config.train_sequences)
    eval_sequences = open_split("validation", num_sequences=config.eval_sequences)
    config = replace(config, train_sequences=len(sequences), eval_sequences=len(eval_sequences))

    # The programs, made for the mesh, and what they start from.
    programs = make_programs(config, topology, **step_options(args), **bert_options(args))
    feed, rows = programs.parallel.feed, programs.parallel.local_rows(programs.shares)
    model = make_model(config)
    if args.init:
        params = read_published(args.init, jax.eval_shape(partial(init, model, seed=0)))
    else:
        params = init(model, seed=args.seed)
    state = programs.first(params)
    del params  # the step takes them over

    batches_of = partial(
        Batches,
        length=config.length,
        predictions=config.predictions,
        packed=config.packed,
        batch=config.batch,
        rows=rows,
    )

    @contextmanager
    def batches(first_step: int) -> Iterator[Iterator[Batch]]:
        num_steps = args.steps or config.total_steps
        source = batches_of(sequences, num_steps=num_steps, seed=args.seed)
        with Reader(source, first_step=first_step) as reader:
            yield (feed(batch) for batch in reader)

    def evaluate(state: State) -> float:
        right = seen = 0.0
        with Reader(batches_of(eval_sequences)) as reader:
            for batch in reader:
                counts = programs.evaluate(state.params, feed(batch))
                right, seen = right + float(counts[0]), seen + float(counts[1])
        return right / seen

    report = run(
        Job(
            benchmark="bert",
            unit="sequences" if config.packed == 1 else "rows",
            batch=config.batch,
            total_steps=args.steps or config.total_steps,
            steps_per_eval=config.steps_per_eval,
            epoch_examples=config.train_sequences,
            eval_examples=config.eval_sequences,
            target=config.target,
            settings=config.mlperf_settings(),
            programs=programs,
            state=state,
            batches=batches,
            evaluate=evaluate,
        ),
        args,
        log,
    )
    if jax.process_index() == 0:
        baseline = unigram_accuracy(sequences, eval_sequences)
        print(f"bert: predicting the commonest word everywhere has accuracy {baseline:.4f}")
    return report


if __name__ == "__main__":
    sys.exit(main())
