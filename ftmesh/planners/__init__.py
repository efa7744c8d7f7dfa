"""The algorithms: one file each, from a topology to a schedule, knowing nothing of JAX.

A planner is a module with a function ``plan(topology)``, which returns a schedule or raises a
`PlanError` that says in a sentence why the algorithm cannot serve that mesh.
"""

from __future__ import annotations

from typing import Protocol

from ftmesh.errors import PlanError
from ftmesh.mesh.topology import Topology
from ftmesh.planners import line, ring, row_pair, two_dim
from ftmesh.schedule.schedule import Schedule


class Planner(Protocol):
    """What each algorithm's module offers."""

    def plan(self, topology: Topology) -> Schedule:
        """A schedule for `topology`, or a `PlanError` that says why not."""


PLANNERS: dict[str, Planner] = {
    "two_dim": two_dim,
    "row_pair": row_pair,
    "ring": ring,
    "line": line,
}


def schedule(topology: Topology, algorithm: str) -> Schedule:
    """The schedule of `algorithm`, or a `PlanError` that says why not and which one can."""
    if algorithm not in PLANNERS:
        raise PlanError(f"there is no algorithm {algorithm!r}: choose from {', '.join(PLANNERS)}")
    _check_whole(topology)
    try:
        return PLANNERS[algorithm].plan(topology)
    except PlanError:
        found = outcomes(topology)  # raises where no algorithm can
    able = [name for name, outcome in found.items() if isinstance(outcome, Schedule)]
    raise PlanError(f"{_refusal(algorithm, topology, found)}; use {' or '.join(able)}")


def outcomes(topology: Topology) -> dict[str, Schedule | PlanError]:
    """What each algorithm makes of `topology`; a `PlanError` with all reasons where none can."""
    _check_whole(topology)
    found: dict[str, Schedule | PlanError] = {}
    for name, planner in PLANNERS.items():
        try:
            found[name] = planner.plan(topology)
        except PlanError as error:
            found[name] = error
    if not any(isinstance(outcome, Schedule) for outcome in found.values()):
        reasons = [_refusal(name, topology, found) for name in found]
        rest = f"the largest whole sub-mesh is {topology.largest_rectangle()}"
        raise PlanError("; ".join([*reasons, rest]))
    return found


def _refusal(name: str, topology: Topology, found: dict[str, Schedule | PlanError]) -> str:
    return f"{name} cannot run on {topology}: {found[name]}"


def _check_whole(topology: Topology) -> None:
    """Refuse what no algorithm could serve."""
    if topology.num_live < 2:
        raise PlanError(f"{topology} has a single live {topology.noun}: there is nothing to sum")
    if sum(size > 1 for size in topology.shape) > 2:
        raise PlanError(
            f"{topology} has {len(topology.shape)} axes, and every algorithm here works on one or "
            "two"
        )
    parts = topology.components()
    if len(parts) > 1:
        sizes = ", ".join(f"{len(part)} {topology.noun}s around {part[0]}" for part in parts)
        raise PlanError(
            f"{topology} is cut into {len(parts)} parts that no link joins: {sizes}; "
            f"the largest whole sub-mesh is {topology.largest_rectangle()}"
        )
