"""Train MLPerf's ResNet-50 on a mesh with failed chips.

    python -m examples.resnet50.train --preset tiny --mesh 8x8 --failed 2x2@2,2
    python -m examples.resnet50.train --preset mlperf-32768 --data /data/imagenet \
        --checkpoint-dir /data/run1 --mllog run1.log

`train` reads from top to bottom: data, trainer, loop.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from examples.common.arguments import start, step_options
from examples.common.loop import Job, open_data, run, start_log
from examples.common.report import Report
from examples.resnet50.config import PRESETS, Config
from examples.resnet50.data import Batches
from examples.resnet50.images import open_images
from examples.resnet50.trainer import first_state, resnet50_trainer
from ftmesh.command_line import Parser
from ftmesh.elastic.attempt import Attempt


def main(argv: Sequence[str] | None = None) -> int:
    """Train from the command line; return the exit status."""
    parser = Parser(
        prog="python -m examples.resnet50.train",
        description="Train MLPerf's ResNet-50 on a mesh with failed chips.",
    )
    return start("resnet50", parser, PRESETS, train, argv)


def train(config: Config, attempt: Attempt, args: argparse.Namespace) -> Report:
    """Train to the end, or until a host is lost."""
    topology, group = attempt.topology, attempt.group
    log = start_log(args, group)

    # Data: opened first, so that errors come before anything is compiled.
    open_split = partial(
        open_images,
        args.data,
        size=config.image_size,
        num_classes=config.num_classes,
        show=group.is_primary,
    )
    images, eval_images = open_data(
        group,
        partial(open_split, "train", num_images=config.train_images),
        partial(open_split, "validation", num_images=config.eval_images),
    )
    config = replace(config, train_images=len(images), eval_images=len(eval_images))

    # Trainer on the mesh, and the rows of a batch that this process reads.
    make_trainer = partial(resnet50_trainer, config, options=step_options(args))
    trainer = make_trainer(topology, group=group)
    rows = trainer.parallel.local_rows(trainer.shares)
    make_batches = partial(Batches, size=config.image_size, batch=config.batch, rows=rows)

    # Loop.
    job = Job(
        benchmark="resnet",
        settings=config.mlperf_settings(),
        steps_per_eval=config.steps_per_eval,
        target=config.target,
        trainer=trainer,
        first=partial(first_state, config, trainer, seed=args.seed),
        train=make_batches(images, num_steps=args.steps or config.total_steps, seed=args.seed),
        validation=make_batches(eval_images),
        remake=make_trainer,
    )
    return run(job, attempt, args, log)


if __name__ == "__main__":
    sys.exit(main())
