"""Train ResNet-50 on a mesh with failed chips, as MLPerf has it.

    python -m examples.resnet50.train --preset tiny --mesh 8x8 --failed 2x2@2,2
    python -m examples.resnet50.train --preset mlperf-32768 --data /data/imagenet \
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

from examples.resnet50.batch import Batch
from examples.resnet50.config import PRESETS, Config
from examples.resnet50.data import Batches, Reader
from examples.resnet50.images import open_images
from examples.resnet50.model import init
from examples.resnet50.programs import make_programs
from examples.resnet50.steps import State, make_model
from ftmesh.mesh.topology import Topology
from ftmesh.train.arguments import start, step_options
from ftmesh.train.loop import Job, run
from ftmesh.train.mllog import MLLog
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

    # The programs, made for the mesh, and what they start from.
    programs = make_programs(config, topology, **step_options(args))
    feed, rows = programs.parallel.feed, programs.parallel.local_rows(programs.shares)
    state = programs.first(init(make_model(config), image_size=config.image_size, seed=args.seed))

    batches_of = partial(Batches, size=config.image_size, batch=config.batch, rows=rows)

    @contextmanager
    def batches(first_step: int) -> Iterator[Iterator[Batch]]:
        num_steps = args.steps or config.total_steps
        source = batches_of(images, num_steps=num_steps, seed=args.seed)
        with Reader(source, first_step=first_step) as reader:
            yield (feed(batch) for batch in reader)

    def evaluate(state: State) -> float:
        whole = programs.to_checkpoint(state)
        right = seen = 0.0
        with Reader(batches_of(eval_images)) as reader:
            for batch in reader:
                counts = programs.evaluate(whole.params, whole.stats, feed(batch))
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
            programs=programs,
            state=state,
            batches=batches,
            evaluate=evaluate,
        ),
        args,
        log,
    )


if __name__ == "__main__":
    sys.exit(main())
