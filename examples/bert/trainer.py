"""The trainer of BERT: what every rank does, on the devices of a mesh."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from examples.bert.batch import Batch
from examples.bert.config import Config
from examples.bert.model import init
from examples.bert.published import read_published
from examples.bert.steps import (
    count_right_of_rank,
    loss_of_rank,
    make_lr_schedule,
    make_model,
    make_transformation,
)
from examples.common.trainer import State, StepOptions, Trainer, make_trainer
from ftmesh.distributed.process_group import ALONE, Cluster
from ftmesh.topology.topology import Topology

_DEFAULTS = StepOptions()


def bert_trainer(
    config: Config,
    topology: Topology,
    options: StepOptions = _DEFAULTS,
    *,
    wire_dtype: Any = jnp.bfloat16,
    attention: Literal["xla", "cudnn"] = "xla",
    remat: bool = False,
    unrolled: bool = False,
    cluster: Cluster = ALONE,
) -> Trainer:
    """All that is compiled for a run on the devices of `topology`, which `cluster` has.

    Gradients travel as `wire_dtype`. Beside sums that overlap the backward pass, that goes on only
    where layers are `unrolled`. See `Bert` for the rest.
    """
    model = make_model(config, attention=attention, remat=remat, unrolled=unrolled)
    params = jax.eval_shape(partial(init, model, seed=0))
    parallel = options.data_parallel(topology, params, wire_dtype, cluster)
    shares = parallel.shares(config.batch)
    sizes = Batch(
        tokens=config.length,
        segments=config.length,
        lengths=config.packed,
        positions=config.predictions,
        targets=config.predictions,
        is_random=config.packed,
    )
    lr_schedule = make_lr_schedule(config)
    return make_trainer(
        parallel,
        shares,
        types=(params, ()),
        row=Batch(*(jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes)),
        loss=partial(loss_of_rank, model, parallel, shares),
        count_right=partial(count_right_of_rank, model),
        transformation=make_transformation(config, lr_schedule),
        lr_schedule=lr_schedule,
        sharded=options.sharded,
        wire_dtype=jnp.dtype(wire_dtype),
    )


def first_state(
    config: Config, trainer: Trainer, *, seed: int, published: str | None = None
) -> State:
    """What a run starts from: random numbers, or the arrays of a `published` file."""
    made = partial(init, make_model(config), seed=seed)
    params = read_published(published, jax.eval_shape(made)) if published else made()
    return trainer.first(params, ())


def add_bert_step(parser: argparse.ArgumentParser) -> None:
    """The arguments of a step that only this trainer has."""
    parser.add_argument(
        "--wire-dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="in which gradients travel; they are added up in float32, and sums of many that are "
        "on their way travel in that too (bfloat16)",
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


def bert_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those arguments, as `bert_trainer` takes them."""
    return {name: getattr(args, name) for name in ("wire_dtype", "attention", "remat", "unrolled")}
