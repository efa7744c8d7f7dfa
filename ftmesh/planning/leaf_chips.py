"""Ways: what to do with chips that hang on one link, and what an all-reduce takes by each.

All that such a chip gives and gets crosses its one link, so no all-reduce with it can take less
than a link takes for the payload. *Along the trees*, as any other chip, it comes near that. *Fed*
before and after, it takes that time twice. *Idle*, it costs what it would have computed.

>>> from ftmesh.cost.links import DEFAULT
>>> found = ways(Topology.grid("4x4", failed="1x1@1,0"), 10_000_000, DEFAULT)
>>> found.pendants, found.best(compute=0.001), found.best(compute=0.1)
(((0, 0),), 'idle', 'along the trees')
"""

from __future__ import annotations

from dataclasses import dataclass

from ftmesh.algorithms import tree
from ftmesh.algorithms.leaf_chips import Pendants
from ftmesh.cost.links import Network
from ftmesh.cost.simulate import SYNCHRONOUS, Simulator
from ftmesh.planning.chunking import chunkings, schedule_for
from ftmesh.topology.graph import Graph
from ftmesh.topology.notation import Coord, format_failed
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Topology
from ftmesh.units import format_time

ALONG, FED, IDLE = "along the trees", "fed before and after", "idle"


@dataclass(frozen=True)
class Ways:
    """What an all-reduce takes by each way, in seconds."""

    topology: Topology
    pendants: tuple[Coord, ...]
    seconds: dict[str, float]

    @property
    def without(self) -> Topology:
        """The mesh in which they are idle."""
        return self.topology.less(self.pendants)

    def steps(self, compute: float) -> dict[str, float]:
        """A training step by each way, whose computing takes so long on all live chips."""
        more = self.topology.num_live / self.without.num_live
        return {
            name: compute * (more if name == IDLE else 1.0) + seconds
            for name, seconds in self.seconds.items()
        }

    def best(self, compute: float) -> str:
        """The way with the shortest step."""
        steps = self.steps(compute)
        return min(steps, key=lambda name: steps[name])

    def __str__(self) -> str:
        verb = "hangs" if len(self.pendants) == 1 else "hang"
        prices = ", ".join(f"{format_time(each)} {name}" for name, each in self.seconds.items())
        return f"{format_failed(self.pendants)} {verb} on one link; a sum takes {prices}"


def ways(
    topology: Topology, payload_bytes: int, on: Network, mode: str = SYNCHRONOUS
) -> Ways | None:
    """The ways with the chips that hang on one link; None where there are none, or all do."""
    if isinstance(topology, TiledTopology) or len(topology.components()) > 1:
        return None
    found = Pendants.of(Graph.of(topology))
    if not len(found.rank) or len(found.others) == 1:
        return None
    pendants = tuple(topology.coords[rank] for rank in sorted(found.rank.tolist()))
    without = topology.less(pendants)
    by, *_ = chunkings(without, payload_bytes, on)
    schedules = {
        ALONG: schedule_for(topology, "tree", payload_bytes, on, mode),
        FED: tree.plan(topology, by.num_chunks, width=by.width, balance=by.balance, feeding=True),
        IDLE: schedule_for(without, "tree", payload_bytes, on, mode),
    }
    seconds = {
        name: Simulator(each).seconds(payload_bytes, on, mode) for name, each in schedules.items()
    }
    return Ways(topology, pendants, seconds)
