"""Losses as people write them, which ranks can compute from shares of the batch.

Every loss is called with weights `p`, a batch `b` and a random key `k` that all ranks have; see
`loss_models`.
"""

# ruff: noqa: E501

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax

from tests.support.loss_models import (
    CLASSES,
    DROPPED,
    LENGTH,
    LINEN,
    NORMED,
    WIDTH,
    Images,
    Transformer,
    attend,
    batch_norm,
    clipped,
    conv,
    cross_entropy,
    deep,
    dropout,
    flat_token_nll,
    in_parts,
    language_model,
    load_balance,
    logits,
    mixture,
    newton,
    nll,
    nnx_logits,
    predict,
    rnn,
    same_segment,
    sequence_log_likelihood,
    soft,
    squares,
    token_nll,
)

# Equal to jax.value_and_grad -----------------------------------------------------------------------

MEANS = {
    "mean of squares": lambda p, b, k: squares(p, b).mean(),
    "a number for each example": lambda p, b, k: squares(p, b),
    "masked mean over words": lambda p, b, k: (token_nll(p, b) * b.mask).sum() / b.mask.sum(),
    "masked mean with epsilon": lambda p, b, k: (token_nll(p, b) * b.mask).sum() / (b.mask.sum() + 1e-8),
    "masked mean, at least one": lambda p, b, k: (token_nll(p, b) * b.mask).sum() / jnp.maximum(b.mask.sum(), 1),
    "mean where the mask is set": lambda p, b, k: jnp.mean(token_nll(p, b), where=b.mask > 0),
    "average with weights": lambda p, b, k: jnp.average(squares(p, b), weights=b.weight),
    "zero if nothing counts": lambda p, b, k: jnp.where(b.mask.sum() > 0, (token_nll(p, b) * b.mask).sum() / b.mask.sum(), 0.0),
    "sum": lambda p, b, k: squares(p, b).sum(),
    "fixed divisor": lambda p, b, k: squares(p, b).sum() / 128,
    "divisor from the shape": lambda p, b, k: squares(p, b).sum() / b.x.shape[0],
    "sum of words over examples": lambda p, b, k: token_nll(p, b).sum() / len(b.x),
    "mean of means of examples": lambda p, b, k: ((token_nll(p, b) * b.mask).sum(1) / (b.mask.sum(1) + 1)).mean(),
    "root mean square": lambda p, b, k: jnp.sqrt(squares(p, b).mean()),
    "logarithm of the mean": lambda p, b, k: jnp.log(squares(p, b).mean()),
    "square of the mean error": lambda p, b, k: jnp.mean(predict(p, b) - b.y) ** 2,
    "variance of errors": lambda p, b, k: jnp.var(predict(p, b) - b.y),
    "deviation of errors": lambda p, b, k: jnp.std(predict(p, b) - b.y) + squares(p, b).mean(),
    "correlation": lambda p, b, k: -jnp.corrcoef(predict(p, b), b.y)[0, 1],
    "share of variance explained": lambda p, b, k: squares(p, b).sum() / ((b.y - b.y.mean()) ** 2).sum(),
    "perplexity": lambda p, b, k: jnp.exp(token_nll(p, b).mean()),
    "largest error": lambda p, b, k: jnp.max(squares(p, b)),
    "smallest error": lambda p, b, k: jnp.min(squares(p, b)) + squares(p, b).mean(),
    "soft maximum over the batch": lambda p, b, k: jax.nn.logsumexp(squares(p, b)),
    "relative to the largest target": lambda p, b, k: squares(p, b).mean() / jnp.abs(b.y).max(),
    "weights of a softmax over the batch": lambda p, b, k: (jax.nn.softmax(-squares(p, b)) * squares(p, b)).sum(),
    "whitened": lambda p, b, k: (batch_norm(b.x @ p["w"]) @ p["u"] * b.y).mean(),
    "batch norm in jnp": lambda p, b, k: (batch_norm(b.x @ p["w"]) @ p["u"] - b.y).std(),
    "covariance of features": lambda p, b, k: jnp.square(jnp.cov((b.x @ p["w"]).T) - jnp.eye(WIDTH)).sum(),
    "redundancy of two views": lambda p, b, k: jnp.square(batch_norm(b.x @ p["w"]).T @ batch_norm(b.x2 @ p["w"]) / len(b.x) - jnp.eye(WIDTH)).sum(),
    "centred features": lambda p, b, k: jnp.square(b.x @ p["w"] - (b.x @ p["w"]).mean(0, keepdims=True)).mean(),
    "two views in one batch": lambda p, b, k: jnp.square(jnp.subtract(*jnp.split(jnp.tanh(jnp.concatenate([b.x, b.x2]) @ p["w"]), 2))).mean(),
    "triplets": lambda p, b, k: jax.nn.relu(1 + jnp.square(b.x @ p["w"] - b.x2).sum(-1) - jnp.square(b.x @ p["w"] - b.x).sum(-1)).mean(),
    "with a penalty on weights": lambda p, b, k: squares(p, b).mean() + 0.1 * sum(jnp.sum(p[n] ** 2) for n in "wuv"),
    "a penalty alone depends on weights": lambda p, b, k: b.y.mean() + optax.tree.norm(p["layers"]),
    "gradient penalty": lambda p, b, k: jnp.square(jax.vmap(jax.grad(lambda x: jnp.tanh(x @ p["w"]) @ p["u"]))(b.x)).sum(-1).mean(),
    "clipped for each example": lambda p, b, k: jnp.minimum(squares(p, b), 1.0).mean(),
    "clipped at the mean": lambda p, b, k: jnp.minimum(squares(p, b), lax.stop_gradient(squares(p, b).mean())).mean(),
    "weighted by a constant vector": lambda p, b, k: squares(p, b) @ jnp.linspace(0, 1, len(b.x)),
}  # fmt: skip

CLASSIFIERS = {
    "labels by indexing": lambda p, b, k: nll(p, b).mean(),
    "labels by one-hot": lambda p, b, k: -(jax.nn.one_hot(b.label, CLASSES) * jax.nn.log_softmax(logits(p, b))).sum(-1).mean(),
    "labels written to a matrix": lambda p, b, k: -(jnp.zeros((len(b.x), CLASSES)).at[jnp.arange(len(b.x)), b.label].set(1.0) * jax.nn.log_softmax(logits(p, b))).mean(),
    "words by indexing": lambda p, b, k: -jax.nn.log_softmax(language_model(p, b))[jnp.arange(len(b.x))[:, None], jnp.arange(LENGTH), b.tokens].mean(),
    "optax, integer labels": lambda p, b, k: optax.softmax_cross_entropy_with_integer_labels(logits(p, b), b.label).mean(),
    "optax, one-hot": lambda p, b, k: optax.softmax_cross_entropy(logits(p, b), jax.nn.one_hot(b.label, CLASSES)).mean(),
    "optax, smoothed": lambda p, b, k: optax.softmax_cross_entropy(logits(p, b), optax.smooth_labels(jax.nn.one_hot(b.label, CLASSES), 0.1)).mean(),
    "optax.losses, binary": lambda p, b, k: optax.losses.sigmoid_binary_cross_entropy(predict(p, b), b.y > 0).mean(),
    "optax, huber": lambda p, b, k: optax.huber_loss(predict(p, b), b.y).mean(),
    "optax, l2": lambda p, b, k: optax.l2_loss(predict(p, b), b.y).mean(),
    "optax, cosine": lambda p, b, k: optax.cosine_distance(b.x @ p["w"], b.x2).mean(),
    "optax, poly": lambda p, b, k: optax.losses.poly_loss_cross_entropy(logits(p, b), jax.nn.one_hot(b.label, CLASSES)).mean(),
    "optax, focal": lambda p, b, k: optax.sigmoid_focal_loss(predict(p, b), b.y > 0).mean(),
    "optax, hinge": lambda p, b, k: optax.hinge_loss(predict(p, b), jnp.sign(b.y)).mean(),
    "optax, divergence": lambda p, b, k: optax.kl_divergence(jax.nn.log_softmax(logits(p, b)), jax.nn.softmax(b.x[:, :CLASSES])).mean(),
    "optax, ranking": lambda p, b, k: optax.losses.ranking_softmax_loss(language_model(p, b)[..., 0], b.mask),
    "optax, CTC": lambda p, b, k: optax.ctc_loss(language_model(p, b), jnp.zeros((len(b.x), LENGTH)), b.tokens[:, :2], jnp.zeros((len(b.x), 2))).mean(),
    "weights of classes": lambda p, b, k: (nll(p, b) * jnp.arange(1.0, CLASSES + 1)[b.label]).sum() / jnp.arange(1.0, CLASSES + 1)[b.label].sum(),
    "weights by the counts of classes": lambda p, b, k: (nll(p, b) / jnp.bincount(b.label, length=CLASSES)[b.label]).sum(),
    "means of classes": lambda p, b, k: jnp.square(jax.ops.segment_sum(logits(p, b), b.label, CLASSES) / (1 + jnp.bincount(b.label, length=CLASSES)[:, None])).sum(),
    "z-loss": lambda p, b, k: nll(p, b).mean() + 1e-2 * jnp.square(jax.nn.logsumexp(logits(p, b), axis=-1)).mean(),
    "best five": lambda p, b, k: lax.top_k(language_model(p, b).sum(1), 3)[0].sum(-1).mean(),
    "sorted scores": lambda p, b, k: (jnp.sort(logits(p, b), axis=-1) * jnp.arange(CLASSES)).mean(),
}  # fmt: skip

SEQUENCES = {
    "words in one dimension": lambda p, b, k: flat_token_nll(p, b).mean(),
    "masked words in one dimension": lambda p, b, k: (flat_token_nll(p, b)[:, 0] * b.mask.reshape(-1)).sum() / b.mask.sum(),
    "packed sequences": lambda p, b, k: (optax.softmax_cross_entropy_with_integer_labels(language_model(p, b, same_segment(b)), b.tokens) * (b.segment > 0)).sum() / (b.segment > 0).sum(),
    "packed, a mean for each segment": lambda p, b, k: (jax.ops.segment_sum(token_nll(p, b).reshape(-1), b.segment.reshape(-1), 3) / (1 + jnp.bincount(b.segment.reshape(-1), length=3))).sum(),
    "next word": lambda p, b, k: optax.softmax_cross_entropy_with_integer_labels(language_model(p, b)[:, :-1], b.tokens[:, 1:]).mean(),
    "recurrent": lambda p, b, k: jnp.square(rnn(p, b)[0] @ p["u"] - b.y).mean(),
    "recurrent, all states": lambda p, b, k: (jnp.swapaxes(rnn(p, b)[1], 0, 1) @ p["u"] * b.mask).sum() / b.mask.sum(),
    "recurrent, unrolled": lambda p, b, k: jnp.square(rnn(p, b, unroll=2)[1]).mean(),
    "scan over layers": lambda p, b, k: jnp.square(deep(p, b) @ p["u"] - b.y).mean(),
    "scan over layers, remat": lambda p, b, k: jnp.square(deep(p, b, remat=True) @ p["u"] - b.y).mean(),
    "remat with a policy": lambda p, b, k: jax.checkpoint(lambda w: jnp.square(jnp.tanh(b.x @ w) @ w).mean(), policy=jax.checkpoint_policies.dots_saveable)(p["w"]),
    "cumulative along words": lambda p, b, k: jnp.cumsum(token_nll(p, b), axis=1).mean(),
    "forward algorithm": lambda p, b, k: -sequence_log_likelihood(p, b).mean(),
    "loop with a count": lambda p, b, k: lax.fori_loop(0, 3, lambda i, x: x + jnp.tanh(x @ p["layers"][i]), b.x).mean(),
    "loop until all are done": lambda p, b, k: (squares(p, b) * newton(1 + b.y**2)).mean(),
    "branch on the batch": lambda p, b, k: lax.cond(b.y.sum() > 0, lambda: squares(p, b).mean(), lambda: 2 * predict(p, b).mean()),
    "branch that uses examples": lambda p, b, k: lax.cond(b.mask.sum() > 3, lambda x: x, jnp.tanh, squares(p, b)).mean(),
    "inner products over time and width": lambda p, b, k: jnp.einsum("btd,btd->b", p["embedding"][b.tokens], p["embedding"][b.tokens] @ p["w"]).mean(),
    "gradients of embeddings": lambda p, b, k: jnp.square(p["embedding"][b.tokens].mean(1) @ p["w"]).mean(),
    "time first": lambda p, b, k: (jnp.swapaxes(p["embedding"][b.tokens], 0, 1).reshape(-1, WIDTH) @ p["u"]).var(),
}  # fmt: skip

MODULES = {
    "Linen": lambda p, b, k: cross_entropy(LINEN.apply(p["linen"], b.x), b).mean(),
    "Linen, dropout": lambda p, b, k: cross_entropy(DROPPED.apply(p["linen"], b.x, rngs={"dropout": k}), b).mean(),
    "Linen, batch norm": lambda p, b, k: cross_entropy(NORMED.apply({**p["normed"]}, b.x, mutable=["batch_stats"])[0], b).mean(),
    "Linen, transformer": lambda p, b, k: (optax.softmax_cross_entropy_with_integer_labels(Transformer().apply(p["transformer"], b.tokens, b.mask), b.tokens) * b.mask).sum() / b.mask.sum(),
    "Linen, images": lambda p, b, k: cross_entropy(Images().apply(p["images"], b.image), b).mean(),
    "nnx": lambda p, b, k: cross_entropy(nnx_logits(p, b), b).mean(),
    "convolution": lambda p, b, k: jnp.square(conv(b.image, p["kernel"])).mean(),
    "convolution by channel": lambda p, b, k: jnp.square(conv(b.image, p["depthwise"], feature_group_count=2)).mean(),
    "convolution and batch norm": lambda p, b, k: (jnp.tanh(batch_norm(conv(b.image, p["kernel"]).reshape(-1, 4))) * p["gain"]).mean(),
    "pooling": lambda p, b, k: nn.max_pool(conv(b.image, p["kernel"]), (2, 2)).mean(),
    "experts": lambda p, b, k: jnp.square(mixture(p, b) @ p["u"] - b.y).mean(),
    "experts with load balance": lambda p, b, k: jnp.square(mixture(p, b) @ p["u"] - b.y).mean() + 0.1 * load_balance(p, b),
    "custom_vjp": lambda p, b, k: jnp.square(clipped(b.x @ p["w"])).mean(),
    "custom_jvp": lambda p, b, k: soft(b.x @ p["w"]).mean(),
    "inner jit": lambda p, b, k: jax.jit(lambda w: (b.weight * jnp.tanh(b.x @ w).sum(-1)).sum() / b.weight.sum())(p["w"]),
    "vmap over examples": lambda p, b, k: jax.vmap(lambda x, y: (jnp.tanh(x @ p["w"]) @ p["u"] - y) ** 2)(b.x, b.y).mean(),
    "factorization of each example": lambda p, b, k: jnp.linalg.slogdet(jnp.eye(LENGTH) * 9 + attend(p["embedding"][b.tokens] @ p["w"])[..., :LENGTH])[1].mean(),
    "Fourier transform of each example": lambda p, b, k: jnp.abs(jnp.fft.rfft(b.x @ p["w"])).mean(),
    "sixteen bits inside": lambda p, b, k: jnp.square((b.x.astype(jnp.float32) @ p["w"].astype(jnp.float32)).astype(float)).mean(),
}  # fmt: skip

KEYS = {
    "dropout with a key from outside": lambda p, b, k: jnp.square(dropout(k, b.x @ p["w"]) @ p["u"] - b.y).mean(),
    "noise on inputs": lambda p, b, k: jnp.square((b.x + jax.random.normal(k, b.x.shape)) @ p["u"] - b.y).mean(),
    "a key for each example": lambda p, b, k: jax.vmap(lambda key, x: jax.random.normal(key) * x @ p["u"])(jax.random.split(k, len(b.x)), b.x).mean(),
    "gamma by a key for each example": lambda p, b, k: jax.vmap(lambda key, x: jax.random.gamma(key, jnp.abs(x)) @ p["u"])(jax.random.split(k, len(b.x)), b.x).mean(),
    "a key folded for each example": lambda p, b, k: jax.vmap(lambda i, x: jax.random.uniform(jax.random.fold_in(k, i)) * x @ p["u"])(jnp.arange(len(b.x)), b.x).mean(),
    "words masked at random": lambda p, b, k: (token_nll(p, b) * jax.random.bernoulli(k, 0.5, b.tokens.shape)).mean(),
    "noise on weights": lambda p, b, k: squares({**p, "w": p["w"] + jax.random.normal(k, p["w"].shape)}, b).mean(),
    "reparametrized": lambda p, b, k: jnp.square(b.x @ p["w"] + jnp.exp(b.x[:, :1]) * jax.random.normal(k, (len(b.x), WIDTH))).mean(),
    "dropout in a scan": lambda p, b, k: lax.scan(lambda x, wk: (dropout(wk[1], jnp.tanh(x @ wk[0])), None), b.x, (p["layers"], jax.random.split(k, 3)))[0].mean(),
    "negatives from one key": lambda p, b, k: (b.x @ p["w"] @ jax.random.normal(k, (WIDTH, 8))).mean(),
    "categorical samples": lambda p, b, k: (logits(p, b) * jax.nn.one_hot(jax.random.categorical(k, lax.stop_gradient(logits(p, b))), CLASSES)).mean(),
}  # fmt: skip

AUX = {
    "rows": lambda p, b, k: (squares(p, b).mean(), logits(p, b)),
    "rows along another dimension": lambda p, b, k: (squares(p, b).mean(), logits(p, b).T),
    "accuracy": lambda p, b, k: (nll(p, b).mean(), (logits(p, b).argmax(-1) == b.label).mean()),
    "counts": lambda p, b, k: (nll(p, b).mean(), {"right": (logits(p, b).argmax(-1) == b.label).sum(), "of": b.label.size}),
    "counts in float": lambda p, b, k: ((token_nll(p, b) * b.mask).sum() / b.mask.sum(), {"weights": b.mask.sum(), "total": (token_nll(p, b) * b.mask).sum()}),
    "maxima": lambda p, b, k: (squares(p, b).mean(), (squares(p, b).max(), jnp.abs(b.x).max(0), b.label.min())),
    "perplexity of the batch": lambda p, b, k: (token_nll(p, b).mean(), jnp.exp(token_nll(p, b).mean())),
    "variances": lambda p, b, k: (squares(p, b).mean(), (b.x @ p["w"]).var(0)),
    "norm of activations": lambda p, b, k: (squares(p, b).mean(), jnp.linalg.norm(b.x @ p["w"])),
    "histogram": lambda p, b, k: (nll(p, b).mean(), jnp.bincount(b.label, length=CLASSES)),
    "confusion matrix": lambda p, b, k: (nll(p, b).mean(), jnp.zeros((CLASSES, CLASSES), int).at[b.label, logits(p, b).argmax(-1)].add(1)),
    "any and all": lambda p, b, k: (squares(p, b).mean(), ((b.y > 9).any(), (b.y > -9).all(), jnp.isfinite(b.x).all())),
    "weights and numbers": lambda p, b, k: (squares(p, b).mean(), {"w": p["w"] * 2, "n": 7, "none": None}),
    "numbers of rows": lambda p, b, k: (squares(p, b).mean(), (jnp.arange(len(b.x)), len(b.x))),
    "batch statistics of Linen": lambda p, b, k: (squares(p, b).mean(), NORMED.apply(p["normed"], b.x, mutable=["batch_stats"])[1]),
    "moving average of statistics": lambda p, b, k: (squares(p, b).mean(), 0.9 * p["u"] + 0.1 * b.x.mean(0)),
    "norm of a gradient": lambda p, b, k: (squares(p, b).mean(), optax.tree.norm(jax.grad(lambda q: squares(q, b).mean())(p)["w"])),
    "unsigned counts": lambda p, b, k: (squares(p, b).mean(), (b.mask.size - (b.mask > 0).astype(jnp.uint8).sum()) / b.mask.size),
    "sums that wrap around": lambda p, b, k: (squares(p, b).mean(), (b.label + 90).astype(jnp.int8).sum(dtype=jnp.int8).astype(float)),
    "sums in few bits": lambda p, b, k: (squares(p, b).mean(), ((b.y * 7e3).sum() / 7e3).astype(jnp.float16)),
    "nested": lambda p, b, k: (squares(p, b), [{"loss": (squares(p, b), squares(p, b).sum())}, b.tokens.max()]),
}  # fmt: skip

MICROBATCHES = {  # which share the examples among ranks in different ways
    "microbatches of neighbours": lambda p, b, k: in_parts(p, b, 2, 1),
    "microbatches one after the other": lambda p, b, k: in_parts(p, b, 2, 0),
}  # fmt: skip

EQUAL = MEANS | CLASSIFIERS | SEQUENCES | MODULES | KEYS
TABLES = MEANS, CLASSIFIERS, SEQUENCES, MODULES, KEYS, AUX


def groups(losses, size):
    """Dictionaries of at most `size` losses: programs that are compiled at once."""
    names = iter(losses)
    while some := list(itertools.islice(names, size)):
        yield {name: losses[name] for name in some}
