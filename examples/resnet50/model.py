"""ResNet-50 v1.5: bottleneck blocks whose stride is in the 3x3 convolution, not in the first 1x1.

Images are NHWC. Parameters are float32; activations and convolutions have `dtype`, by default
bfloat16. Norm statistics and logits are at least float32. Padding is explicit and symmetric: with
"SAME" a stride of 2 would pad one side only, and published weights would not fit.

    model = resnet50(num_classes=1000)
    variables = init(model, image_size=224, seed=0)
    logits = model.apply(variables, normalise(images), train=False)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from examples.resnet50.stem import StemConv, gathered_max_pool, max_pool

MEAN = (123.675, 116.28, 103.53)  # of ImageNet's red, green and blue, from 0 to 255
STDDEV = (58.395, 57.12, 57.375)

KERNEL_INIT = nn.initializers.variance_scaling(2.0, "fan_out", "normal")

# Builds a norm layer from the arguments of nn.BatchNorm: use_running_average, momentum, epsilon,
# dtype, scale_init and name. GroupBatchNorm fits too.
Norm = Callable[..., nn.Module]


def normalise(images: jax.Array, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Normalise uint8 images. Call it inside the jitted step, so that bytes go to the device."""
    return ((images.astype(jnp.float32) - jnp.array(MEAN)) / jnp.array(STDDEV)).astype(dtype)


class Bottleneck(nn.Module):
    """1x1 down to `width` channels, 3x3, 1x1 up to `4 * width`, and a shortcut."""

    width: int
    stride: int
    conv: Callable[..., nn.Module]
    norm: Norm

    @nn.compact
    def __call__(self, x: jax.Array, **weights: jax.Array) -> jax.Array:
        """Return images of the same size, or of half the size if the stride is 2."""
        stride = (self.stride, self.stride)
        y = self.conv(self.width, (1, 1), name="conv1")(x)
        y = nn.relu(self.norm(name="norm1")(y, **weights))
        y = self.conv(self.width, (3, 3), stride, padding=1, name="conv2")(y)
        y = nn.relu(self.norm(name="norm2")(y, **weights))
        y = self.conv(4 * self.width, (1, 1), name="conv3")(y)
        # Scale starts at zero, so that each block starts as the identity.
        y = self.norm(name="norm3", scale_init=nn.initializers.zeros_init())(y, **weights)
        if x.shape != y.shape:
            x = self.conv(4 * self.width, (1, 1), stride, name="shortcut_conv")(x)
            x = self.norm(name="shortcut_norm")(x, **weights)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A stem, stages of bottlenecks that halve the image and double the width, and a head.

    The stem divides the sides by 4, except for `small_images`. With `blocked_stem` it is computed
    as in `examples.resnet50.stem`, with the same result.
    """

    num_classes: int
    stage_sizes: Sequence[int] = (3, 4, 6, 3)
    width: int = 64
    small_images: bool = False
    blocked_stem: bool = False
    dtype: Any = jnp.bfloat16
    norm: Norm = nn.BatchNorm

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool, **weights: jax.Array) -> jax.Array:
        """Return the logits of normalised images; with `train`, norms use batch statistics.

        ``weights=``, one per image, is passed to norms that take it, such as `GroupBatchNorm`.
        """
        conv = partial(
            nn.Conv,
            use_bias=False,
            padding=0,
            dtype=self.dtype,
            kernel_init=KERNEL_INIT,
        )
        norm = partial(
            self.norm,
            use_running_average=not train,
            momentum=0.9,
            epsilon=1e-5,
            dtype=self.dtype,
        )
        x = images.astype(self.dtype)
        if self.small_images:
            x = conv(self.width, (3, 3), padding=1, name="stem_conv")(x)
        elif self.blocked_stem:
            x = StemConv(self.width, KERNEL_INIT, self.dtype, name="stem_conv")(x)
        else:
            x = conv(self.width, (7, 7), (2, 2), padding=3, name="stem_conv")(x)
        x = nn.relu(norm(name="stem_norm")(x, **weights))
        if not self.small_images:
            x = gathered_max_pool(x) if self.blocked_stem else max_pool(x)
        for stage, size in enumerate(self.stage_sizes):
            for block in range(size):
                x = Bottleneck(
                    width=self.width * 2**stage,
                    stride=2 if stage > 0 and block == 0 else 1,
                    conv=conv,
                    norm=norm,
                    name=f"stage{stage}_block{block}",
                )(x, **weights)
        x = jnp.mean(x, axis=(1, 2))
        x = nn.Dense(
            self.num_classes,
            dtype=self.dtype,
            kernel_init=nn.initializers.normal(0.01),
            name="head",
        )(x)
        return x.astype(jnp.promote_types(self.dtype, jnp.float32))


def init(model: ResNet, *, image_size: int, seed: int) -> Any:
    """Initialise the collections "params" and "batch_stats".

    XLA compiles the "rbg" generator in a fifth of the default one's time.
    """
    image = jnp.zeros((1, image_size, image_size, 3))
    key = jax.random.key(seed, impl="rbg")
    return jax.jit(partial(model.init, train=False))(key, image)


resnet50 = partial(ResNet, stage_sizes=(3, 4, 6, 3), width=64)
tiny_resnet = partial(ResNet, stage_sizes=(1, 1, 1), width=8, small_images=True)
