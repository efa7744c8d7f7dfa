"""The Flax ResNet-50 against torch's on the same weights, and the shape of its variants."""

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from examples.resnet50.model import init, normalise, resnet50, tiny_resnet
from examples.resnet50.stem import StemConv, gathered_max_pool, max_pool
from tests.support import torch_resnet50 as reference

pytestmark = pytest.mark.usefixtures("quick_compiler")

FILE = Path(__file__).parents[1] / "data" / "resnet50_reference.npz"

# Both sides compute in float64, whose rounding error of 1e-16 grows through 53 convolutions and
# norms over as few as 8 values to about 1e-12. One wrong pad or stride shows in the first digit.
TOLERANCE = 1e-9


def shapes_of(model, size):
    image = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
    return jax.eval_shape(lambda x: model.init(jax.random.key(0), x, train=False), image)


@cache
def flax_results():
    with jax.enable_x64(True):
        model = resnet50(num_classes=reference.NUM_CLASSES, dtype=jnp.float64)
        shapes = flatten_dict(shapes_of(model, 64), sep="/")
        variables = unflatten_dict(
            {
                name: jnp.array(reference.weight(name.partition("/")[2], leaf.shape))
                for name, leaf in shapes.items()
            },
            sep="/",
        )
        images = jnp.array(reference.images())

        def loss_of(params):
            logits, _ = model.apply(
                variables | {"params": params}, images, train=True, mutable=["batch_stats"]
            )
            labels = jnp.array(reference.LABELS)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), logits

        step = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
        (loss, train_logits), gradients = step(variables["params"])
        return {
            "eval_logits": jax.jit(lambda v: model.apply(v, images, train=False))(variables),
            "train_logits": train_logits,
            "loss": loss,
            "gradients": jax.tree.map(np.asarray, flatten_dict(gradients, sep="/")),
        }


def assert_near(ours, theirs, scale=None):
    """Equal within the tolerance times the largest value of the array, or of its source."""
    scale = np.abs(theirs).max() if scale is None else scale
    assert np.abs(np.asarray(ours) - theirs).max() <= TOLERANCE * scale


@pytest.mark.slow
def test_matches_the_stored_torch_reference():
    ours = reference.summary(flax_results())
    with np.load(FILE) as theirs:
        assert list(ours["names"]) == list(theirs["names"])
        for key in ("eval_logits", "train_logits", "loss"):
            assert_near(ours[key], theirs[key])
        np.testing.assert_allclose(ours["norms"], theirs["norms"], rtol=TOLERANCE)
        for mine, other, norm in zip(
            ours["entries"], theirs["entries"], theirs["norms"], strict=True
        ):
            assert_near(mine, other, norm)


def test_matches_torch():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    ours, theirs = flax_results(), reference.torch_results()
    for key in ("eval_logits", "train_logits", "loss"):
        assert_near(ours[key], theirs[key])
    assert ours["gradients"].keys() == theirs["gradients"].keys()
    for name, gradient in theirs["gradients"].items():
        assert_near(ours["gradients"][name], gradient, np.linalg.norm(gradient))


def test_size():
    params = jax.tree.leaves(shapes_of(resnet50(num_classes=1000), 224)["params"])
    assert len(params) == 161
    assert sum(leaf.size for leaf in params) == 25_557_032
    assert {leaf.dtype for leaf in params} == {jnp.dtype("float32")}


class TestBlockedStem:
    """The blocked stem computes the same numbers."""

    @pytest.mark.slow
    def test_the_network_is_the_same(self):
        # The stem keeps its parameter; the rest is one block, to compile quickly.
        plain = resnet50(num_classes=5, stage_sizes=(1,), width=8, dtype=jnp.float64)
        blocked = plain.clone(blocked_stem=True)
        with jax.enable_x64(True):
            assert shapes_of(blocked, 16) == shapes_of(plain, 16)
            variables = init(plain, image_size=16, seed=0)
            images = jnp.array(np.random.default_rng(0).normal(size=(2, 16, 16, 3)))

            def gradient(model):
                def loss(params):
                    here = {**variables, "params": params}
                    logits, _ = model.apply(here, images, train=True, mutable=["batch_stats"])
                    return jnp.sum(logits**2)

                return jax.jit(jax.grad(loss))(variables["params"])

            want, got = gradient(plain), gradient(blocked)
            for one, other in zip(*map(jax.tree.leaves, (want, got)), strict=True):
                assert_near(other, one, max(np.linalg.norm(one), 1e-6))

    @pytest.mark.parametrize("side", [8, 9])
    def test_convolution(self, side):
        with jax.enable_x64(True):
            images = jnp.array(np.random.default_rng(1).normal(size=(2, side, side, 3)))
            conv = nn.Conv(4, (7, 7), (2, 2), padding=3, use_bias=False, dtype=jnp.float64)
            variables = conv.init(jax.random.key(0), images)
            ours = StemConv(4, nn.initializers.normal(), jnp.float64)
            assert_near(ours.apply(variables, images), conv.apply(variables, images))

    @pytest.mark.parametrize("side", [8, 9])
    def test_pool_with_ties(self, side):
        """Integers, so that windows have several maxima."""
        rng = np.random.default_rng(2)
        x = rng.integers(-2, 3, (2, side, side, 3)).astype(np.float32)
        half = -(-side // 2)
        weights = rng.normal(size=(2, half, half, 3)).astype(np.float32)

        def value_and_grad(pool):
            return jax.jit(jax.value_and_grad(lambda x: jnp.sum(pool(x) * weights)))(x)

        for want, got in zip(*map(value_and_grad, (max_pool, gathered_max_pool)), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@cache
def tiny_variables():
    return init(tiny_resnet(num_classes=10), image_size=24, seed=0)


def test_blocks_start_as_the_identity():
    variables = tiny_variables()
    scales = {
        name: leaf
        for name, leaf in flatten_dict(variables["params"], sep="/").items()
        if name.endswith("scale")
    }
    for name, leaf in scales.items():
        np.testing.assert_array_equal(leaf, 0 if "/norm3/" in name else 1)
    assert sum("/norm3/" in name for name in scales) == 3


def test_tiny_in_bfloat16():
    model, variables = tiny_resnet(num_classes=10), tiny_variables()
    images = np.random.default_rng(1).normal(size=(4, 24, 24, 3)).astype(np.float32)
    apply = jax.jit(lambda m, v: m.apply(v, images, train=False), static_argnums=0)
    logits = apply(model, variables)
    exact = apply(model.clone(dtype=jnp.float32), variables)
    assert logits.shape == (4, 10)
    assert logits.dtype == jnp.float32
    # bfloat16 keeps 8 bits: 0.4 % a rounding, a few of which add up over eleven convolutions.
    np.testing.assert_allclose(logits, exact, atol=0.03 * np.abs(exact).max())


def test_another_norm():
    asked = []

    def norm(**settings):
        asked.append(settings)
        return nn.BatchNorm(**settings)

    shapes_of(tiny_resnet(num_classes=10, norm=norm), 24)
    assert len(asked) == 1 + 3 * 4
    for settings in asked:
        assert settings["use_running_average"]
        assert (settings["momentum"], settings["epsilon"]) == (0.9, 1e-5)
        assert settings["dtype"] == jnp.bfloat16


def test_normalise():
    images = np.array([[124, 116, 104], [0, 0, 0], [255, 255, 255]], np.uint8)[None, None]
    near = normalise(jnp.array(images), jnp.float32)[0, 0]
    np.testing.assert_allclose(near[0], [0.0056, -0.0049, 0.0082], atol=1e-4)
    np.testing.assert_allclose(near[1], [-2.118, -2.036, -1.804], atol=1e-3)
    np.testing.assert_allclose(near[2], [2.249, 2.429, 2.640], atol=1e-3)
    assert normalise(jnp.array(images)).dtype == jnp.bfloat16
