"""The trainer of ResNet-50: model, optimizer and loss, on the devices of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.common.data_parallel import DataParallel
from examples.common.device_arrays import AXIS
from examples.common.lr_schedules import poly_decay
from examples.common.trainer import State, StepOptions, Trainer, make_trainer
from examples.resnet50.config import Config
from examples.resnet50.data import Batch
from examples.resnet50.model import ResNet, init, normalise
from ftmesh.collectives import BatchShares, weighted_sum
from ftmesh.elastic.elastic_group import SINGLE_PROCESS, ElasticGroup
from ftmesh.nn import ChipGroups, GroupBatchNorm
from ftmesh.optim import lars, matrix_mask
from ftmesh.topology.topology import Topology

_DEFAULTS = StepOptions()


def resnet50_trainer(
    config: Config,
    topology: Topology,
    options: StepOptions = _DEFAULTS,
    *,
    group: ElasticGroup = SINGLE_PROCESS,
) -> Trainer:
    """Build the trainer on the devices of `topology`, which belong to `group`."""
    size = config.image_size
    variables = jax.eval_shape(partial(init, make_model(config), image_size=size, seed=0))
    parallel = options.data_parallel(topology, variables["params"], group=group)
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
        loss=partial(rank_loss, model, config, parallel, shares),
        count_right=partial(rank_count_right, model),
        transformation=make_optimizer(config, lr_schedule),
        lr_schedule=lr_schedule,
        sharded=options.sharded,
    )


def first_state(config: Config, trainer: Trainer, *, seed: int) -> State:
    """Return the initial state of a run."""
    variables = init(make_model(config), image_size=config.image_size, seed=seed)
    return trainer.first(variables["params"], variables["batch_stats"])


def make_model(
    config: Config, groups: ChipGroups | None = None, *, blocked_stem: bool = False
) -> ResNet:
    """Return the network, with batch norms over groups of neighbouring chips."""
    return ResNet(
        num_classes=config.num_classes,
        stage_sizes=config.stage_sizes,
        width=config.width,
        small_images=config.small_images,
        blocked_stem=blocked_stem,
        dtype=config.dtype,
        norm=partial(GroupBatchNorm, groups=groups, axis_name=AXIS),
    )


def make_lr_schedule(config: Config) -> Callable[[Any], Any]:
    """Return the learning rate by step, counted from 0."""
    return poly_decay(
        config.base_lr,
        warmup_steps=config.warmup_steps,
        total_steps=config.total_steps,
        end=config.end_lr,
        power=config.lr_power,
    )


def make_optimizer(config: Config, lr_schedule: Any) -> optax.GradientTransformation:
    """Return LARS for kernels; biases and norm scales get momentum without weight decay."""
    return lars(
        lr_schedule,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        weight_decay_mask=matrix_mask,
        eps=config.lars_epsilon,
    )


def rank_loss(
    model: ResNet,
    config: Config,
    parallel: DataParallel,
    shares: BatchShares,
    params: Any,
    stats: Any,
    batch: Batch,
) -> tuple[jax.Array, Any]:
    """Return a rank's term of the mean loss over all images, and its new statistics.

    Images that could not be read are missing from the batch, and from the mean.
    """
    weights = image_weights(batch)
    num_images = parallel.sum(weights.sum())
    logits, updates = model.apply(
        {"params": params, "batch_stats": stats},
        normalise(batch.images, model.dtype),
        train=True,
        weights=weights,
        mutable=["batch_stats"],
    )
    labels = jax.nn.one_hot(batch.labels, config.num_classes)
    smooth = optax.smooth_labels(labels, config.label_smoothing)
    losses = optax.softmax_cross_entropy(logits, smooth)
    return shares.mean_contribution(losses, weights, num_images), updates["batch_stats"]


def rank_count_right(
    model: ResNet, params: Any, stats: Any, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """Count the images of a rank that are classified correctly, and all of them."""
    variables = {"params": params, "batch_stats": stats}
    logits = model.apply(variables, normalise(batch.images, model.dtype), train=False)
    weights = image_weights(batch)
    right = (jnp.argmax(logits, axis=-1) == batch.labels).astype(jnp.float32)
    return weighted_sum(right, weights), weights.sum()


def image_weights(batch: Batch) -> jax.Array:
    """Return 1 for an image and 0 for padding."""
    return (batch.labels >= 0).astype(jnp.float32)
