"""How the devices of a topology are numbered along the mesh axis of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ftmesh.topology.topology import Topology


class HasTopology(Protocol):
    """What runs on the devices of a topology, such as a plan."""

    @property
    def topology(self) -> Topology:
        """The chips."""
        ...

    @property
    def with_idle(self) -> bool:
        """Whether the devices of failed chips are on the axis too."""
        ...


@dataclass(frozen=True)
class Ranks:
    """The ranks of a mesh axis, in the order of `Topology.jax_mesh`.

    Args:
        topology: the chips; ranks are their devices, chip by chip.
        with_idle: whether the devices of failed chips have ranks too, in grid order.

    >>> ranks = Ranks(Topology.grid("2x2", failed="1x1@0,0"), with_idle=True)
    >>> ranks.num_ranks, ranks.live.tolist()
    (4, [1, 2, 3])
    """

    topology: Topology
    with_idle: bool = False

    @staticmethod
    def from_plan(plan: HasTopology | Topology) -> Ranks:
        """Return the ranks of a plan, or of the live devices of a topology."""
        return Ranks(plan) if isinstance(plan, Topology) else Ranks(plan.topology, plan.with_idle)

    @property
    def num_ranks(self) -> int:
        """Number of ranks, including those of idle devices."""
        topology = self.topology
        chips = topology.num_chips if self.with_idle else topology.num_live
        return chips * topology.devices_per_chip

    @property
    def num_live(self) -> int:
        """Number of ranks that take part."""
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
