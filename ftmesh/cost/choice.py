"""Choose: price every algorithm on a topology, and take the fastest for the payload.

>>> choice = choose(Topology.grid("8x8", failed="2x2@2,2"), 1_000_000)
>>> choice.algorithm
'row_pair'
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ftmesh import planners
from ftmesh.cost.limits import limits
from ftmesh.cost.network import DEFAULT, Network
from ftmesh.cost.simulate import Simulator
from ftmesh.errors import PlanError
from ftmesh.mesh.topology import Topology
from ftmesh.units import format_bytes, format_time

AUTO = "auto"
ALGORITHMS = (AUTO, *planners.PLANNERS)


@dataclass(frozen=True)
class Candidate:
    """An algorithm and its simulated time, or the reason why it cannot serve."""

    algorithm: str
    rounds: int = 0
    seconds: float = math.inf
    refusal: str = ""


@dataclass(frozen=True)
class Choice:
    """Every algorithm on one topology for one payload, the fastest first."""

    topology: Topology
    payload_bytes: int
    network: Network
    candidates: tuple[Candidate, ...]

    @property
    def algorithm(self) -> str:
        """The fastest."""
        return self.candidates[0].algorithm

    def __str__(self) -> str:
        least = limits(self.topology).all_reduce_seconds(self.payload_bytes, self.network)
        lines = [
            f"{format_bytes(self.payload_bytes)} on {self.topology}, {self.network}",
            f"  {'algorithm':<12}{'rounds':>7}{'simulated':>12}{'x limit':>9}",
        ]
        for one in self.candidates:
            if one.refusal:
                lines.append(f"  {one.algorithm:<12}cannot: {one.refusal}")
            else:
                lines.append(
                    f"  {one.algorithm:<12}{one.rounds:>7}{format_time(one.seconds):>12}"
                    f"{one.seconds / least:>9.2f}"
                )
        return "\n".join([*lines, f"  no all-reduce can take less than {format_time(least)}"])


def choose(topology: Topology, payload_bytes: int, on: Network = DEFAULT) -> Choice:
    """Price every algorithm that can serve `topology`, in synchronous rounds.

    A `PlanError` where none can. What was found is remembered for the next call with an equal
    topology, payload and network.
    """
    return _choose(topology.without_devices(), payload_bytes, on)


@lru_cache(maxsize=256)
def _choose(topology: Topology, payload_bytes: int, on: Network) -> Choice:
    candidates = [
        Candidate(name, refusal=str(outcome))
        if isinstance(outcome, PlanError)
        else Candidate(name, outcome.num_rounds, Simulator(outcome).seconds(payload_bytes, on))
        for name, outcome in planners.outcomes(topology).items()
    ]
    ranked = sorted(candidates, key=lambda one: one.seconds)
    return Choice(topology, payload_bytes, on, tuple(ranked))
