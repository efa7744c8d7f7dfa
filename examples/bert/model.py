"""BERT: masked language model and next-sentence prediction.

Parameters are float32, with separate tensors per layer, as in the published arrays and for LAMB;
activations have `dtype`, by default bfloat16. One scan runs the layers, over parameters that
`stack_layers` stacks, so a deep model compiles as fast as a shallow one. Words are predicted at
masked positions only: logits at all positions would take more memory than the rest of the model.

    model = bert_large()
    params = init(model, seed=0)
    words, is_random = predict(model, params, tokens, segments, lengths, positions)
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
    """Attention and two dense layers, each with a residual connection and a norm."""

    num_heads: int
    stddev: float
    dtype: Any
    attention: Literal["xla", "cudnn"]

    @nn.compact
    def __call__(self, x: jax.Array, masking: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        """Return vectors of the same shape; `masking` goes to JAX's attention."""
        hidden = x.shape[-1]
        dense = partial(nn.Dense, dtype=self.dtype, kernel_init=_normal(self.stddev))
        norm = partial(nn.LayerNorm, epsilon=EPSILON, dtype=self.dtype)
        query, key, value = (
            dense(hidden, name=name)(x).reshape(*x.shape[:-1], self.num_heads, -1)
            for name in ("query", "key", "value")
        )
        y = jax.nn.dot_product_attention(
            query, key, value, implementation=self.attention, **masking
        )
        x = norm(name="attention_norm")(x + dense(hidden, name="project")(y.reshape(x.shape)))
        y = nn.gelu(dense(4 * hidden, name="widen")(x), approximate=True)
        return norm(name="norm")(x + dense(hidden, name="narrow")(y)), None


class Embeddings(nn.Module):
    """The sum of word, position and segment embeddings."""

    vocabulary: int
    hidden: int
    max_length: int
    stddev: float
    dtype: Any

    def setup(self) -> None:
        """Declare the tables."""
        normal = _normal(self.stddev)
        self.words = self.param("words", normal, (self.vocabulary, self.hidden))
        self.positions = self.param("positions", normal, (self.max_length, self.hidden))
        self.segments = self.param("segments", normal, (NUM_SEGMENTS, self.hidden))
        self.norm = nn.LayerNorm(epsilon=EPSILON, dtype=self.dtype)

    def __call__(self, tokens: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        """Return a vector per token, by its position in its sequence."""
        return self.norm(self.words[tokens] + self.positions[positions] + self.segments[segments])

    def logits(self, x: jax.Array) -> jax.Array:
        """Return the inner product of each vector with each word's."""
        return jnp.einsum("...h,vh->...v", x, self.words.astype(self.dtype))


class Bert(nn.Module):
    """The network over stacked layers; see `predict` for its inputs.

    Attributes:
        attention: JAX's implementation. "cudnn" is for NVIDIA GPUs, and keeps no attention matrix
            for the backward pass.
        remat: Recompute each layer in the backward pass instead of keeping its activations.
        unrolled: Run the layers without a loop. The program grows with them; on a GPU it takes less
            time and memory, since nothing is copied into and out of stacks.
        stddev: Of initial weights.
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
        """Return the logits of words at `positions`, and of a random second sentence."""
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
        starts, token_positions, masking = layout(lengths, tokens.shape[-1])
        x, _ = layers(embeddings(tokens, segments, token_positions), masking)

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
    """Return where the sequences of a row start, each token's position in its own, and a mask.

    Tokens attend to tokens of their own sequence. The mask is an argument of
    `jax.nn.dot_product_attention`: a length for one sequence per row, otherwise a mask.
    """
    positions = jnp.arange(num_tokens)
    if lengths.shape[-1] == 1:
        # A row of padding has no token, and softmax needs one.
        length = jnp.maximum(lengths[:, 0], 1).astype(jnp.int32)
        return jnp.zeros_like(lengths), positions, {"key_value_seq_lengths": length}
    ends = jnp.cumsum(lengths, axis=-1)
    starts = ends - lengths
    sequence = (positions[:, None] >= ends[:, None, :]).sum(-1)  # padding: the last one plus 1
    own_start = jnp.take_along_axis(jnp.pad(starts, ((0, 0), (0, 1))), sequence, axis=-1)
    is_same = sequence[:, None, :, None] == sequence[:, None, None, :]
    return jnp.minimum(starts, num_tokens - 1), positions - own_start, {"mask": is_same}


def init(model: Bert, *, seed: int) -> Any:
    """Initialise the parameters, with separate tensors per layer.

    XLA compiles the "rbg" generator in a fifth of the default one's time.
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
    """Return the logits of words and of a random next sentence, in float32 or wider.

    Args:
        model: The network.
        params: As `init` returns them.
        tokens: [rows, tokens]; sequences, then padding.
        segments: Sentence of each token, 0 or 1.
        lengths: [rows, sequences]; tokens of each sequence.
        positions: [rows, masked]; positions of the masked words.

    Returns:
        Logits of shapes ``[rows, masked, vocabulary]`` and ``[rows, sequences, 2]``.
    """
    variables = {"params": stack_layers(params, model.dtype)}
    outputs: tuple[jax.Array, jax.Array] = model.apply(
        variables, tokens, segments, lengths, positions
    )
    return outputs


def stack_layers(params: Any, dtype: Any) -> Any:
    """Stack the parameters of all layers, with matrices in `dtype`, which halves their memory."""
    layers = [params[name] for name in sorted(params, key=_layer) if _layer(name) >= 0]

    def stack(*tensors: Any) -> jax.Array:
        return jnp.stack([x.astype(dtype) if x.ndim > 1 else x for x in tensors])

    rest = {name: part for name, part in params.items() if _layer(name) < 0}
    return {**rest, "layers": jax.tree.map(stack, *layers)}


def split_layers(params: Any) -> Any:
    """Invert `stack_layers`."""
    num_layers = len(jax.tree.leaves(params["layers"])[0])
    rest = {name: part for name, part in params.items() if name != "layers"}
    layers = {
        f"layer_{i}": jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(num_layers)
    }
    return {**rest, **layers}


def _layer(name: str) -> int:
    """Return the layer that parameters of this name belong to; -1 if none."""
    return int(name.removeprefix("layer_")) if name.startswith("layer_") else -1


bert_large = partial(Bert, num_layers=24, hidden=1024, num_heads=16)
bert_base = partial(Bert, num_layers=12, hidden=768, num_heads=12)
bert_tiny = partial(Bert, num_layers=2, hidden=48, num_heads=2, vocabulary=256, max_length=32)
