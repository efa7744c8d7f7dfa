"""A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Weights are float32, sharded along "fsdp"; each layer gathers its own in the compute dtype. One
scan runs the layers, so a deep model compiles as fast as a shallow one.

    model = Transformer(config, Cuts(mesh))
    params = model.init(key, *example)["params"]
    logits = model.apply({"params": params}, tokens, document, position)
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from examples.llm.config import Config
from examples.llm.sharding import Cuts

EPSILON = 1e-5  # of norms

_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Rows(NamedTuple):
    """The inputs that all layers share."""

    same: jax.Array | None  # [rows, 1, tokens, tokens]: which are of one document; None: all
    rotation: tuple[jax.Array, jax.Array]  # cosine and sine, [rows, tokens, 1, head size / 2]
    keys: jax.Array | None  # of dropout, one for each row


class Base(nn.Module):
    """A module whose weights are sharded along "fsdp"."""

    config: Config
    cuts: Cuts

    def weight(self, name: str, *shape: int, stddev: float | None = None) -> jax.Array:
        """Return a weight as it is stored: float32, padded and sharded."""
        normal = nn.initializers.truncated_normal(stddev or self.config.stddev)
        return self.param(name, lambda key: self.cuts.pad(normal(key, shape)))

    def linear(self, x: jax.Array, name: str, size: int, stddev: float | None = None) -> jax.Array:
        """Multiply by a weight, in the compute dtype."""
        shape = (x.shape[-1], size)
        weight = self.weight(name, *shape, stddev=stddev)
        return self.cuts.product(x, weight, shape, x.dtype)

    def norm(self, name: str, x: jax.Array) -> jax.Array:
        """Divide each vector by its root mean square, in float32."""
        scale = self.param(name, nn.initializers.ones_init(), x.shape[-1:])
        wide = x.astype(jnp.float32)
        mean = jnp.square(wide).mean(-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean + EPSILON) * scale).astype(x.dtype)


class Layer(Base):
    """Attention, then the feed-forward network, each added to its input."""

    @nn.compact
    def __call__(self, x: jax.Array, number: jax.Array, rows: Rows) -> tuple[jax.Array, None]:
        """Return vectors of the same shape; `number` counts layers."""
        config, hidden = self.config, self.config.hidden
        narrow = config.stddev / (2 * config.num_layers) ** 0.5  # of what is added to `x`

        def heads(y: jax.Array, name: str, count: int) -> jax.Array:
            y = self.linear(y, name, count * config.head_size)
            return y.reshape(*y.shape[:-1], count, config.head_size)

        y = self.norm("attention_norm", x)
        query = rotate(heads(y, "query", config.num_heads), rows.rotation)
        key = rotate(heads(y, "key", config.num_kv_heads), rows.rotation)
        value = heads(y, "value", config.num_kv_heads)
        y = jax.nn.dot_product_attention(
            query, key, value, mask=rows.same, is_causal=True, implementation=config.attention
        )
        y = y.reshape(*y.shape[:-2], -1)
        y = self.linear(y, "project", hidden, stddev=narrow)
        x = x + self.dropout(y, rows.keys, 2 * number)

        y = self.norm("ffn_norm", x)
        gate, up = (self.linear(y, name, config.ffn) for name in ("gate", "up"))
        y = self.linear(nn.silu(gate) * up, "down", hidden, stddev=narrow)
        return x + self.dropout(y, rows.keys, 2 * number + 1), None

    def dropout(self, x: jax.Array, keys: jax.Array | None, number: jax.Array) -> jax.Array:
        """Drop entries of each row by its own key, independent of other rows and the mesh."""
        if keys is None or not self.config.dropout:
            return x
        kept = 1 - self.config.dropout

        def mask(key: jax.Array) -> jax.Array:
            return jax.random.bernoulli(jax.random.fold_in(key, number), kept, x.shape[1:])

        return jnp.where(jax.vmap(mask)(keys), x / kept, 0)


class Transformer(Base):
    """The network, over rows of packed documents."""

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        document: jax.Array,
        position: jax.Array,
        keys: jax.Array | None = None,
    ) -> jax.Array:
        """Return the logits of the next token at each position.

        Args:
            tokens: ``[rows, tokens]``.
            document: Index of each token's document in its row; tokens attend to no other, unless
                `config.attend` is "row".
            position: Position of each token in its document.
            keys: Dropout keys, one per row; None for no dropout.
        """
        config = self.config
        same = None
        if config.attend == "document":
            same = document[:, None, :, None] == document[:, None, None, :]
        else:
            position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        rows = Rows(same, rotation(position, config), keys)

        shape = (config.vocabulary, config.hidden)
        table = self.weight("embedding", *shape)
        x = self.cuts.look_up(table, tokens, shape, config.dtype)
        layers = nn.scan(
            Layer
            if config.remat == "none"
            else nn.remat(Layer, prevent_cse=config.unrolled, policy=_POLICIES[config.remat]),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast),
            length=config.num_layers,
            unroll=config.num_layers if config.unrolled else 1,
        )
        x, _ = layers(config, self.cuts, name="layers")(x, jnp.arange(config.num_layers), rows)
        x = self.norm("norm", x)
        if not config.tied:
            shape = shape[::-1]
            table = self.weight("head", *shape)
        return self.cuts.product(x, table, shape, config.logits, turned=config.tied)


def rotation(position: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine of the angles by which pairs of entries turn at each position."""
    half = config.head_size // 2
    rates = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = position[..., None, None] * rates
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, by: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn pairs of entries, one from each half of a head, by their angles."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = by
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
