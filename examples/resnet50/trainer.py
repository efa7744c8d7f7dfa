"""The trainer of ResNet-50: what every rank does, on the devices of a mesh."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from examples.common.trainer import State, StepOptions, Trainer, make_trainer
from examples.resnet50.batch import Batch
from examples.resnet50.config import Config
from examples.resnet50.model import init
from examples.resnet50.steps import (
    count_right_of_rank,
    loss_of_rank,
    make_lr_schedule,
    make_model,
    make_transformation,
)
from ftmesh.distributed.process_group import ALONE, Cluster
from ftmesh.topology.topology import Topology

_DEFAULTS = StepOptions()


def resnet50_trainer(
    config: Config,
    topology: Topology,
    options: StepOptions = _DEFAULTS,
    *,
    cluster: Cluster = ALONE,
) -> Trainer:
    """All that is compiled for a run on the devices of `topology`, which `cluster` has."""
    size = config.image_size
    variables = jax.eval_shape(partial(init, make_model(config), image_size=size, seed=0))
    parallel = options.data_parallel(topology, variables["params"], cluster=cluster)
    shares = parallel.shares(config.batch)
    model = make_model(
        config,
        parallel.groups(config.norm_group, config.batch),
        blocked_stem=parallel.platform == "gpu",
    )
    lr_schedule = make_lr_schedule(config)
    return make_trainer(
        parallel,
        shares,
        types=(variables["params"], variables["batch_stats"]),
        row=Batch(
            jax.ShapeDtypeStruct((size, size, 3), jnp.uint8), jax.ShapeDtypeStruct((), jnp.int32)
        ),
        loss=partial(loss_of_rank, model, config, parallel, shares),
        count_right=partial(count_right_of_rank, model),
        transformation=make_transformation(config, lr_schedule),
        lr_schedule=lr_schedule,
        sharded=options.sharded,
    )


def first_state(config: Config, trainer: Trainer, *, seed: int) -> State:
    """What a run starts from."""
    variables = init(make_model(config), image_size=config.image_size, seed=seed)
    return trainer.first(variables["params"], variables["batch_stats"])
