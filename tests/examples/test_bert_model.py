"""The Flax BERT against torch's on the same weights, its sizes, and the published names."""

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.bert.data import Batch
from examples.bert.model import Bert, bert_base, bert_large, bert_tiny, init, predict
from examples.bert.published import from_published, published_name, read_published, to_published
from examples.bert.trainer import cross_entropies, loss_weights
from ftmesh.collectives import weighted_sum
from ftmesh.errors import DataError
from tests.support import torch_bert as reference
from tests.support.slow import slow
from tests.support.torch_resnet50 import summary

pytestmark = pytest.mark.usefixtures("quick_compiler")

FILE = Path(__file__).parents[1] / "data" / "bert_reference.npz"

# Both sides compute in float64, whose rounding error of 1e-16 grows through three layers to about
# 1e-14. Another mask, epsilon or kind of GELU shows in the first five digits. JAX's own attention
# takes its softmax in float32, which rounds at 6e-8.
TOLERANCES = {"exact": 1e-12, "library": 1e-6}


def exact_attention(query, key, value, *, key_value_seq_lengths, implementation):
    """Attention without rounding to float32."""
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(key.shape[-1])
    seen = jnp.arange(key.shape[1]) < key_value_seq_lengths[:, None, None, None]
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits, where=seen), value)


def shapes_of(model):
    return jax.eval_shape(lambda: init(model, seed=0))


def batch():
    return Batch(
        *map(
            jnp.asarray,
            (
                reference.tokens(), reference.segments(), reference.LENGTHS[:, None],
                reference.POSITIONS, reference.TARGETS, reference.IS_RANDOM[:, None],
            ),
        )
    )  # fmt: skip


def flax_results(**options):
    with jax.enable_x64(True):
        model = Bert(**reference.SIZES, dtype=jnp.float64, **options)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float64), shapes_of(model)
        )
        arrays = {
            name: reference.weight(name, leaf.shape)
            for name, leaf in jax.eval_shape(to_published, shapes).items()
        }
        masked, whole = loss_weights(batch())

        def loss_of(params):
            logits = predict(model, params, *batch()[:4])
            words, sentences = cross_entropies(logits, batch())
            loss = weighted_sum(words, masked) / masked.sum()
            return loss + weighted_sum(sentences, whole) / whole.sum(), logits

        step = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
        (loss, (words, sentences)), gradients = step(from_published(arrays, shapes))
        return {
            "words": words,
            "next_sentence": sentences[:, 0],
            "loss": loss,
            "gradients": jax.tree.map(np.asarray, to_published(gradients)),
        }


def assert_near(ours, theirs, tolerance, scale=None):
    """Equal within the tolerance times the largest value of the array, or of its source."""
    scale = np.abs(theirs).max() if scale is None else scale
    assert np.abs(np.asarray(ours) - theirs).max() <= tolerance * scale


@pytest.fixture(params=["library", slow("exact")])
def attention(request, monkeypatch):
    if request.param == "exact":
        monkeypatch.setattr(jax.nn, "dot_product_attention", exact_attention)
    return request.param


def test_matches_the_stored_torch_reference(attention):
    tolerance = TOLERANCES[attention]
    how = {"remat": True} if attention == "library" else {"unrolled": True}
    ours = summary(flax_results(**how))
    with np.load(FILE) as theirs:
        assert list(ours["names"]) == list(theirs["names"])
        for key in ("words", "next_sentence", "loss", "norms"):
            assert_near(ours[key], theirs[key], tolerance)
        # A bias of keys adds the same to all logits of a softmax: its gradient is zero, and noise.
        least = theirs["norms"].max() / 100
        for mine, other, norm in zip(
            ours["entries"], theirs["entries"], theirs["norms"], strict=True
        ):
            assert_near(mine, other, tolerance, max(norm, least))


def test_matches_torch(monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    monkeypatch.setattr(jax.nn, "dot_product_attention", exact_attention)
    ours, theirs = flax_results(), reference.torch_results()
    for key in ("words", "next_sentence", "loss"):
        assert_near(ours[key], theirs[key], TOLERANCES["exact"])
    assert ours["gradients"].keys() == theirs["gradients"].keys()
    least = max(map(np.linalg.norm, theirs["gradients"].values())) / 100
    for name, gradient in theirs["gradients"].items():
        scale = max(np.linalg.norm(gradient), least)
        assert_near(ours["gradients"][name], gradient, TOLERANCES["exact"], scale)


@pytest.mark.parametrize(
    ("make", "tensors", "size"),
    [
        (bert_large, 398, 336_226_108),
        (bert_base, 206, 110_106_428),
        (bert_tiny, 46, 75_714),
    ],
)
def test_size(make, tensors, size):
    params = jax.tree.leaves(shapes_of(make()))
    assert len(params) == tensors
    assert sum(leaf.size for leaf in params) == size
    assert {leaf.dtype for leaf in params} == {jnp.dtype("float32")}


def test_depth_does_not_grow_the_program():
    def lines(num_layers):
        model = bert_tiny(num_layers=num_layers)
        scan = jax.make_jaxpr(lambda p: model.apply(p, *batch()[:4]))
        key = jax.random.key(0)
        return str(scan(jax.eval_shape(lambda: model.init(key, *batch()[:4])))).count("\n")

    assert lines(2) == lines(6)


@cache
def tiny_params():
    return init(bert_tiny(), seed=0)


@pytest.mark.slow
def test_tiny_in_bfloat16():
    apply = jax.jit(predict, static_argnums=0)
    words, sentences = apply(bert_tiny(), tiny_params(), *batch()[:4])
    exact, _ = apply(bert_tiny(dtype=jnp.float32), tiny_params(), *batch()[:4])
    assert words.shape == (3, 4, 256)
    assert sentences.shape == (3, 1, 2)
    assert words.dtype == sentences.dtype == jnp.float32
    # bfloat16 keeps 8 bits: 0.4 % a rounding, a few of which add up over two layers.
    np.testing.assert_allclose(words, exact, atol=0.05 * np.abs(exact).max())


def test_padding_does_not_matter():
    apply = jax.jit(predict, static_argnums=0)
    model = bert_tiny(dtype=jnp.float32)
    tokens, segments, lengths, positions, *_ = batch()
    changed = jnp.where(jnp.arange(16) < lengths, tokens, 9)
    ours, theirs = (apply(model, tiny_params(), x, segments, lengths, positions)
                    for x in (tokens, changed))  # fmt: skip
    np.testing.assert_array_equal(ours[0], theirs[0])
    empty, _ = apply(model, tiny_params(), tokens, segments, 0 * lengths, positions)
    assert np.isfinite(empty).all()


def test_packed_sequences_do_not_attend_to_each_other():
    apply = jax.jit(predict, static_argnums=0)
    model = bert_tiny(dtype=jnp.float32)
    tokens, segments, lengths, positions, *_ = batch()
    words, sentences = apply(model, tiny_params(), tokens, segments, lengths, positions)
    second, third = (slice(0, int(n)) for n in lengths[1:, 0])

    def row(x):
        return jnp.concatenate([x[1][second], x[2][third], jnp.full(10, 1)])[None]

    together = apply(
        model,
        tiny_params(),
        row(tokens),
        row(segments),
        jnp.array([[lengths[1, 0], lengths[2, 0], 0]]),
        jnp.array([[2, 10, 11 + 6]]),
    )
    # One softmax is over 16 tokens and the other over 28, most of them unseen.
    np.testing.assert_allclose(together[0][0, :2], words[1, :2], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(together[0][0, 2], words[2, 0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(together[1][0, :2], sentences[1:, 0], rtol=1e-5, atol=1e-5)
    assert np.isfinite(together[1]).all()


# The published names ----------------------------------------------------------------------------


def test_published_names():
    names = [
        "embeddings/words", "layer_11/query/kernel", "layer_0/norm/bias", "word_bias",
        "next_sentence/kernel",
    ]  # fmt: skip
    assert [published_name(name) for name in names] == [
        "bert/embeddings/word_embeddings",
        "bert/encoder/layer_11/attention/self/query/kernel",
        "bert/encoder/layer_0/output/LayerNorm/beta",
        "cls/predictions/output_bias",
        "cls/seq_relationship/output_weights",
    ]


def test_round_trip(tmp_path):
    arrays = to_published(tiny_params())
    assert len(arrays) == 46
    assert arrays["cls/seq_relationship/output_weights"].shape == (2, 48)
    np.savez(tmp_path / "bert.npz", global_step=7, **arrays)
    read = read_published(tmp_path / "bert.npz", like=shapes_of(bert_tiny()))
    jax.tree.map(np.testing.assert_array_equal, read, tiny_params())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays.pop("bert/pooler/dense/bias"), "it has no bert/pooler/dense/bias"),
        (
            lambda arrays: arrays.update({"bert/pooler/dense/bias": np.zeros(3)}),
            r"its bert/pooler/dense/bias is \[3\], and the run's is \[48\]",
        ),
    ],
)
def test_arrays_of_another_model(tmp_path, change, message):
    arrays = to_published(tiny_params())
    change(arrays)
    np.savez(tmp_path / "bert.npz", **arrays)
    with pytest.raises(DataError, match=f"bert.npz: the arrays do not fit this model: {message}"):
        read_published(tmp_path / "bert.npz", like=shapes_of(bert_tiny()))


def test_no_arrays(tmp_path):
    with pytest.raises(DataError, match=r"bert.npz cannot be read as an .npz file of arrays"):
        read_published(tmp_path / "bert.npz", like=None)
    (tmp_path / "bert.npz").write_text("no arrays")
    with pytest.raises(DataError, match=r"bert.npz cannot be read as an .npz file of arrays"):
        read_published(tmp_path / "bert.npz", like=None)
