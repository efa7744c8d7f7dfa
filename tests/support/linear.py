"""A linear model that trains in a second, with the framework of all trainers.

It uses plain gradient descent: updates are proportional to gradients, so that a wrong factor shows.
"""

import argparse
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.common.arguments import add_run, start_attempts
from examples.common.data_parallel import DataParallel
from examples.common.loop import Job, run, start_log
from examples.common.reader import Batches
from examples.common.trainer import StepOptions, make_trainer
from ftmesh.collectives import BatchShares, weighted_sum
from ftmesh.elastic.elastic_group import SINGLE_PROCESS

BATCH, SIZE, RATE = 24, 3, 0.25
CLOSE = 0.02  # errors below are right answers
TRUE = np.array([1.0, -2.0, 3.0])


class Points(NamedTuple):
    x: jax.Array
    y: jax.Array
    weights: jax.Array


class PointBatches(Batches[Points]):
    """Points on a plane; all values of the step `nan_at`, counted from 1, are NaN."""

    unit = "points"

    def __init__(self, *, nan_at=None, **settings):
        super().__init__(48, **settings)
        self.nan_at = nan_at

    def padding(self, num_rows):
        return Points(np.zeros((num_rows, SIZE)), np.zeros(num_rows), np.zeros(num_rows))

    def example(self, index, position):
        x = np.random.default_rng(index).normal(size=SIZE)
        return x, np.nan if self.nan_at == position // self.batch + 1 else x @ TRUE, 1.0

    def name(self, index):
        return f"point {index}"


def first():
    return {"w": np.zeros(SIZE, np.float32), "b": np.float32(0.5)}, {
        "mean": np.zeros(SIZE, np.float32)
    }


def errors(params, batch):
    return batch.x @ params["w"] + params["b"] - batch.y


def rank_loss(parallel: DataParallel, shares: BatchShares, params, stats, batch):
    losses = errors(params, batch) ** 2
    num_points = parallel.sum(batch.weights.sum())
    own = batch.weights @ batch.x / jnp.maximum(batch.weights.sum(), 1)
    return shares.mean_contribution(losses, batch.weights, num_points), {"mean": own}


def rank_count_right(params, stats, batch):
    right = (jnp.abs(errors(params, batch)) < CLOSE).astype(jnp.float32)
    return weighted_sum(right, batch.weights), batch.weights.sum()


def linear_trainer(
    topology,
    options=None,
    *,
    lr_schedule=lambda step: RATE,
    wire_dtype=None,
    kind=optax.sgd,
    group=SINGLE_PROCESS,
):
    options = options or StepOptions()
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), first())
    parallel = options.data_parallel(topology, types[0], wire_dtype or np.float32, group)
    shares = parallel.shares(BATCH)
    scalar = jax.ShapeDtypeStruct((), np.float32)
    return make_trainer(
        parallel,
        shares,
        types=types,
        row=Points(jax.ShapeDtypeStruct((SIZE,), np.float32), scalar, scalar),
        loss=partial(rank_loss, parallel, shares),
        count_right=rank_count_right,
        transformation=kind(lr_schedule),
        lr_schedule=lr_schedule,
        sharded=options.sharded,
        wire_dtype=wire_dtype,
    )


def linear_job(trainer, *, steps, steps_per_eval=100, nan_at=None):
    batches = partial(
        PointBatches,
        batch=trainer.shares.global_batch,
        rows=trainer.parallel.local_rows(trainer.shares),
    )
    return Job(
        benchmark="linear",
        settings={},
        steps_per_eval=steps_per_eval,
        target=2,
        trainer=trainer,
        first=partial(trainer.first, *first()),
        train=batches(num_steps=steps, nan_at=nan_at),
        validation=batches(),
    )


def arguments(*argv):
    parser = argparse.ArgumentParser()
    add_run(parser, ["tiny"])
    return parser.parse_args([*argv, "--emulate", "one"])


def train(job, *argv):
    """Train in this process; return the report."""
    args, topology = arguments(*argv), job.trainer.parallel.ranks.topology
    for attempt in start_attempts(job.trainer.parallel.group, args, lambda group: topology):
        with attempt:
            report = run(job, attempt, args, start_log(args))
    return report


def descent(steps):
    """The weights after `steps` steps on whole batches, in float64, computed by NumPy."""
    (params, _), losses = first(), []
    batches = PointBatches(batch=BATCH, num_steps=steps)
    for step in range(steps):
        x, y, _ = batches[step][0]
        error = x @ params["w"] + params["b"] - y
        losses.append(np.mean(error**2))
        grads = {"w": 2 * error @ x / len(x), "b": 2 * error.mean()}
        params = {name: params[name] - RATE * grads[name] for name in params}
    return params, losses
