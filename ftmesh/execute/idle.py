"""Idle: ranks that take no part, kept out of sums or let into them, and given something to do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.execute import _compat
from ftmesh.execute.lower import Program


def of_live(x: jax.Array, axis_name: Any, program: Program) -> jax.Array:
    """`x` at live ranks, and zeros at idle ones."""
    if len(program.live) == program.num_ranks:
        return x
    is_live = np.isin(np.arange(program.num_ranks), program.live)
    here = jnp.asarray(is_live)[lax.axis_index(axis_name)]
    return jnp.where(here, x, jnp.zeros((), x.dtype))


def with_idle_ones(x: jax.Array, axis_name: Any, program: Program) -> jax.Array:
    """`x`, to which live ranks have added that of idle ones, each taking some."""
    idle = np.setdiff1d(np.arange(program.num_ranks), program.live)
    for start in range(0, len(idle), len(program.live)):
        some = idle[start : start + len(program.live)]
        pairs = tuple(zip(some.tolist(), program.live.tolist(), strict=False))
        with _compat.own_scope("from_idle_ones"):
            moved = lax.ppermute(x, axis_name, completed(pairs, program.num_ranks))
        takes = np.isin(np.arange(program.num_ranks), program.live[: len(some)])
        here = jnp.asarray(takes)[lax.axis_index(axis_name)]
        x = jnp.where(here, x + moved, x)
    return x


def completed(
    permutation: tuple[tuple[int, int], ...], num_ranks: int
) -> tuple[tuple[int, int], ...]:
    """A partial permutation with the ranks left over paired up; what those get is ignored."""
    sources, targets = ({pair[end] for pair in permutation} for end in (0, 1))
    idle = [r for r in range(num_ranks) if r not in sources]
    waiting = [r for r in range(num_ranks) if r not in targets]
    return (*permutation, *zip(idle, waiting, strict=True))
