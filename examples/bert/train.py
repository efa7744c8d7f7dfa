"""Train BERT on a mesh with failed chips, as MLPerf has it.

    python -m examples.bert.train --preset tiny --mesh 8x8 --failed 4x2@2,2 --emulate one
    python -m examples.bert.train --preset mlperf-8192 --data /data/bert --init first.npz \
        --checkpoint-dir /data/run1 --mllog run1.log

`train` reads from top to bottom: the data, the mesh, the model on it, its steps, and the loop.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from examples.bert.batch import Batch
from examples.bert.config import PRESETS, Config
from examples.bert.data import Batches, Reader, open_sequences, unigram_accuracy
from examples.bert.model import init
from examples.bert.published import read_published
from examples.bert.steps import (
    State,
    evaluation_of_rank,
    make_model,
    make_transformation,
    step_of_rank,
)
from ftmesh.topology import Topology
from ftmesh.train.arguments import start
from ftmesh.train.loop import Job, run
from ftmesh.train.lr_schedules import poly_decay
from ftmesh.train.mllog import MLLog
from ftmesh.train.parallel import SPLIT, WHOLE, Parallel
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
        "--wire-dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="in which gradients travel; they are added up in float32 (bfloat16)",
    )
    parser.add_argument(
        "--attention",
        choices=("xla", "cudnn"),
        default="xla",
        help="whose attention to use; cudnn is for NVIDIA GPUs (xla)",
    )
    parser.add_argument(
        "--remat",
        action="store_true",
        help="compute layers once more in the backward pass: slower, and less memory",
    )
    parser.add_argument(
        "--unrolled",
        action="store_true",
        help="run layers without a loop over them: much faster on GPUs, and less memory",
    )


def train(config: Config, topology: Topology, args: argparse.Namespace) -> Report:
    """The whole run."""
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
    )
    sequences = open_split("train", num_sequences=config.train_sequences)
    eval_sequences = open_split("validation", num_sequences=config.eval_sequences)
    config = replace(config, train_sequences=len(sequences), eval_sequences=len(eval_sequences))

    # The first parameters, a plan for sums of their size, and the optimizer on the mesh.
    model = make_model(config, attention=args.attention, remat=args.remat, unrolled=args.unrolled)
    if args.init:
        params = read_published(args.init, jax.eval_shape(lambda: init(model, seed=0)))
    else:
        params = init(model, seed=args.seed)
    wire_dtype = jnp.dtype(args.wire_dtype)
    payload_bytes = sum(leaf.size for leaf in jax.tree.leaves(params)) * wire_dtype.itemsize
    parallel = Parallel.on(topology, args.algorithm, payload_bytes=payload_bytes)
    shares = parallel.shares(config.batch)
    lr_schedule = poly_decay(
        config.base_lr,
        warmup_steps=config.warmup_steps,
        total_steps=config.total_steps,
        end=config.end_lr,
        power=config.lr_power,
    )
    optimizer = parallel.optimizer(
        make_transformation(config, lr_schedule),
        sharded=not args.whole_optimizer and not args.overlap,
        wire_dtype=wire_dtype,
    )
    params = parallel.put(params)
    specs = State(WHOLE, optimizer.specs(params))
    state = State(
        params,
        parallel.jit(optimizer.init, in_specs=(WHOLE,), out_specs=specs.optimizer)(params),
    )

    # What every rank does in a step, in an evaluation, and to write and read a checkpoint.
    rows = Batch(*(SPLIT for _ in Batch._fields))
    train_step = parallel.jit(
        partial(step_of_rank, model, parallel, shares, optimizer, args.overlap, wire_dtype),
        in_specs=(specs, rows),
        out_specs=(specs, WHOLE),
        donate_argnums=(0,),
    )
    eval_step = parallel.jit(
        partial(evaluation_of_rank, model, parallel), in_specs=(WHOLE, rows), out_specs=WHOLE
    )
    to_checkpoint = parallel.jit(
        lambda state: State(state.params, optimizer.gather_state(state.optimizer, state.params)),
        in_specs=(specs,),
        out_specs=WHOLE,
    )
    from_checkpoint = parallel.jit(
        lambda whole: State(whole.params, optimizer.shard_state(whole.optimizer, whole.params)),
        in_specs=(WHOLE,),
        out_specs=specs,
    )
    batches_of = partial(
        Batches,
        length=config.length,
        predictions=config.predictions,
        batch=config.batch,
        rows=parallel.local_rows(shares),
    )

    @contextmanager
    def batches(first_step: int) -> Iterator[Iterator[Batch]]:
        num_steps = args.steps or config.total_steps
        source = batches_of(sequences, num_steps=num_steps, seed=args.seed)
        with Reader(source, first_step=first_step) as reader:
            yield (parallel.feed(batch) for batch in reader)

    def evaluate(state: State) -> float:
        right = seen = 0.0
        with Reader(batches_of(eval_sequences)) as reader:
            for batch in reader:
                counts = eval_step(state.params, parallel.feed(batch))
                right, seen = right + float(counts[0]), seen + float(counts[1])
        return right / seen

    report = run(
        Job(
            benchmark="bert",
            unit="sequences",
            batch=config.batch,
            total_steps=args.steps or config.total_steps,
            steps_per_eval=config.steps_per_eval,
            epoch_examples=config.train_sequences,
            eval_examples=config.eval_sequences,
            target=config.target,
            settings=config.mlperf_settings(),
            lr_schedule=lr_schedule,
            state=state,
            step=train_step,
            batches=batches,
            evaluate=evaluate,
            to_checkpoint=to_checkpoint,
            from_checkpoint=from_checkpoint,
        ),
        args,
        parallel,
        log,
    )
    if jax.process_index() == 0:
        baseline = unigram_accuracy(sequences, eval_sequences)
        print(f"bert: predicting the commonest word everywhere has accuracy {baseline:.4f}")
    return report


if __name__ == "__main__":
    sys.exit(main())
