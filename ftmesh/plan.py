"""Plan: a proven schedule for a topology and a payload."""

from __future__ import annotations

from dataclasses import dataclass

from ftmesh import planners
from ftmesh.schedule import Schedule
from ftmesh.topology import Topology
from ftmesh.verify import Proof
from ftmesh.verify import verify as _verify


@dataclass(frozen=True)
class Plan:
    """A schedule chosen for a topology and payload; `proof` is what verification counted."""

    schedule: Schedule
    payload_bytes: int
    proof: Proof | None = None

    @property
    def topology(self) -> Topology:
        """The mesh this plan is for."""
        return self.schedule.topology

    @property
    def algorithm(self) -> str:
        """The algorithm that was taken, also where ``auto`` was asked for."""
        return self.schedule.algorithm

    def __str__(self) -> str:
        return self.schedule.describe(self.payload_bytes)


def plan(
    topology: Topology,
    algorithm: str = "auto",
    *,
    payload_bytes: int = 100_000_000,
    verify: bool = True,
) -> Plan:
    """Plan an all-reduce of `payload_bytes` on `topology`, and prove it right.

    >>> topo = Topology.grid("8x8", failed="2x2@2,2")
    >>> plan(topo, "ring").schedule.num_rounds
    118
    """
    schedule = planners.schedule(topology, algorithm)
    return Plan(schedule, payload_bytes, _verify(schedule) if verify else None)
