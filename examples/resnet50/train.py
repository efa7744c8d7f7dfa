"""Train ResNet-50 on a mesh with failed chips, as MLPerf has it.

    python -m examples.resnet50.train --preset tiny --mesh 8x8 --failed 2x2@2,2
    python -m examples.resnet50.train --preset mlperf-32768 --data /data/imagenet \
        --checkpoint-dir /data/run1 --mllog run1.log

`main` reads from top to bottom: the data, the mesh, the model on it, its steps, and the loop.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import jax

from examples.resnet50.batch import Batch
from examples.resnet50.config import PRESETS, Config
from examples.resnet50.data import Batches, Reader
from examples.resnet50.images import open_images
from examples.resnet50.model import init
from examples.resnet50.steps import (
    State,
    evaluation_of_rank,
    in_rows,
    make_model,
    make_transformation,
    own_row,
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
        prog="python -m examples.resnet50.train",
        description="Train ResNet-50 on a mesh with failed chips, as MLPerf has it.",
    )
    return start("resnet50", parser, PRESETS, train, argv)


def train(config: Config, topology: Topology, args: argparse.Namespace) -> Report:
    """The whole run."""
    log = MLLog(args.mllog if jax.process_index() == 0 else None, append=args.resume)
    log.event("cache_clear", True)
    log.start("init")

    # The data. What is wrong with it is said before anything is compiled.
    open_split = partial(
        open_images, args.data, size=config.image_size, num_classes=config.num_classes
    )
    images = open_split("train", num_images=config.train_images)
    eval_images = open_split("validation", num_images=config.eval_images)
    config = replace(config, train_images=len(images), eval_images=len(eval_images))

    # The first parameters, a plan for sums of their size, the model and its optimizer on the mesh.
    variables = init(make_model(config), image_size=config.image_size, seed=args.seed)
    payload_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(variables["params"]))
    parallel = Parallel.on(
        topology, args.algorithm, payload_bytes=payload_bytes, unrolled=args.overlap
    )
    shares = parallel.shares(config.batch)
    model = make_model(config, parallel.groups(config.norm_group, config.batch))
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
    )
    params = parallel.put(variables["params"])
    specs = State(WHOLE, SPLIT, optimizer.specs(params))
    state = State(
        params,
        parallel.put(in_rows(variables["batch_stats"], parallel.num_ranks), SPLIT),
        parallel.jit(optimizer.init, in_specs=(WHOLE,), out_specs=specs.optimizer)(params),
    )

    # What every rank does in a step, in an evaluation, and to write and read a checkpoint.
    train_step = parallel.jit(
        partial(step_of_rank, model, config, parallel, shares, optimizer, args.overlap),
        in_specs=(specs, Batch(SPLIT, SPLIT)),
        out_specs=(specs, WHOLE),
        donate_argnums=(0,),
    )
    eval_step = parallel.jit(
        partial(evaluation_of_rank, model, parallel),
        in_specs=(WHOLE, WHOLE, Batch(SPLIT, SPLIT)),
        out_specs=WHOLE,
    )
    to_checkpoint = parallel.jit(
        lambda state: State(
            state.params,
            parallel.mean(own_row(state.stats)),
            optimizer.gather_state(state.optimizer, state.params),
        ),
        in_specs=(specs,),
        out_specs=WHOLE,
    )
    from_checkpoint = parallel.jit(
        lambda whole: State(
            whole.params,
            in_rows(whole.stats, 1),
            optimizer.shard_state(whole.optimizer, whole.params),
        ),
        in_specs=(WHOLE,),
        out_specs=specs,
    )

    @contextmanager
    def batches(first_step: int) -> Iterator[Iterator[Batch]]:
        source = Batches(
            images,
            size=config.image_size,
            batch=config.batch,
            num_steps=args.steps or config.total_steps,
            seed=args.seed,
            rows=parallel.local_rows(shares),
        )
        with Reader(source, first_step=first_step) as reader:
            yield (parallel.feed(batch) for batch in reader)

    def evaluate(state: State) -> float:
        whole = to_checkpoint(state)
        source = Batches(
            eval_images,
            size=config.image_size,
            batch=config.batch,
            rows=parallel.local_rows(shares),
        )
        right = seen = 0.0
        with Reader(source) as reader:
            for batch in reader:
                counts = eval_step(whole.params, whole.stats, parallel.feed(batch))
                right, seen = right + float(counts[0]), seen + float(counts[1])
        return right / seen

    return run(
        Job(
            benchmark="resnet",
            unit="images",
            batch=config.batch,
            total_steps=args.steps or config.total_steps,
            steps_per_eval=config.steps_per_eval,
            epoch_examples=config.train_images,
            eval_examples=config.eval_images,
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


if __name__ == "__main__":
    sys.exit(main())
