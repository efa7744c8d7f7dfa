"""The stem of ResNet-50 in other forms, of the same parameters and results, that are fast on GPUs.

For TPUs the plain forms are better by the estimates in compiled programs (of v6e): their compiler
makes blocks of pixels by itself, and scatters well.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

_NOWHERE = -9  # in place of a row or column of a window


class StemConv(nn.Module):
    """A convolution of 7x7 with stride 2 and padding 3, done as one of 4x4 on blocks of 2x2 pixels.

    A block is one pixel of four times the channels. With zeros before its seven rows and columns,
    the kernel covers four blocks in each direction, and its stride is one block.
    """

    features: int
    kernel_init: nn.initializers.Initializer
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Images of half the size, rounded up."""
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
    """The maximum over 3x3 with stride 2 and padding 1."""
    return nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))


def _pool_forward(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The maxima, and at which of the nine places of its window each is, the first of several."""
    padded = jnp.pad(_even(x, -jnp.inf), ((0, 0), (1, 0), (1, 0), (0, 0)), constant_values=-jnp.inf)
    height, width = (-(-side // 2) for side in x.shape[1:3])
    best = padded[:, ::2, ::2][:, :height, :width]
    place = jnp.zeros(best.shape, jnp.int8)
    for k in range(1, 9):
        at = padded[:, k // 3 :: 2, k % 3 :: 2][:, :height, :width]
        place = jnp.where(at > best, jnp.int8(k), place)
        best = jnp.maximum(best, at)
    return best, (place, x[:0])


def _pool_backward(kept: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array]:
    """Every pixel takes from the windows it is in: one or two in each direction."""
    place, empty = kept
    height, width = 2 * grad.shape[1], 2 * grad.shape[2]
    # In the window of its own block a pixel is at 1 or 2; an odd one is at 0 of the next window.
    odd_row, odd_column = jnp.arange(height)[:, None, None] % 2, jnp.arange(width)[:, None] % 2
    total = jnp.zeros((), grad.dtype)
    for down, row in ((0, 1 + odd_row), (1, jnp.where(odd_row, 0, _NOWHERE))):
        for right, column in ((0, 1 + odd_column), (1, jnp.where(odd_column, 0, _NOWHERE))):
            ends = ((0, 0), (0, down), (0, right), (0, 0))
            theirs = _repeated(jnp.pad(place, ends, constant_values=9)[:, down:, right:])
            from_there = _repeated(jnp.pad(grad, ends)[:, down:, right:])
            total += jnp.where(theirs == 3 * row + column, from_there, 0)
    return (total[:, : empty.shape[1], : empty.shape[2]],)


# As `max_pool`, with a gradient that pixels gather, where windows would scatter it.
gathered_max_pool = jax.custom_vjp(max_pool)
gathered_max_pool.defvjp(_pool_forward, _pool_backward)


def _even(x: jax.Array, filled: float) -> jax.Array:
    """Images with sides of even length."""
    ends = [(0, side % 2) for side in x.shape[1:3]]
    return jnp.pad(x, ((0, 0), *ends, (0, 0)), constant_values=filled)


def _blocks(images: jax.Array) -> jax.Array:
    """Blocks of 2x2 pixels: [image, row, column, row of the block, column of it, channel]."""
    count, height, width, channels = images.shape
    return images.reshape(count, height // 2, 2, width // 2, 2, channels).swapaxes(2, 3)


def _repeated(x: jax.Array) -> jax.Array:
    """Every pixel as a block of 2x2."""
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
