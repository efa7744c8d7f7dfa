"""The JAX mesh of a topology: one flat axis of ranks, since a JAX mesh cannot have holes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from ftmesh.errors import ArgumentError, TopologyError
from ftmesh.topology.notation import Coord
from ftmesh.topology.ranks import Ranks
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Topology


def jax_mesh(
    topology: Topology,
    axis_name: str | Sequence[str],
    *,
    along: str | None = None,
    with_idle: bool = False,
) -> jax.sharding.Mesh:
    """See `ftmesh.Topology.jax_mesh`."""
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    shape = _shape_at_each_rank(topology, names)
    if along is None:
        along = names[0]
    if along not in names:
        raise ArgumentError(f"ranks are along one of the axes {names}, not along {along!r}")
    devices: tuple[Any, ...] = topology.all_devices if with_idle else topology.devices
    if not topology.devices:
        raise TopologyError(
            f"{topology.physical} was not built from devices: use "
            "Topology.from_devices(jax.devices(), ...)"
        )
    ranks = Ranks(topology, with_idle).num_ranks
    wanted = ranks * topology.num_positions
    if len(devices) < wanted:
        raise TopologyError(
            f"idle devices take part in the program, and only {len(devices)} of {wanted} devices "
            f"of {topology.name} are there"
        )
    grid = _by_side(np.array(devices).reshape(ranks, -1), shape, topology)
    return jax.sharding.Mesh(np.moveaxis(grid, 0, names.index(along)), names)


def _shape_at_each_rank(topology: Topology, names: tuple[str, ...]) -> Coord:
    """The shape that the devices of a rank have, on axes that are named beside its own."""
    if not isinstance(topology, TiledTopology):
        if len(names) != 1:
            raise ArgumentError(
                f"{topology} has one axis of ranks, not {names}: give one name, or plan with "
                "tile='2x1' for a model axis beside it"
            )
        return ()
    sides = topology.sides
    if len(names) == 2:
        return (topology.num_positions,)
    if len(names) == 1 + len(sides):
        return sides
    raise ArgumentError(
        f"{topology} has an axis of ranks and one of {topology.num_positions} positions, or "
        f"{len(sides)} of {' and '.join(map(str, sides))}: give two names, as ('data', 'model')"
    )


def _by_side(devices: NDArray[Any], shape: Coord, topology: Topology) -> NDArray[Any]:
    """Devices by rank and position as ``[rank, *shape]``; positions count along x first."""
    if len(shape) < 2:
        return devices.reshape(len(devices), *shape)
    assert isinstance(topology, TiledTopology)
    num_sides, cores = len(topology.tile), shape[len(topology.tile) :]
    grid = devices.reshape(len(devices), *topology.tile[::-1], *cores)
    return grid.transpose(0, *range(num_sides, 0, -1), *range(num_sides + 1, grid.ndim))
