"""Buffer: arrays that are summed together, in one buffer that a program works on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ftmesh.collectives.precision import Precision
from ftmesh.execute import primitives
from ftmesh.execute.lowering import PALLAS, Program
from ftmesh.layout.buckets import pack, unpack


def sum_in_buffer(
    leaves: list[jax.Array],
    axis_name: Any,
    program: Program,
    kind: Precision,
    divisor: int | None,
    all_reduce: Callable[..., jax.Array] = primitives.all_reduce,
) -> list[jax.Array]:
    """The sums of leaves of one kind, in the dtype of sums, divided by `divisor` if there is one.

    `all_reduce` is that of `ftmesh.execute.primitives`, or `sum_varying`.
    """
    itemsize = kind.results.itemsize
    wide = [leaf.astype(kind.sums) for leaf in leaves]
    is_rounded = kind.sums != kind.results
    is_divided_after = divisor is not None and not is_rounded
    buffer = pack(wide, program.num_chunks, itemsize)
    if is_divided_after and program.executor == PALLAS and buffer.size == wide[0].size:
        buffer = _computed(buffer, axis_name)
    total = all_reduce(
        buffer,
        axis_name=axis_name,
        program=program,
        wire=kind.wire(program.depth),
        divisor=divisor if is_rounded else None,
    )
    sums = unpack(total, [leaf.shape for leaf in leaves])
    # What is not rounded on its way is divided where it is unpacked, which takes no more memory.
    return [each / divisor for each in sums] if is_divided_after else sums


@partial(jax.custom_jvp, nondiff_argnums=(1,))  # a derivative needs nothing of it
def _computed(buffer: jax.Array, axis_name: Any) -> jax.Array:
    """The same, as something that the compiler takes for computed.

    A parameter that is given to a kernel as it is, it copies before and after where a result of
    the kernel is computed with. This is one pass, into the kernel's own buffer, and part of what
    computes a gradient where the compiler fuses the two.
    """
    return jnp.where(lax.axis_index(axis_name) >= 0, buffer, jnp.zeros_like(buffer))


_computed.defjvp(lambda axis_name, primals, tangents: (_computed(*primals, axis_name), *tangents))
