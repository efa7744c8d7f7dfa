"""The time of all-reduce and weight update, with sharded and with replicated optimizer state.

*Sharded*, gradients are reduce-scattered, each chip updates the weights that it owns, and these are
all-gathered: a chip reads and holds only its share of the state. *Replicated*, gradients are
all-reduced, perhaps along trees, and every chip updates all weights. Which is faster depends on the
mesh, the payload and the memory bandwidth of a chip.

>>> from ftmesh.cost.links import NETWORKS
>>> costs = optimizer_costs(Topology.grid("4x8", failed="2x2@2,2"), 100_000_000, NETWORKS["v3"])
>>> costs.is_sharded_faster
True
"""

from __future__ import annotations

from dataclasses import dataclass

from ftmesh.cost.links import Network
from ftmesh.errors import ArgumentError
from ftmesh.planning.selection import select_algorithm
from ftmesh.topology.topology import Topology
from ftmesh.units import format_time

#: Bytes between a chip and its memory for each byte of the weights, by optimizer: the gradient is
#: read, and the weights and the optimizer's state are read and written.
MEMORY_TRAFFIC = {"sgd": 3, "momentum": 5, "lars": 5, "adam": 7, "lamb": 7}


@dataclass(frozen=True)
class UpdateCost:
    """An algorithm, with seconds of its communication and of the update itself."""

    algorithm: str
    communication: float
    update: float

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.communication + self.update

    def __str__(self) -> str:
        return (
            f"{format_time(self.seconds)} by {self.algorithm}: {format_time(self.communication)} "
            f"to communicate, {format_time(self.update)} to update"
        )


@dataclass(frozen=True)
class OptimizerCosts:
    """The simulated costs of both, for one payload on one mesh."""

    sharded: UpdateCost
    replicated: UpdateCost
    num_ranks: int

    @property
    def is_sharded_faster(self) -> bool:
        """Whether sharded state is as fast, or faster."""
        return self.sharded.seconds <= self.replicated.seconds

    def __str__(self) -> str:
        return (
            f"  sharded state:    {self.sharded}; 1/{self.num_ranks} of it on each chip\n"
            f"  replicated state: {self.replicated}"
        )


def optimizer_costs(
    topology: Topology, payload_bytes: int, network: Network, optimizer: str = "adam"
) -> OptimizerCosts:
    """Compare sharded and replicated optimizer state, each with its fastest algorithm.

    The gradients are `payload_bytes` of float32; `optimizer` is one of `MEMORY_TRAFFIC`.
    """
    if optimizer not in MEMORY_TRAFFIC:
        raise ArgumentError(
            f"optimizer must be one of {', '.join(MEMORY_TRAFFIC)}, not {optimizer!r}"
        )
    update = MEMORY_TRAFFIC[optimizer] * payload_bytes / known_memory_bandwidth(network)
    split, reduced = (
        select_algorithm(
            topology, payload_bytes, network, reduce_scatter=is_split, with_native=True
        ).best
        for is_split in (True, False)
    )
    sharded = UpdateCost(split.name, split.seconds, update / topology.num_live)
    replicated = UpdateCost(reduced.name, reduced.seconds, update)
    return OptimizerCosts(sharded, replicated, topology.num_live)


def known_memory_bandwidth(network: Network) -> float:
    """The memory bandwidth of a chip of `network`; raises ArgumentError if it is not known."""
    if network.memory_bandwidth is None:
        raise ArgumentError(
            "the time of an update depends on the memory bandwidth of the chip, which is not known "
            "here: name a TPU generation such as 'v5e'"
        )
    return network.memory_bandwidth
