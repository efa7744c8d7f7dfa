"""The training step: an ordinary jitted function over arrays with NamedShardings.

step = make_step(config, mesh)
state = step.init(seed=0)
state, metrics = step.train(state, tokens, mask)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from examples.llm.config import Config
from examples.llm.model import Transformer
from examples.llm.sharding import Cuts
from examples.llm.tokens import END

State = dict[str, Any]  # "params", "optimizer", "step"


@dataclass(frozen=True)
class Step:
    """The compiled functions of a run, and the shardings of their arrays."""

    init: Any  # seed -> state
    train: Any  # state, tokens, mask, seed of dropout -> state, metrics
    cuts: Cuts
    types: State  # of the state, with shardings


def make_step(config: Config, mesh: Mesh, *, donate: bool = True) -> Step:
    """Build the step for a mesh with axes "data" and "fsdp".

    Args:
        config: The settings.
        mesh: See `examples.llm.sharding`.
        donate: Donate the state to the step.
    """
    cuts = Cuts(mesh)
    model, tx = Transformer(config, cuts), make_optimizer(config)

    def init(seed: Any) -> State:
        row = jnp.zeros((mesh.size, 2), jnp.int32)
        params = model.init(jax.random.key(seed), row, row, row)["params"]
        return {"params": params, "optimizer": tx.init(params), "step": jnp.int32(0)}

    types = jax.eval_shape(init, 0)
    shardings = cuts.shardings(types)

    def loss_of(params: Any, tokens: Any, mask: Any, keys: Any) -> tuple[jax.Array, jax.Array]:
        """Return the sum of the losses of the tokens that count, and their number."""
        inputs, targets, document, position, counts = unpack(tokens)
        logits = model.apply({"params": params}, inputs, document, position, keys)
        counts = (counts & mask[:, None]).astype(jnp.float32)
        return (token_losses(logits, targets, config.z_loss) * counts).sum(), counts.sum()

    @partial(jax.jit, out_shardings=(shardings, None), donate_argnums=(0,) if donate else ())
    def train(state: State, tokens: Any, mask: Any, seed: Any = 0) -> tuple[State, Any]:
        keys = dropout_keys(seed, state["step"], len(tokens)) if config.dropout else None
        rows = parts_of((tokens, mask, keys), config.microbatches, cuts)
        loss, grads = mean_over_tokens(loss_of, state["params"], rows)
        updates, optimizer = tx.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        metrics = {"loss": loss, "grad_norm": optax.global_norm(grads)}
        return {"params": params, "optimizer": optimizer, "step": state["step"] + 1}, metrics

    typed = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), types, shardings
    )
    return Step(jax.jit(init, out_shardings=shardings), train, cuts, typed)


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Return AdamW with warm-up and cosine decay; norms are not decayed."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0, config.lr, config.warmup, config.steps, config.end_lr * config.lr
    )
    adamw = optax.adamw(
        rate,
        config.beta_1,
        config.beta_2,
        config.epsilon,
        weight_decay=config.weight_decay,
        mask=lambda params: jax.tree_util.tree_map_with_path(_is_matrix, params),
    )
    return optax.chain(optax.clip_by_global_norm(config.clip), adamw)


def _is_matrix(path: Any, _: Any) -> bool:
    return not path[-1].key.endswith("norm")


def unpack(tokens: jax.Array) -> tuple[jax.Array, ...]:
    """Split rows of packed documents, with one token more than a row has, for the model.

    Returns:
        Inputs, targets, the number and the place of each input's document, and which targets
        count: those of the same document as their input.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    ends = inputs == END
    starts = jnp.pad(ends[:, :-1], ((0, 0), (1, 0)))
    place = jnp.arange(inputs.shape[1])
    first = jax.lax.cummax(jnp.where(starts, place, 0), axis=1)
    return inputs, targets, jnp.cumsum(starts, axis=1), place - first, ~ends


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def token_losses(logits: jax.Array, targets: jax.Array, z_loss: float) -> jax.Array:
    """Return cross entropies, and what keeps the log of the softmax's denominator near zero.

    They are float32. Only the logits are kept for the backward pass: each array of this size costs
    as much memory and time as several layers.
    """
    return _losses_forward(logits, targets, z_loss)[0]


def _losses_forward(logits: jax.Array, targets: jax.Array, z_loss: float) -> tuple[jax.Array, Any]:
    wide = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(wide, axis=-1)
    right = jnp.where(_is_target(logits, targets), wide, 0).sum(-1)
    return log_z - right + z_loss * jnp.square(log_z), (logits, targets, log_z)


def _losses_backward(z_loss: float, kept: Any, gradient: jax.Array) -> tuple[jax.Array, None]:
    logits, targets, log_z = kept
    softmax = jnp.exp(logits.astype(jnp.float32) - log_z[..., None])
    slope = (1 + 2 * z_loss * log_z)[..., None] * softmax - _is_target(logits, targets)
    return (slope * gradient[..., None]).astype(logits.dtype), None


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.arange(logits.shape[-1]) == targets[..., None]


token_losses.defvjp(_losses_forward, _losses_backward)


def dropout_keys(seed: Any, step: Any, num_rows: int) -> jax.Array:
    """Return a key for each row of a step's batch; padding comes last and changes none."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(num_rows))


def parts_of(rows: Any, parts: int, cuts: Cuts) -> Any:
    """Split a batch into equal microbatches, each with rows of every chip."""

    def cut(x: jax.Array) -> jax.Array:
        return x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(cut, rows)


def mean_over_tokens(loss_of: Any, params: Any, parts: Any) -> tuple[jax.Array, Any]:
    """Return the mean loss over the unmasked tokens of all microbatches, and its gradients."""

    def one_part(total: Any, part: Any) -> tuple[Any, None]:
        one = jax.value_and_grad(loss_of, has_aux=True)(params, *part)
        return jax.tree.map(jnp.add, total, one), None

    if len(parts[0]) == 1:
        first = jax.tree.map(lambda x: x[0], parts)
        (loss, count), grads = jax.value_and_grad(loss_of, has_aux=True)(params, *first)
    else:
        start = ((0.0, 0.0), jax.tree.map(jnp.zeros_like, params))
        ((loss, count), grads), _ = jax.lax.scan(one_part, start, parts)
    return loss / count, jax.tree.map(lambda grad: grad / count, grads)
