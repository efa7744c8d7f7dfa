"""What every rank does in a step of training, and in one of evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from examples.bert.batch import Batch
from examples.bert.config import Config
from examples.bert.model import Bert, predict
from examples.common.data_parallel import DataParallel
from examples.common.lr_schedules import poly_decay
from ftmesh.collectives import BatchShares, weighted_sum
from ftmesh.optim import lamb, matrix_mask


def make_model(
    config: Config,
    *,
    attention: Literal["xla", "cudnn"] = "xla",
    remat: bool = False,
    unrolled: bool = False,
) -> Bert:
    """The network."""
    return Bert(
        num_layers=config.num_layers,
        hidden=config.hidden,
        num_heads=config.num_heads,
        vocabulary=config.vocabulary,
        max_length=config.length,
        stddev=config.stddev,
        dtype=config.dtype,
        attention=attention,
        remat=remat,
        unrolled=unrolled,
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
    """LAMB on matrices; biases and the scales of norms get Adam's update, and no decay."""
    return lamb(
        lr_schedule,
        b1=config.beta_1,
        b2=config.beta_2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        weight_decay_mask=matrix_mask,
    )


def loss_of_rank(
    model: Bert, parallel: DataParallel, shares: BatchShares, params: Any, stats: Any, batch: Batch
) -> tuple[jax.Array, Any]:
    """A rank's part of the mean loss; of statistics the model has none.

    That is the mean over all masked words, of which sequences have more or fewer, and the mean over
    sequences for the sentences that follow.
    """
    masked, whole = weights_of(batch)
    num_masked, num_sequences = parallel.sum((masked.sum(), whole.sum()))
    words, sentences = losses_of(predict(model, params, *batch[:4]), batch)
    words, sentences = weighted_sum(words, masked), weighted_sum(sentences, whole)
    return len(shares.live) * (words / num_masked + sentences / num_sequences), stats


def count_right_of_rank(
    model: Bert, params: Any, stats: Any, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """How many masked words of a rank are predicted right, and how many there are."""
    words, _ = predict(model, params, *batch[:4])
    masked, _ = weights_of(batch)
    right = (jnp.argmax(words, axis=-1) == batch.targets).astype(jnp.float32)
    return weighted_sum(right, masked), masked.sum()


def weights_of(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """1 for a masked word and 0 for padding; 1 for a sequence and 0 where there is none."""
    masked, whole = (x >= 0 for x in (batch.targets, batch.is_random))
    return masked.astype(jnp.float32), whole.astype(jnp.float32)


def losses_of(logits: tuple[jax.Array, jax.Array], batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The cross entropy of each masked word, and of whether each sentence follows.

    Padding has some too, that mean nothing.
    """
    words, sentences = logits
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    return (
        cross_entropy(words, jnp.maximum(batch.targets, 0)),
        cross_entropy(sentences, jnp.maximum(batch.is_random, 0)),
    )
