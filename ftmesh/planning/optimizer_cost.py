"""Update: what sums and updates of weights take, the optimizer's state shared out or whole.

*Shared out*, gradients are reduce-scattered, each chip updates the weights that it owns, and these
are all-gathered: a chip touches its share of the state alone, and holds no more. *Whole*, gradients
are all-reduced, which may be along trees, near the limit of the wires, and every chip updates all.
Which is quicker depends on the mesh, the payload, and what a chip's memory can do.

>>> from ftmesh.cost.links import NETWORKS
>>> weighed = weigh(Topology.grid("4x8", failed="2x2@2,2"), 100_000_000, NETWORKS["v3"])
>>> weighed.is_sharded
True
"""

from __future__ import annotations

from dataclasses import dataclass

from ftmesh.cost.links import Network
from ftmesh.cost.simulate import Simulator
from ftmesh.errors import ArgumentError
from ftmesh.planning.chunking import schedule_for
from ftmesh.planning.selection import choose
from ftmesh.topology.topology import Topology
from ftmesh.units import format_time

# Bytes that pass between a chip and its memory for each byte of the weights, by optimizer: the
# gradient is read, and the weights and what is kept of them are read and written.
TOUCHED = {"sgd": 3, "momentum": 5, "lars": 5, "adam": 7, "lamb": 7}


@dataclass(frozen=True)
class Way:
    """One way to update: its algorithm, and seconds on the wires and for the update itself."""

    algorithm: str
    wires: float
    update: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.wires + self.update

    def __str__(self) -> str:
        return (
            f"{format_time(self.seconds)} by {self.algorithm}: {format_time(self.wires)} for sums, "
            f"{format_time(self.update)} to update"
        )


@dataclass(frozen=True)
class Weighed:
    """Both ways, for one payload on one mesh; simulated."""

    shared_out: Way
    whole: Way
    num_ranks: int

    @property
    def is_sharded(self) -> bool:
        """Whether to share the state out is as quick, or quicker."""
        return self.shared_out.seconds <= self.whole.seconds

    def __str__(self) -> str:
        return (
            f"  state shared out:   {self.shared_out}; 1/{self.num_ranks} of it at each chip\n"
            f"  whole at each chip: {self.whole}"
        )


def weigh(topology: Topology, payload_bytes: int, on: Network, optimizer: str = "adam") -> Weighed:
    """Price both ways, for gradients of so many bytes in float32, each by its fastest algorithm."""
    if optimizer not in TOUCHED:
        raise ArgumentError(
            f"there is no optimizer {optimizer!r} to price: choose from {', '.join(TOUCHED)}"
        )
    whole = TOUCHED[optimizer] * payload_bytes / memory_of(on)
    halved = choose(topology, payload_bytes, on, halves=True).algorithm
    first, second = Simulator(schedule_for(topology, halved, payload_bytes, on)).half_seconds(
        payload_bytes, on
    )
    reduced = choose(topology, payload_bytes, on, trees=True).candidates[0]
    return Weighed(
        shared_out=Way(halved, first + second, whole / topology.num_live),
        whole=Way(reduced.algorithm, reduced.seconds, whole),
        num_ranks=topology.num_live,
    )


def memory_of(on: Network) -> float:
    """What a chip's memory moves, in bytes per second, where that is known."""
    if on.memory is None:
        raise ArgumentError(
            "what an update takes depends on the chip's memory, of which nothing is known here: "
            "name a TPU generation, as in 'v5e'"
        )
    return on.memory
