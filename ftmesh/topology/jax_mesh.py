"""Builds a ``jax.sharding.Mesh`` with one flat axis of ranks: a JAX mesh cannot have holes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ftmesh.errors import ArgumentError

if TYPE_CHECKING:
    import jax


def build_jax_mesh(
    devices: NDArray[Any], axis_names: tuple[str, ...], along: str | None = None
) -> jax.sharding.Mesh:
    """Return the mesh of `devices`, with ranks along the axis `along`.

    Args:
        devices: ``[rank, ...]``, with one further dimension for each further axis name.
        axis_names: the axes of the mesh, in order.
        along: the axis of ranks. Default: the first.
    """
    import jax

    rank_axis = axis_names[0] if along is None else along
    if rank_axis not in axis_names:
        raise ArgumentError(f"along must be one of the axes {axis_names}, not {along!r}")
    return jax.sharding.Mesh(np.moveaxis(devices, 0, axis_names.index(rank_axis)), axis_names)
