"""Train the linear model of `tests.support.linear` as one of several processes.

    python linear_train.py ARGUMENTS OF A TRAINER

The variable TROUBLE says what goes wrong in a process; WATCHED prints the devices it used.
"""

import argparse
import json
import os
import resource
import sys
from dataclasses import dataclass
from functools import partial

import optax

from examples.common.arguments import start, step_options
from examples.common.loop import Job, open_data, run, start_log
from ftmesh.errors import DataError
from tests.support.linear import BATCH, PointBatches, first, linear_trainer
from tests.support.watching import DeviceWatcher

TROUBLE = os.environ.get("TROUBLE")


@dataclass(frozen=True)
class Config:
    batch: int = BATCH


class TroubledBatches(PointBatches):
    """A row that this process reads is damaged, from the second batch on."""

    def example(self, index, place):
        if TROUBLE == "bad record" and place >= self.batch:
            raise DataError(f"point {index} is damaged")
        return super().example(index, place)


def train(config, attempt, args):
    topology, group = attempt.topology, attempt.group
    log = start_log(args, group)
    open_data(group, lambda: range(47 if TROUBLE == "less data" else 48), lambda: range(48))
    rate = 0.125 if TROUBLE == "another program" else 0.25
    trainer = linear_trainer(
        topology,
        step_options(args),
        lr_schedule=lambda step: rate,
        kind=optax.adam,
        group=group,
    )
    rows = trainer.parallel.local_rows(trainer.shares)
    batches = partial(TroubledBatches, batch=config.batch, rows=rows)
    params, stats = first()
    if TROUBLE == "other weights":
        params["b"] += 1
    job = Job(
        benchmark="linear",
        settings={},
        steps_per_eval=3,
        target=2,
        trainer=trainer,
        first=partial(trainer.first, params, stats),
        train=batches(num_steps=args.steps, seed=args.seed),
        validation=batches(),
    )
    if TROUBLE == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
    return run(job, attempt, args, log)


def main():
    if TROUBLE == "late":
        sys.exit(0)
    with DeviceWatcher() as watching:
        status = start("linear", argparse.ArgumentParser(), {"tiny": Config()}, train, None)
    if "WATCHED" in os.environ:
        print("used:", json.dumps(sorted(watching.used)), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
