"""What every rank does: a step of training, and a step of evaluation."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from examples.resnet50.batch import Batch
from examples.resnet50.config import Config
from examples.resnet50.model import ResNet, normalise
from ftmesh.train import GroupBatchNorm, Groups, Shares, lars, matrices, weighted_sum
from ftmesh.train.parallel import AXIS, Parallel


class State(NamedTuple):
    """What a step changes. Every rank has running statistics of its own, in a row."""

    params: Any
    stats: Any
    optimizer: Any


def make_model(
    config: Config, groups: Groups | None = None, *, blocked_stem: bool = False
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


def make_transformation(config: Config, lr_schedule: Any) -> optax.GradientTransformation:
    """LARS on kernels; biases and the scales of norms get plain momentum, and no decay."""
    return lars(
        lr_schedule,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        weight_decay_mask=matrices,
        eps=config.lars_epsilon,
    )


def step_of_rank(
    model: ResNet,
    config: Config,
    parallel: Parallel,
    shares: Shares,
    optimizer: Any,
    state: State,
    batch: Batch,
) -> tuple[State, jax.Array]:
    """One step of training: the new state, and the loss over the global batch."""
    weights = (batch.labels >= 0).astype(jnp.float32)
    images = normalise(batch.images, model.dtype)
    labels = jax.nn.one_hot(batch.labels, config.num_classes)

    def loss_of(params: Any) -> tuple[jax.Array, Any]:
        logits, changed = model.apply(
            {"params": params, "batch_stats": own_row(state.stats)},
            images,
            train=True,
            weights=weights,
            mutable=["batch_stats"],
        )
        smooth = optax.smooth_labels(labels, config.label_smoothing)
        losses = optax.softmax_cross_entropy(logits, smooth)
        return shares.part_of_mean(losses, weights), changed["batch_stats"]

    (loss, stats), grads = optimizer.value_and_grad(loss_of, has_aux=True)(state.params)
    params, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
    return State(params, in_rows(stats, 1), optimizer_state), parallel.mean(loss)


def evaluation_of_rank(
    model: ResNet, parallel: Parallel, params: Any, stats: Any, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """How many images of a batch are classified right, and how many there are."""
    variables = {"params": params, "batch_stats": stats}
    logits = model.apply(variables, normalise(batch.images, model.dtype), train=False)
    weights = (batch.labels >= 0).astype(jnp.float32)
    right = (jnp.argmax(logits, axis=-1) == batch.labels).astype(jnp.float32)
    counts: tuple[jax.Array, jax.Array] = parallel.sum(
        (weighted_sum(right, weights), weights.sum())
    )
    return counts


def in_rows(stats: Any, num_ranks: int) -> Any:
    """The same statistics for so many ranks, in rows."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_ranks, *x.shape)), stats)


def own_row(stats: Any) -> Any:
    """The statistics of a rank, from the one row that it has."""
    return jax.tree.map(lambda x: x[0], stats)
