"""The ranks of a topology: their numbers along the mesh axis, and a backup for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ftmesh.topology.topology import Topology

_SAME_HOST = 1_000_000  # hops: more than any route has


class HasTopology(Protocol):
    """What runs on the devices of a topology, such as a plan."""

    @property
    def topology(self) -> Topology: ...

    @property
    def with_idle(self) -> bool: ...


@dataclass(frozen=True)
class Ranks:
    """The ranks of a mesh axis, in the order of `Topology.jax_mesh`.

    Ranks are the devices of live chips, chip by chip. With `with_idle`, those of failed chips have
    ranks too, and all are in grid order.
    """

    topology: Topology
    with_idle: bool = False

    @staticmethod
    def from_plan(plan: HasTopology | Topology) -> Ranks:
        return Ranks(plan) if isinstance(plan, Topology) else Ranks(plan.topology, plan.with_idle)

    @property
    def num_ranks(self) -> int:
        chips = self.topology.num_chips if self.with_idle else self.topology.num_live
        return chips * self.topology.devices_per_chip

    @property
    def num_live(self) -> int:
        return self.topology.num_live * self.topology.devices_per_chip

    @property
    def live(self) -> NDArray[np.int32]:
        """The ranks that take part, chip by chip."""
        topology = self.topology
        chips = np.arange(topology.num_live)
        if self.with_idle:
            chips = np.array([topology.grid_index(coord) for coord in topology.coords])
        devices = np.arange(topology.devices_per_chip)
        live: NDArray[np.int32] = chips[:, None] * topology.devices_per_chip + devices
        return live.reshape(-1).astype(np.int32)


def backup_ranks(topology: Topology, hosts: Sequence[int]) -> NDArray[np.int64] | None:
    """Return a backup rank for each rank: on another host, no two alike, fewest hops in all.

    `hosts` has the host of each rank. Distances ignore failures. Returns None if there is no such
    assignment: with one host, or where one host has more than half of the chips.
    """
    from scipy.optimize import linear_sum_assignment  # a dependency of JAX

    coords = np.repeat(np.array(topology.coords), topology.devices_per_chip, axis=0)
    offsets = np.abs(coords[:, None] - coords[None])
    sizes = np.array(topology.shape)
    offsets = np.where(topology.wrap, np.minimum(offsets, sizes - offsets), offsets)
    host = np.array(hosts)
    hops = np.where(host[:, None] == host[None], _SAME_HOST, offsets.sum(-1))
    backups: NDArray[np.int64] = linear_sum_assignment(hops)[1].astype(np.int64)
    return None if (host[backups] == host).any() else backups
