"""Digests: 32 bits that stand for an array, made where it lies.

Equal arrays have equal digests; one element that differs always changes them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MIX, _OTHER_MIX = np.uint32(2654435761), np.uint32(2246822519)  # odd
_UINTS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def digest(array: Any) -> jax.Array:
    """The digest of an array, of whatever dtype, for use inside a program."""
    return _summed(jnp, _words(array))


def digest_of_words(words: Any) -> np.uint32:
    """The same of uint32 in NumPy."""
    return np.uint32(_summed(np, words))


def digest_of_tree(tree: Any) -> jax.Array:
    """The digest of all arrays of a tree together."""
    leaves = [digest(leaf) for leaf in jax.tree.leaves(tree)]
    return _summed(jnp, jnp.stack(leaves)) if leaves else jnp.zeros((), jnp.uint32)


def _words(array: Any) -> Any:
    """The bits of an array as a row of uint32; what is narrower is widened, not packed."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag])
    narrow = _UINTS[min(array.dtype.itemsize, 4)]
    return jax.lax.bitcast_convert_type(array, narrow).astype(jnp.uint32).reshape(-1)


def _summed(xp: Any, words: Any) -> Any:
    """The sum of words that are stirred, each differently by its index.

    Stirring is one to one, so that no change of one word leaves the sum as it was; a sum of words
    times odd numbers would not see two signs that change.
    """
    mixed = words ^ xp.arange(len(words), dtype=xp.uint32) * _MIX
    for shift, factor in ((16, _MIX), (13, _OTHER_MIX)):
        mixed = (mixed ^ mixed >> np.uint32(shift)) * factor
    return (mixed ^ mixed >> np.uint32(16)).sum(dtype=xp.uint32)
