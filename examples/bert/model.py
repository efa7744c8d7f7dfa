"""BERT: a masked language model and a judge of whether one sentence follows another.

Parameters are float32, a tensor for each layer, as the published arrays and LAMB have them; what is
computed has `dtype`, bfloat16 unless told. The layers are run by one scan, over parameters that
`stack_layers` puts together on the way in, so a deep model compiles as fast as a shallow one. Words
are predicted where they are masked, and nowhere else: logits at all positions would cost more
memory than the rest of the model.

    model = bert_large()
    params = init(model, seed=0)
    words, follows = predict(model, params, tokens, segments, lengths, positions)
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

NUM_SEGMENTS = 2
EPSILON = 1e-12  # of norms

_normal = nn.initializers.truncated_normal


class Layer(nn.Module):
    """Attention and two dense layers, each with a way around it and a norm behind it."""

    num_heads: int
    stddev: float
    dtype: Any
    attention: Literal["xla", "cudnn"]

    @nn.compact
    def __call__(self, x: jax.Array, seen_by: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        """Vectors of the same shape. What attends to what, JAX is told by `seen_by`."""
        hidden = x.shape[-1]
        dense = partial(nn.Dense, dtype=self.dtype, kernel_init=_normal(self.stddev))
        norm = partial(nn.LayerNorm, epsilon=EPSILON, dtype=self.dtype)
        query, key, value = (
            dense(hidden, name=name)(x).reshape(*x.shape[:-1], self.num_heads, -1)
            for name in ("query", "key", "value")
        )
        seen = jax.nn.dot_product_attention(
            query, key, value, implementation=self.attention, **seen_by
        )
        x = norm(name="attention_norm")(x + dense(hidden, name="project")(seen.reshape(x.shape)))
        y = nn.gelu(dense(4 * hidden, name="widen")(x), approximate=True)
        return norm(name="norm")(x + dense(hidden, name="narrow")(y)), None


class Embeddings(nn.Module):
    """Vectors of words, of their positions and of their segments, added up."""

    vocabulary: int
    hidden: int
    max_length: int
    stddev: float
    dtype: Any

    def setup(self) -> None:
        """The tables."""
        normal = _normal(self.stddev)
        self.words = self.param("words", normal, (self.vocabulary, self.hidden))
        self.positions = self.param("positions", normal, (self.max_length, self.hidden))
        self.segments = self.param("segments", normal, (NUM_SEGMENTS, self.hidden))
        self.norm = nn.LayerNorm(epsilon=EPSILON, dtype=self.dtype)

    def __call__(self, tokens: jax.Array, segments: jax.Array, places: jax.Array) -> jax.Array:
        """A vector for each token, at its place in its sequence."""
        return self.norm(self.words[tokens] + self.positions[places] + self.segments[segments])

    def logits(self, x: jax.Array) -> jax.Array:
        """How near each vector is to each word."""
        return jnp.einsum("...h,vh->...v", x, self.words.astype(self.dtype))


class Bert(nn.Module):
    """The network over stacked layers; see `predict` for what goes in.

    `attention` is JAX's implementation: "cudnn" is for NVIDIA GPUs, and keeps no matrix of weights
    for the backward pass. With `remat` that computes each layer once more, in place of keeping what
    is inside it. `unrolled` layers are no loop: the program grows with them, and on a GPU it takes
    less time and memory, since nothing is copied into and out of stacks. Weights start with a
    standard deviation of `stddev`.
    """

    num_layers: int
    hidden: int
    num_heads: int
    vocabulary: int = 30_522
    max_length: int = 512
    stddev: float = 0.02
    dtype: Any = jnp.bfloat16
    attention: Literal["xla", "cudnn"] = "xla"
    remat: bool = False
    unrolled: bool = False

    @nn.compact
    def __call__(
        self, tokens: jax.Array, segments: jax.Array, lengths: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Logits of words at `positions`, and of whether the second sentence is a random one."""
        embeddings = Embeddings(
            self.vocabulary,
            self.hidden,
            self.max_length,
            self.stddev,
            self.dtype,
            name="embeddings",
        )
        layers = nn.scan(
            nn.remat(Layer, prevent_cse=False) if self.remat else Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=self.num_layers,
            unroll=self.num_layers if self.unrolled else 1,
        )(self.num_heads, self.stddev, self.dtype, self.attention, name="layers")
        dense = partial(nn.Dense, dtype=self.dtype, kernel_init=_normal(self.stddev))
        starts, places, seen_by = layout(lengths, tokens.shape[-1])
        x, _ = layers(embeddings(tokens, segments, places), seen_by)

        y = jnp.take_along_axis(x, positions[..., None], axis=1)
        y = nn.gelu(dense(self.hidden, name="transform")(y), approximate=True)
        y = nn.LayerNorm(epsilon=EPSILON, dtype=self.dtype, name="transform_norm")(y)
        bias = self.param("word_bias", nn.initializers.zeros_init(), (self.vocabulary,))
        wide = jnp.promote_types(self.dtype, jnp.float32)
        words = embeddings.logits(y).astype(wide) + bias

        first = jnp.take_along_axis(x, starts[..., None], axis=1)
        first = nn.tanh(dense(self.hidden, name="pooler")(first))
        return words, dense(NUM_SEGMENTS, name="next_sentence")(first).astype(wide)


def layout(
    lengths: jax.Array, num_tokens: int
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Where the sequences of each row start, the place of each token in its own, and who sees whom.

    Tokens see those of their sequence. The last is as `jax.nn.dot_product_attention` wants it: a
    length where a row has one sequence, and else a mask.
    """
    places = jnp.arange(num_tokens)
    if lengths.shape[-1] == 1:
        # A row of padding has no token; softmax wants one.
        length = jnp.maximum(lengths[:, 0], 1).astype(jnp.int32)
        return jnp.zeros_like(lengths), places, {"key_value_seq_lengths": length}
    ends = jnp.cumsum(lengths, axis=-1)
    starts = ends - lengths
    owner = (places[:, None] >= ends[:, None, :]).sum(-1)  # of padding, none: it has a number more
    places = places - jnp.take_along_axis(jnp.pad(starts, ((0, 0), (0, 1))), owner, axis=-1)
    together = owner[:, None, :, None] == owner[:, None, None, :]
    return jnp.minimum(starts, num_tokens - 1), places, {"mask": together}


def init(model: Bert, *, seed: int) -> Any:
    """The parameters to start from, a tensor for each layer.

    The generator is "rbg": XLA compiles it in a fifth of the time that the default one takes.
    """
    row, one = jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 1), jnp.int32)
    key = jax.random.key(seed, impl="rbg")
    return jax.jit(lambda key: split_layers(model.init(key, row, row, one, row)["params"]))(key)


def predict(
    model: Bert,
    params: Any,
    tokens: jax.Array,
    segments: jax.Array,
    lengths: jax.Array,
    positions: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Logits of words and of a random next sentence, in float32 or wider.

    Rows of `tokens` and `segments` begin with sequences of the `lengths` given; `positions` are
    those of masked words, as many in each row. The results have shapes
    ``[rows, masked, vocabulary]`` and ``[rows, sequences, 2]``.
    """
    variables = {"params": stack_layers(params, model.dtype)}
    outputs: tuple[jax.Array, jax.Array] = model.apply(
        variables, tokens, segments, lengths, positions
    )
    return outputs


def stack_layers(params: Any, dtype: Any) -> Any:
    """Parameters with those of all layers in one tensor each, the matrices among them as `dtype`.

    They are computed with in that type anyway, and so take half the room as bfloat16.
    """
    layers = [params[name] for name in sorted(params, key=_layer) if _layer(name) >= 0]

    def stack(*tensors: Any) -> jax.Array:
        return jnp.stack([x.astype(dtype) if x.ndim > 1 else x for x in tensors])

    rest = {name: part for name, part in params.items() if _layer(name) < 0}
    return {**rest, "layers": jax.tree.map(stack, *layers)}


def split_layers(params: Any) -> Any:
    """The inverse of `stack_layers`: a tensor for each layer."""
    num_layers = len(jax.tree.leaves(params["layers"])[0])
    rest = {name: part for name, part in params.items() if name != "layers"}
    layers = {
        f"layer_{i}": jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(num_layers)
    }
    return {**rest, **layers}


def _layer(name: str) -> int:
    """Which layer parameters of this name belong to; -1 where to none."""
    return int(name.removeprefix("layer_")) if name.startswith("layer_") else -1


bert_large = partial(Bert, num_layers=24, hidden=1024, num_heads=16)
bert_base = partial(Bert, num_layers=12, hidden=768, num_heads=12)
bert_tiny = partial(Bert, num_layers=2, hidden=48, num_heads=2, vocabulary=256, max_length=32)
