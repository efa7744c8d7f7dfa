"""What to do with leaf chips, which have one link, and what an all-reduce costs in each case.

All data of such a chip crosses its one link, so no all-reduce with it can take less than a link
takes for the payload. *Along the trees*, like any other chip, it comes near that. *Fed* before and
after, it takes that time twice. *Idle*, it costs what it would have computed.

>>> from ftmesh.cost.links import DEFAULT
>>> costs = leaf_chip_costs(Topology.grid("4x4", failed="1x1@1,0"), 10_000_000, DEFAULT)
>>> costs.leaf_chips, costs.best(compute=0.001), costs.best(compute=0.1)
(((0, 0),), 'idle', 'along the trees')
"""

from __future__ import annotations

from dataclasses import dataclass

from ftmesh.algorithms import tree
from ftmesh.algorithms.leaf_chips import LeafChips
from ftmesh.cost.links import Network
from ftmesh.cost.simulate import SYNCHRONOUS, Simulator
from ftmesh.planning.chunking import candidate_chunkings, schedule_for
from ftmesh.topology.graph import LinkGraph
from ftmesh.topology.notation import Coord, format_failed
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Topology
from ftmesh.units import format_time

IN_TREES, FED, IDLE = "along the trees", "fed before and after", "idle"


@dataclass(frozen=True)
class LeafChipCosts:
    """The times in seconds of an all-reduce with leaf chips `IN_TREES`, `FED` and `IDLE`."""

    topology: Topology
    leaf_chips: tuple[Coord, ...]
    seconds: dict[str, float]

    @property
    def idle_topology(self) -> Topology:
        """The mesh in which the leaf chips are idle."""
        return self.topology.with_failed(self.leaf_chips)

    def step_seconds(self, compute: float) -> dict[str, float]:
        """The time of a training step in each case, if it computes for `compute` on all chips."""
        more = self.topology.num_live / self.idle_topology.num_live
        return {
            name: compute * (more if name == IDLE else 1.0) + seconds
            for name, seconds in self.seconds.items()
        }

    def best(self, compute: float) -> str:
        """The case with the shortest step."""
        steps = self.step_seconds(compute)
        return min(steps, key=lambda name: steps[name])

    def __str__(self) -> str:
        verb = "has" if len(self.leaf_chips) == 1 else "have"
        costs = ", ".join(f"{format_time(time)} {name}" for name, time in self.seconds.items())
        return f"{format_failed(self.leaf_chips)} {verb} one link; an all-reduce takes {costs}"


def leaf_chip_costs(
    topology: Topology, payload_bytes: int, network: Network, mode: str = SYNCHRONOUS
) -> LeafChipCosts | None:
    """Simulate the cases; None if there are no leaf chips, or if all chips are."""
    if isinstance(topology, TiledTopology) or len(topology.components()) > 1:
        return None
    leaves = LeafChips.from_graph(LinkGraph.from_topology(topology))
    if not len(leaves.rank) or len(leaves.core_ranks) == 1:
        return None
    leaf_chips = tuple(topology.coords[rank] for rank in sorted(leaves.rank.tolist()))
    without = topology.with_failed(leaf_chips)
    by, *_ = candidate_chunkings(without, payload_bytes, network)
    schedules = {
        IN_TREES: schedule_for(topology, "tree", payload_bytes, network, mode),
        FED: tree.build_schedule(
            topology, by.num_chunks, width=by.width, balance=by.balance, leaves_apart=True
        ),
        IDLE: schedule_for(without, "tree", payload_bytes, network, mode),
    }
    seconds = {
        name: Simulator(schedule).seconds(payload_bytes, network, mode)
        for name, schedule in schedules.items()
    }
    return LeafChipCosts(topology, leaf_chips, seconds)
