"""What every rank does in a step of training, and in one of evaluation."""

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
from examples.resnet50.batch import Batch
from examples.resnet50.config import Config
from examples.resnet50.model import ResNet, normalise
from ftmesh.collectives import BatchShares, weighted_sum
from ftmesh.nn import ChipGroups, GroupBatchNorm
from ftmesh.optim import lars, matrix_mask


def make_model(
    config: Config, groups: ChipGroups | None = None, *, blocked_stem: bool = False
) -> ResNet:
    """The network, with norms over groups of neighbouring chips; `ResNet` has the rest."""
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
    """The learning rate of each step, counted from 0."""
    return poly_decay(
        config.base_lr,
        warmup_steps=config.warmup_steps,
        total_steps=config.total_steps,
        end=config.end_lr,
        power=config.lr_power,
    )


def make_transformation(config: Config, lr_schedule: Any) -> optax.GradientTransformation:
    """LARS on kernels; biases and the scales of norms get plain momentum, and no decay."""
    return lars(
        lr_schedule,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        weight_decay_mask=matrix_mask,
        eps=config.lars_epsilon,
    )


def loss_of_rank(
    model: ResNet,
    config: Config,
    parallel: DataParallel,
    shares: BatchShares,
    params: Any,
    stats: Any,
    batch: Batch,
) -> tuple[jax.Array, Any]:
    """A rank's part of the mean loss over all images that there are, and its new statistics.

    Images that could not be read leave a batch smaller than it should be.
    """
    weights = weights_of(batch)
    num_images = parallel.sum(weights.sum())
    logits, changed = model.apply(
        {"params": params, "batch_stats": stats},
        normalise(batch.images, model.dtype),
        train=True,
        weights=weights,
        mutable=["batch_stats"],
    )
    labels = jax.nn.one_hot(batch.labels, config.num_classes)
    smooth = optax.smooth_labels(labels, config.label_smoothing)
    losses = optax.softmax_cross_entropy(logits, smooth)
    return shares.part_of_mean(losses, weights, num_images), changed["batch_stats"]


def count_right_of_rank(
    model: ResNet, params: Any, stats: Any, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """How many images of a rank are classified right, and how many there are."""
    variables = {"params": params, "batch_stats": stats}
    logits = model.apply(variables, normalise(batch.images, model.dtype), train=False)
    weights = weights_of(batch)
    right = (jnp.argmax(logits, axis=-1) == batch.labels).astype(jnp.float32)
    return weighted_sum(right, weights), weights.sum()


def weights_of(batch: Batch) -> jax.Array:
    """1 for an image and 0 for padding."""
    return (batch.labels >= 0).astype(jnp.float32)
