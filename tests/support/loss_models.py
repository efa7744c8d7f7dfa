"""What the losses of `losses` are made of: weights, a batch, models, and parts of losses."""

# ruff: noqa: E731

from functools import cache
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

CLASSES, VOCAB, LENGTH, WIDTH, EXPERTS = 5, 7, 4, 6, 3

_RNG = np.random.default_rng(0)


def _normal(*shape):
    return _RNG.normal(size=shape) / 2


ARRAYS = {
    "w": _normal(WIDTH, WIDTH),
    "v": _normal(WIDTH, CLASSES),
    "u": _normal(WIDTH),
    "embedding": _normal(VOCAB, WIDTH),
    "position": _normal(LENGTH, WIDTH),
    "layers": _normal(3, WIDTH, WIDTH),
    "kernel": _normal(3, 3, 2, 4),
    "depthwise": _normal(3, 3, 1, 2),
    "router": _normal(WIDTH, EXPERTS),
    "experts": _normal(EXPERTS, WIDTH, WIDTH),
    "gain": _normal(4),
}


@jax.tree_util.register_pytree_node_class
class Batch(SimpleNamespace):
    """Arrays with a row for each example."""

    def tree_flatten(self):
        return tuple(vars(self).values()), tuple(vars(self))

    @classmethod
    def tree_unflatten(cls, names, leaves):
        return cls(**dict(zip(names, leaves, strict=True)))


def make_batch(size):
    rng = np.random.default_rng(size)
    return Batch(
        x=rng.normal(size=(size, WIDTH)),
        x2=rng.normal(size=(size, WIDTH)),
        y=rng.normal(size=size),
        label=rng.integers(0, CLASSES, size),
        weight=rng.uniform(size=size) + (np.arange(size) % 3 > 0),
        tokens=rng.integers(0, VOCAB, (size, LENGTH)),
        mask=(rng.uniform(size=(size, LENGTH)) > 0.4).astype(float),
        segment=np.sort(rng.integers(0, 3, (size, LENGTH)), axis=1),
        image=rng.normal(size=(size, 5, 5, 2)),
    )


# Models -----------------------------------------------------------------------------------------


def predict(p, b):
    return jnp.tanh(b.x @ p["w"]) @ p["u"]


def squares(p, b):
    return (predict(p, b) - b.y) ** 2


def logits(p, b):
    return jnp.tanh(b.x @ p["w"]) @ p["v"]


def nll(p, b):
    """The loss of each example."""
    return -jax.nn.log_softmax(logits(p, b))[jnp.arange(len(b.x)), b.label]


def attend(x, mask=None):
    scores = jnp.einsum("btd,bsd->bts", x, x)
    scores = scores if mask is None else jnp.where(mask, scores, -1e9)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), x)


def language_model(p, b, mask=None):
    x = p["embedding"][b.tokens] + p["position"]
    return attend(x @ p["w"], mask) @ p["embedding"].T


def token_nll(p, b):
    return optax.softmax_cross_entropy_with_integer_labels(language_model(p, b), b.tokens)


def flat_token_nll(p, b):
    flat = language_model(p, b).reshape(-1, VOCAB)
    return -jnp.take_along_axis(jax.nn.log_softmax(flat), b.tokens.reshape(-1)[:, None], axis=1)


def batch_norm(x):
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3)


def gates(p, b):
    return jax.nn.softmax(b.x @ p["router"])


def mixture(p, b):
    outputs = jnp.einsum("bd,edf->bef", b.x, p["experts"])
    weights, chosen = lax.top_k(gates(p, b), 2)
    return jnp.einsum(
        "bk,bkd->bd", weights, jnp.take_along_axis(outputs, chosen[..., None], axis=1)
    )


def load_balance(p, b):
    chosen = jax.nn.one_hot(gates(p, b).argmax(-1), EXPERTS)
    return EXPERTS * (chosen.mean(0) * gates(p, b).mean(0)).sum()


def dropout(k, x, rate=0.3):
    return jnp.where(jax.random.bernoulli(k, 1 - rate, x.shape), x / (1 - rate), 0)


def same_segment(b):
    return b.segment[:, :, None] == b.segment[:, None, :]


def rnn(p, b, unroll=1):
    def step(h, x):
        h = jnp.tanh(h @ p["w"] + x)
        return h, h

    xs = jnp.swapaxes(p["embedding"][b.tokens], 0, 1)
    return lax.scan(step, jnp.zeros((len(b.x), WIDTH)), xs, unroll=unroll)


def deep(p, b, remat=False):
    layer = lambda x, w: (x + jnp.tanh(x @ w), None)
    layer = jax.checkpoint(layer) if remat else layer
    return lax.scan(layer, b.x, p["layers"])[0]


def conv(x, kernel, **options):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers, **options)


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


@jax.custom_jvp
def soft(x):
    return jnp.log1p(jnp.exp(x))


soft.defjvps(lambda t, _, x: t * jax.nn.sigmoid(x))


class Linen(nn.Module):
    norm: bool = False
    rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        if self.norm:
            x = nn.BatchNorm(use_running_average=False)(x)
        x = nn.Dropout(self.rate, deterministic=not self.rate)(nn.gelu(nn.LayerNorm()(x)))
        return nn.Dense(CLASSES)(x)


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens, mask):
        x = nn.Embed(VOCAB, 8)(tokens)
        attention = nn.MultiHeadDotProductAttention(num_heads=2)
        x = x + attention(nn.RMSNorm()(x), mask=nn.make_causal_mask(tokens) * mask[:, None, None])
        return nn.Dense(VOCAB)(x)


class Images(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.GroupNorm(2)(nn.Conv(4, (3, 3))(x)))
        x = nn.max_pool(x, (2, 2), (2, 2)) + nn.avg_pool(x, (2, 2), (2, 2))
        return nn.Dense(CLASSES)(x.reshape(len(x), -1))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(WIDTH, 8, rngs=rngs)
        self.outer = nnx.Linear(8, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.relu(self.inner(x)))


LINEN, NORMED, DROPPED = Linen(), Linen(norm=True), Linen(rate=0.3)
_KEY = jax.random.key(1)
_X, _TOKENS, _IMAGE = np.zeros((2, WIDTH)), np.zeros((2, LENGTH), int), np.zeros((2, 5, 5, 2))


@cache
def weights():
    """All weights, made when they are needed first: that takes seconds."""
    modules = {
        "linen": LINEN.init(_KEY, _X),
        "normed": NORMED.init(_KEY, _X),
        "transformer": Transformer().init(_KEY, _TOKENS, _TOKENS),
        "images": Images().init(_KEY, _IMAGE),
        "nnx": nnx.to_pure_dict(_nnx_parts()[1]),
    }
    return jax.tree.map(np.float64, ARRAYS | modules)


@cache
def _nnx_parts():
    with jax.ensure_compile_time_eval():
        return nnx.split(Nnx(nnx.Rngs(0)))


def nnx_logits(p, b):
    graph, first = _nnx_parts()
    state = nnx.state(nnx.merge(graph, first))
    nnx.replace_by_pure_dict(state, p["nnx"])
    return nnx.merge(graph, state)(b.x)


def cross_entropy(scores, b):
    return optax.softmax_cross_entropy_with_integer_labels(scores, b.label)


def in_parts(p, b, parts, axis):
    """The loss of microbatches one after the other, each of which is a mean."""
    shape = (parts, -1) if axis == 0 else (-1, parts)
    split = jax.tree.map(lambda a: jnp.moveaxis(a.reshape(*shape, *a.shape[1:]), axis, 0), b)
    step = lambda total, part: (total + squares(p, part).mean(), None)
    return lax.scan(step, 0.0, split)[0] / parts


def sequence_log_likelihood(p, b):
    """A forward algorithm: sums over hidden states, along the words of each example."""
    step = lambda alpha, e: (jax.nn.logsumexp(alpha[:, :, None] + p["w"], axis=1) + e, None)
    words = jnp.swapaxes(jax.nn.log_softmax(p["embedding"].T)[:, b.tokens], 0, 2)
    return jax.nn.logsumexp(lax.scan(step, words[0], words[1:])[0], axis=-1)


def newton(x):
    """The square root of each example, by as many steps as the slowest needs."""
    x = lax.stop_gradient(x)
    go_on = lambda state: (jnp.abs(state[0] ** 2 - x) > 1e-8).any() & (state[1] < 50)
    return lax.while_loop(go_on, lambda s: ((s[0] + x / s[0]) / 2, s[1] + 1), (x, 0))[0]
