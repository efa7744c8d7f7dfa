"""The trainer of BERT: model, optimizer and loss, on the devices of a mesh."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from examples.bert.config import Config
from examples.bert.data import Batch
from examples.bert.model import Bert, init, predict
from examples.bert.published import read_published
from examples.common.data_parallel import DataParallel
from examples.common.lr_schedules import poly_decay
from examples.common.trainer import State, StepOptions, Trainer, make_trainer
from ftmesh.collectives import BatchShares, weighted_sum
from ftmesh.elastic.elastic_group import SINGLE_PROCESS, ElasticGroup
from ftmesh.optim import lamb, matrix_mask
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
    group: ElasticGroup = SINGLE_PROCESS,
) -> Trainer:
    """Build the trainer on the devices of `topology`, which belong to `group`.

    Args:
        config: The settings of a run.
        topology: The mesh.
        options: How a step is distributed.
        wire_dtype: What gradients are sent in.
        attention: See `Bert`, as for `remat` and `unrolled`.
        remat: Recompute layers in the backward pass.
        unrolled: Run layers without a loop; only then do sums overlap the backward pass.
        group: The processes that own the devices.
    """
    model = make_model(config, attention=attention, remat=remat, unrolled=unrolled)
    params = jax.eval_shape(partial(init, model, seed=0))
    parallel = options.data_parallel(topology, params, wire_dtype, group)
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
        loss=partial(rank_loss, model, parallel, shares),
        count_right=partial(rank_count_right, model),
        transformation=make_optimizer(config, lr_schedule),
        lr_schedule=lr_schedule,
        sharded=options.sharded,
        wire_dtype=jnp.dtype(wire_dtype),
    )


def first_state(
    config: Config, trainer: Trainer, *, seed: int, published: str | None = None
) -> State:
    """Return the initial state of a run: random, or from the arrays of a `published` file."""
    random_params = partial(init, make_model(config), seed=seed)
    if published:
        return trainer.first(read_published(published, jax.eval_shape(random_params)), ())
    return trainer.first(random_params(), ())


def add_bert_step(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that change how a step of BERT is compiled."""
    parser.add_argument(
        "--wire-dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="what gradients are sent in; they are added in float32, and so are partial sums of "
        "many sent (bfloat16)",
    )
    parser.add_argument(
        "--attention",
        choices=("xla", "cudnn"),
        default="xla",
        help="implementation of attention; cudnn is for NVIDIA GPUs (default: xla)",
    )
    parser.add_argument(
        "--remat",
        action="store_true",
        help="recompute layers in the backward pass: slower, less memory",
    )
    parser.add_argument(
        "--unrolled",
        action="store_true",
        help="run layers without a loop: on GPUs much faster, and less memory",
    )


def bert_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `add_bert_step` as keyword arguments of `bert_trainer`."""
    return {name: getattr(args, name) for name in ("wire_dtype", "attention", "remat", "unrolled")}


def make_model(
    config: Config,
    *,
    attention: Literal["xla", "cudnn"] = "xla",
    remat: bool = False,
    unrolled: bool = False,
) -> Bert:
    """Return the network."""
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
    """Return the learning rate by step, counted from 0."""
    return poly_decay(
        config.base_lr,
        warmup_steps=config.warmup_steps,
        total_steps=config.total_steps,
        end=config.end_lr,
        power=config.lr_power,
    )


def make_optimizer(config: Config, lr_schedule: Any) -> optax.GradientTransformation:
    """Return LAMB for matrices; biases and norm scales get Adam's update without weight decay."""
    return lamb(
        lr_schedule,
        b1=config.beta_1,
        b2=config.beta_2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        weight_decay_mask=matrix_mask,
    )


def rank_loss(
    model: Bert, parallel: DataParallel, shares: BatchShares, params: Any, stats: Any, batch: Batch
) -> tuple[jax.Array, Any]:
    """Return a rank's term of the mean loss; the model has no statistics.

    The loss is the mean over all masked words, whose number varies by sequence, plus the mean over
    sequences of the next-sentence loss.
    """
    masked, present = loss_weights(batch)
    num_masked, num_sequences = parallel.sum((masked.sum(), present.sum()))
    words, sentences = cross_entropies(predict(model, params, *batch[:4]), batch)
    words, sentences = weighted_sum(words, masked), weighted_sum(sentences, present)
    return len(shares.live) * (words / num_masked + sentences / num_sequences), stats


def rank_count_right(
    model: Bert, params: Any, stats: Any, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """Count the masked words of a rank that are predicted correctly, and all of them."""
    words, _ = predict(model, params, *batch[:4])
    masked, _ = loss_weights(batch)
    right = (jnp.argmax(words, axis=-1) == batch.targets).astype(jnp.float32)
    return weighted_sum(right, masked), masked.sum()


def loss_weights(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return 1 for each masked word and for each sequence, and 0 for padding."""
    masked, present = (x >= 0 for x in (batch.targets, batch.is_random))
    return masked.astype(jnp.float32), present.astype(jnp.float32)


def cross_entropies(
    logits: tuple[jax.Array, jax.Array], batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """Return the losses of masked words and of next sentences; those of padding mean nothing."""
    words, sentences = logits
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    return (
        cross_entropy(words, jnp.maximum(batch.targets, 0)),
        cross_entropy(sentences, jnp.maximum(batch.is_random, 0)),
    )
