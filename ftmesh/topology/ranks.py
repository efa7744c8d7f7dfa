"""The ranks of a topology: the devices along a mesh axis, in the order of a ring; their backups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ftmesh.errors import ArgumentError, TopologyError
from ftmesh.topology.notation import Coord
from ftmesh.topology.ring_order import ring_order
from ftmesh.topology.topology import Topology

if TYPE_CHECKING:
    from jax.sharding import Mesh

_SAME_HOST = 1_000_000  # hops: more than any route has


class HasTopology(Protocol):
    """What runs on the devices of a topology, such as a plan."""

    @property
    def topology(self) -> Topology: ...

    @property
    def with_idle(self) -> bool: ...


@dataclass(frozen=True)
class Ranks:
    """The ranks of a mesh axis, as `jax_mesh` orders them.

    Live chips stand along the ring of `ring_order`, with the devices of a chip side by side. With
    `with_idle`, those of failed chips have ranks too, after all others.

    >>> Ranks(Topology.grid("4x2", failed="2x1@1,0")).coords[:4]
    ((0, 0), (0, 1), (1, 1), (2, 1))
    """

    topology: Topology
    with_idle: bool = False

    @staticmethod
    def from_plan(plan: HasTopology | Topology) -> Ranks:
        return Ranks(plan) if isinstance(plan, Topology) else Ranks(plan.topology, plan.with_idle)

    @cached_property
    def coords(self) -> tuple[Coord, ...]:
        """The chips along the axis."""
        ring = ring_order(self.topology).coords
        failed = self.topology.failed
        idle = (c for c in self.topology.all_coords() if self.with_idle and c in failed)
        return (*ring, *idle)

    @property
    def num_ranks(self) -> int:
        return len(self.coords) * self.topology.devices_per_chip

    @property
    def num_live(self) -> int:
        return self.topology.num_live * self.topology.devices_per_chip

    @property
    def live(self) -> NDArray[np.int32]:
        """The ranks that take part."""
        return np.arange(self.num_live, dtype=np.int32)

    @cached_property
    def position(self) -> NDArray[np.int32]:
        """For each live chip, in the grid order of `Topology.coords`, its place along the axis."""
        place = {coord: i for i, coord in enumerate(self.coords)}
        return np.array([place[coord] for coord in self.topology.coords], np.int32)

    @property
    def of_chips(self) -> NDArray[np.int32]:
        """The ranks of the devices of each live chip, ``[chip in grid order, device]``."""
        devices = np.arange(self.topology.devices_per_chip, dtype=np.int32)
        ranks: NDArray[np.int32] = self.position[:, None] * len(devices) + devices
        return ranks

    @cached_property
    def devices(self) -> tuple[Any, ...]:
        """The devices by rank, then by position of a tile; empty if the topology has none."""
        topology = self.topology
        if self.with_idle:
            listed, devices = tuple(topology.all_coords()), topology.all_devices
        else:
            listed, devices = topology.coords, topology.devices
        per_chip = topology.devices_per_chip * topology.num_positions
        if len(devices) != len(listed) * per_chip:
            return ()
        at = {coord: devices[i * per_chip : (i + 1) * per_chip] for i, coord in enumerate(listed)}
        return tuple(device for coord in self.coords for device in at[coord])


def jax_mesh(
    topology: Topology,
    axis_name: str | Sequence[str],
    *,
    along: str | None = None,
    with_idle: bool = False,
) -> Mesh:
    """Return a ``jax.sharding.Mesh`` of the live devices along a ring through the mesh.

    XLA sums over a mesh axis in a ring, in the order of its devices. Here neighbours on the axis
    are neighbouring chips, wherever such a ring exists, and no step is near a failed chip;
    `ring_order` says how many steps are longer.

    Args:
        topology: What was built from devices.
        axis_name: Name of the axis of ranks. A `TiledTopology` takes several names, such as
            ``("data", "model")``: one for ranks, and one for all positions of a tile or one
            for each side of it (x first, cores last).
        along: The name that ranks are along. Default: the first.
        with_idle: Include the devices of failed chips, last, for platforms that need whole slices.

    Raises:
        TopologyError: If the topology was not built from devices, or `with_idle` is set and some
            devices of the grid are missing.
    """
    import jax

    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    shape = topology.position_shape(names)
    if not topology.devices:
        raise TopologyError(
            f"{topology.physical} was not built from devices: use "
            "Topology.from_devices(jax.devices(), ...)"
        )
    rank_axis = names[0] if along is None else along
    if rank_axis not in names:
        raise ArgumentError(f"along must be one of the axes {names}, not {along!r}")
    ranks = Ranks(topology, with_idle)
    needed = ranks.num_ranks * topology.num_positions
    given = topology.all_devices if with_idle else topology.devices
    if len(given) < needed:
        raise TopologyError(
            f"with_idle needs every device of {topology.name}, and only {len(given)} of {needed} "
            "are there"
        )
    grid = topology.by_position(np.array(ranks.devices).reshape(ranks.num_ranks, -1), shape)
    return jax.sharding.Mesh(np.moveaxis(grid, 0, names.index(rank_axis)), names)


def backup_ranks(topology: Topology, hosts: Sequence[int]) -> NDArray[np.int64] | None:
    """Return a backup rank for each rank: on another host, no two alike, fewest hops in all.

    `hosts` has the host of each rank. Distances ignore failures. Returns None if there is no such
    assignment: with one host, or where one host has more than half of the chips.
    """
    from scipy.optimize import linear_sum_assignment  # a dependency of JAX

    coords = np.repeat(np.array(Ranks(topology).coords), topology.devices_per_chip, axis=0)
    offsets = np.abs(coords[:, None] - coords[None])
    sizes = np.array(topology.shape)
    offsets = np.where(topology.wrap, np.minimum(offsets, sizes - offsets), offsets)
    host = np.array(hosts)
    hops = np.where(host[:, None] == host[None], _SAME_HOST, offsets.sum(-1))
    backups: NDArray[np.int64] = linear_sum_assignment(hops)[1].astype(np.int64)
    return None if (host[backups] == host).any() else backups
