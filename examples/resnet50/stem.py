"""The stem of ResNet-50 in forms that are fast on GPUs, with the same parameters and results.

On TPUs the plain forms are better, by the compiler's estimates for v6e: it blocks pixels by itself
and scatters well.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

_NONE = -9  # in place of a row or column of a window


class StemConv(nn.Module):
    """A 7x7 convolution with stride 2 and padding 3, computed as 4x4 on blocks of 2x2 pixels.

    A block is one pixel with four times the channels. Padded to 8x8 with zeros, the kernel covers
    4x4 blocks, and its stride is one block.
    """

    features: int
    kernel_init: nn.initializers.Initializer
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Return images of half the size, rounded up."""
        channels = images.shape[-1]
        shape = (7, 7, channels, self.features)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32).astype(self.dtype)
        kernel = jnp.pad(kernel, ((1, 0), (1, 0), (0, 0), (0, 0)))
        kernel = kernel.reshape(4, 2, 4, 2, channels, self.features).swapaxes(1, 2)
        blocks = _blocks(_even(images.astype(self.dtype), 0))
        return lax.conv_general_dilated(
            blocks.reshape(*blocks.shape[:3], 4 * channels),
            kernel.reshape(4, 4, 4 * channels, self.features),
            window_strides=(1, 1),
            padding=((2, 1), (2, 1)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )


def max_pool(x: jax.Array) -> jax.Array:
    """Return the maximum over 3x3 with stride 2 and padding 1."""
    return nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))


def _pool_forward(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return the maxima, and the index of each in its window of nine; the first of several."""
    padded = jnp.pad(_even(x, -jnp.inf), ((0, 0), (1, 0), (1, 0), (0, 0)), constant_values=-jnp.inf)
    height, width = (-(-side // 2) for side in x.shape[1:3])
    best = padded[:, ::2, ::2][:, :height, :width]
    index = jnp.zeros(best.shape, jnp.int8)
    for k in range(1, 9):
        pixels = padded[:, k // 3 :: 2, k % 3 :: 2][:, :height, :width]
        index = jnp.where(pixels > best, jnp.int8(k), index)
        best = jnp.maximum(best, pixels)
    return best, (index, x[:0])


def _pool_backward(residuals: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array]:
    """Gather, for every pixel, from the windows it is in: one or two in each direction."""
    index, empty = residuals
    height, width = 2 * grad.shape[1], 2 * grad.shape[2]
    # In the window of its own block a pixel is at 1 or 2; an odd one is at 0 of the next window.
    odd_row, odd_column = jnp.arange(height)[:, None, None] % 2, jnp.arange(width)[:, None] % 2
    total = jnp.zeros((), grad.dtype)
    for down, row in ((0, 1 + odd_row), (1, jnp.where(odd_row, 0, _NONE))):
        for right, column in ((0, 1 + odd_column), (1, jnp.where(odd_column, 0, _NONE))):
            ends = ((0, 0), (0, down), (0, right), (0, 0))
            window_index = _repeated(jnp.pad(index, ends, constant_values=9)[:, down:, right:])
            window_grad = _repeated(jnp.pad(grad, ends)[:, down:, right:])
            total += jnp.where(window_index == 3 * row + column, window_grad, 0)
    return (total[:, : empty.shape[1], : empty.shape[2]],)


# `max_pool` with a gradient that gathers by pixel instead of scattering by window.
gathered_max_pool = jax.custom_vjp(max_pool)
gathered_max_pool.defvjp(_pool_forward, _pool_backward)


def _even(x: jax.Array, fill: float) -> jax.Array:
    """Pad the sides of images to even lengths."""
    ends = [(0, side % 2) for side in x.shape[1:3]]
    return jnp.pad(x, ((0, 0), *ends, (0, 0)), constant_values=fill)


def _blocks(images: jax.Array) -> jax.Array:
    """Return 2x2 blocks: [image, block row, block column, row, column, channel]."""
    count, height, width, channels = images.shape
    return images.reshape(count, height // 2, 2, width // 2, 2, channels).swapaxes(2, 3)


def _repeated(x: jax.Array) -> jax.Array:
    """Repeat every pixel as a block of 2x2."""
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
