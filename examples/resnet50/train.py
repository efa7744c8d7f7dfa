"""Train ResNet-50 on a mesh with failed chips, as MLPerf has it.

    python -m examples.resnet50.train --preset tiny --mesh 8x8 --failed 2x2@2,2
    python -m examples.resnet50.train --preset mlperf-32768 --data /data/imagenet \
        --checkpoint-dir /data/run1 --mllog run1.log

`train` reads from top to bottom: the data, the trainer on the mesh, and the loop.
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
from ftmesh.distributed.process_group import ALONE, Cluster
from ftmesh.topology.topology import Topology


def main(argv: Sequence[str] | None = None) -> int:
    """Train from the command line; the exit status."""
    parser = Parser(
        prog="python -m examples.resnet50.train",
        description="Train ResNet-50 on a mesh with failed chips, as MLPerf has it.",
    )
    return start("resnet50", parser, PRESETS, train, argv)


def train(
    config: Config, topology: Topology, args: argparse.Namespace, cluster: Cluster = ALONE
) -> Report:
    """The whole run, in one of the processes that take part in it."""
    log = start_log(args, cluster)

    # The data. What is wrong with it is said before anything is compiled.
    open_split = partial(
        open_images,
        args.data,
        size=config.image_size,
        num_classes=config.num_classes,
        show=cluster.speaks,
    )
    images, eval_images = open_data(
        cluster,
        partial(open_split, "train", num_images=config.train_images),
        partial(open_split, "validation", num_images=config.eval_images),
    )
    config = replace(config, train_images=len(images), eval_images=len(eval_images))

    # The trainer, made for the mesh, and the rows of a batch that this process reads.
    make = partial(resnet50_trainer, config, options=step_options(args))
    trainer = make(topology, cluster=cluster)
    rows = trainer.parallel.local_rows(trainer.shares)
    batches_of = partial(Batches, size=config.image_size, batch=config.batch, rows=rows)

    job = Job(
        benchmark="resnet",
        settings=config.mlperf_settings(),
        steps_per_eval=config.steps_per_eval,
        target=config.target,
        trainer=trainer,
        first=partial(first_state, config, trainer, seed=args.seed),
        train=batches_of(images, num_steps=args.steps or config.total_steps, seed=args.seed),
        validation=batches_of(eval_images),
        remake=make,
    )
    return run(job, args, log)


if __name__ == "__main__":
    sys.exit(main())
