"""Buffers of any dtype as buffers that the Pallas kernel can add or copy, and back.

Kernels for TPUs add few dtypes. Small integers are added in 32 bits: what is left of that sum in
their own bits is theirs. Complex numbers are added part by part. Where nothing is added, numbers of
8 and 16 bits travel as integers of that size. All this gives the same bits.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ftmesh.errors import CollectiveError

SUMMABLE_DTYPES = ("float32", "bfloat16", "int32", "uint32")
REMEDY = "plan with executor='ppermute'"
_INTEGERS = {1: jnp.int8, 2: jnp.int16}


def to_kernel_dtype(buffer: jax.Array, *, is_added: bool) -> jax.Array:
    """Return `buffer` in a dtype that the kernel can copy, or add if `is_added`.

    Complex numbers get a second dimension, of their two parts.

    Raises:
        CollectiveError: There is no such dtype.
    """
    dtype = buffer.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = jnp.stack([buffer.real, buffer.imag], axis=1)
        return to_kernel_dtype(parts, is_added=is_added)
    if dtype.itemsize > 4:
        raise CollectiveError(
            f"the Pallas executor has no 64-bit numbers, and these are {dtype.name}: cast to 32 "
            f"bits, or {REMEDY}"
        )
    is_small_integer = jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize < 4
    if is_added and is_small_integer:
        return buffer.astype(jnp.int32)
    if is_added:
        check_summable(dtype)
    if dtype.name in SUMMABLE_DTYPES:
        return buffer
    integers = _INTEGERS[dtype.itemsize]
    return buffer.astype(integers) if is_small_integer else _bitcast(buffer, integers)


def from_kernel_dtype(result: jax.Array, dtype: Any) -> jax.Array:
    """Return what `to_kernel_dtype` made of a buffer of `dtype`, in that dtype again."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return lax.complex(result[:, 0], result[:, 1])
    if result.dtype == dtype or jnp.issubdtype(dtype, jnp.integer):
        return result.astype(dtype)
    return _bitcast(result, dtype)


def check_summable(dtype: Any) -> None:
    """Raise CollectiveError unless the kernel can add numbers of `dtype`."""
    if dtype.name not in SUMMABLE_DTYPES:
        raise CollectiveError(
            f"the Pallas executor does not add {dtype.name}: add in float32, which is the default "
            f"of accumulate_dtype, or {REMEDY}"
        )


def _bitcast(x: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype)
