"""Train a small network on synthetic points: the smallest complete trainer.

    python -m examples.soak.train --steps 60 --emulate one --mesh 4x4 --failed 2x2@0,0 --out OUT

There are as many points as the steps take, so each is used once. What each process reads is written
to ``used-GENERATION-PROCESS.jsonl`` in FTMESH_RUN_DIR or OUT, and the last weights to
``weights.npz`` in OUT. `examples.soak.soak` runs this under injected faults.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.common.arguments import start, step_options
from examples.common.data_parallel import DataParallel
from examples.common.loop import Job, open_data, run, start_log
from examples.common.lr_schedules import poly_decay
from examples.common.report import Report
from examples.common.trainer import State, StepOptions, Trainer, make_trainer
from examples.soak.points import CLASSES, SIZE, PointBatches, Points, used_file
from ftmesh.collectives import BatchShares, weighted_sum
from ftmesh.command_line import Parser
from ftmesh.elastic.attempt import Attempt
from ftmesh.elastic.elastic_group import ElasticGroup
from ftmesh.optim import lamb, matrix_mask
from ftmesh.topology.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a run."""

    batch: int = 48
    steps: int = 60
    hidden: int = 32
    base_lr: float = 0.02
    steps_per_eval: int = 15
    eval_points: int = 96


PRESETS = {"tiny": Config()}
LONG = 600  # steps, from which on the learning rate is lower


def main(argv: Sequence[str] | None = None) -> int:
    """Train from the command line; return the exit status."""
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)  # prints all stacks
    parser = Parser(
        prog="python -m examples.soak.train",
        description="Train a small network on synthetic points, each used once.",
    )
    return start("soak", parser, PRESETS, train, argv)


def train(config: Config, attempt: Attempt, args: argparse.Namespace) -> Report:
    """Train to the end, or until a host is lost."""
    topology, group = attempt.topology, attempt.group
    log = start_log(args, group)
    steps = args.steps or config.steps
    points, _ = open_data(
        group, lambda: range(steps * config.batch), lambda: range(config.eval_points)
    )

    remake = partial(soak_trainer, config, options=step_options(args), steps=steps)
    trainer = remake(topology, group=group)
    make_batches = partial(
        PointBatches, batch=config.batch, rows=trainer.parallel.local_rows(trainer.shares)
    )
    folder = os.environ.get("FTMESH_RUN_DIR") or args.out
    used = used_file(folder, group.generation, group.process) if folder else None

    job = Job(
        benchmark="soak",
        settings={},
        steps_per_eval=config.steps_per_eval,
        target=2,  # never reached, so that all steps are done
        trainer=trainer,
        first=lambda: trainer.first(first_params(config, seed=args.seed), ()),
        train=make_batches(len(points), used=used, num_steps=steps, seed=args.seed),
        validation=make_batches(config.eval_points),
        remake=remake,
        finished=partial(save_weights, Path(args.out)) if args.out and group.is_primary else ignore,
    )
    return run(job, attempt, args, log)


def soak_trainer(
    config: Config, topology: Topology, options: StepOptions, *, steps: int, group: ElasticGroup
) -> Trainer:
    """Build the trainer on the devices of `topology`."""
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), first_params(config, seed=0)
    )
    parallel = options.data_parallel(topology, params, jnp.float32, group)
    shares = parallel.shares(config.batch)
    # Constant after the warm-up, so that the last example weighs as much as any; lower in long
    # runs, or rounding errors would grow to the effect of an example.
    peak = config.base_lr * min(1, LONG / steps)
    warmup = min(5, steps // 2)
    lr_schedule = poly_decay(peak, warmup_steps=warmup, total_steps=steps, end=peak)
    return make_trainer(
        parallel,
        shares,
        types=(params, ()),
        row=Points(jax.ShapeDtypeStruct((SIZE,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)),
        loss=partial(rank_loss, parallel, shares),
        count_right=rank_count_right,
        transformation=lamb(
            lr_schedule, b1=0.5, eps=EPSILON, weight_decay=0.01, weight_decay_mask=matrix_mask
        ),
        lr_schedule=lr_schedule,
        sharded=options.sharded,
    )


# Of LAMB. With a tiny one, a gradient that is only rounding error would move a weight as far as any
# other, and runs on two meshes would diverge.
EPSILON = 1e-3


def first_params(config: Config, *, seed: int) -> dict[str, Any]:
    """Return random weights, as NumPy arrays."""
    rng = np.random.default_rng(seed)
    sizes = (SIZE, config.hidden, CLASSES)
    return {
        f"layer{number}": {
            "w": (rng.normal(size=(before, after)) / np.sqrt(before)).astype(np.float32),
            "b": np.zeros(after, np.float32),
        }
        for number, (before, after) in enumerate(pairwise(sizes))
    }


def predict(params: Any, x: jax.Array) -> jax.Array:
    """Return the logits of points."""
    first, second = params["layer0"], params["layer1"]
    return jnp.tanh(x @ first["w"] + first["b"]) @ second["w"] + second["b"]


def rank_loss(
    parallel: DataParallel, shares: BatchShares, params: Any, stats: Any, batch: Points
) -> tuple[jax.Array, Any]:
    """Return a rank's term of the mean loss; the network has no statistics."""
    labels = jnp.maximum(batch.label, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(predict(params, batch.x), labels)
    return shares.mean_contribution(losses, point_weights(batch)), stats


def rank_count_right(params: Any, stats: Any, batch: Points) -> tuple[jax.Array, jax.Array]:
    """Count the points of a rank that are classified correctly, and all of them."""
    right = jnp.argmax(predict(params, batch.x), axis=-1) == batch.label
    return weighted_sum(right.astype(jnp.float32), point_weights(batch)), point_weights(batch).sum()


def point_weights(batch: Points) -> jax.Array:
    """Return 1 for a point and 0 for padding."""
    return (batch.label >= 0).astype(jnp.float32)


def save_weights(folder: Path, state: State) -> None:
    """Write the weights, which are replicated, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        arrays[name] = np.asarray(leaf.addressable_shards[0].data)
    np.savez(folder / ".weights.npz", **arrays)
    os.replace(folder / ".weights.npz", folder / "weights.npz")


def ignore(state: State) -> None:
    """Do nothing with the last state."""


if __name__ == "__main__":
    sys.exit(main())
