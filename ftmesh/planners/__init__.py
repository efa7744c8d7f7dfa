"""The algorithms: one file each, from a topology to a schedule, knowing nothing of JAX.

A planner is a module with a function ``plan(topology)``, which returns a schedule or raises a
`PlanError` that says in a sentence why the algorithm cannot serve that mesh.
"""

from __future__ import annotations

from typing import Protocol

from ftmesh.errors import PlanError
from ftmesh.planners import ring, row_pair, two_dim
from ftmesh.schedule import Schedule
from ftmesh.topology import Topology


class Planner(Protocol):
    """What each algorithm's module offers."""

    def plan(self, topology: Topology) -> Schedule:
        """A schedule for `topology`, or a `PlanError` that says why not."""


PLANNERS: dict[str, Planner] = {"two_dim": two_dim, "row_pair": row_pair, "ring": ring}
ALGORITHMS = ("auto", *PLANNERS)


def schedule(topology: Topology, algorithm: str = "auto") -> Schedule:
    """The schedule of `algorithm`, or a `PlanError` that says why not and which one can.

    ``"auto"`` takes the first of two_dim, row_pair and ring that accepts the mesh.
    """
    if algorithm not in ALGORITHMS:
        raise PlanError(f"there is no algorithm {algorithm!r}: choose from {', '.join(ALGORITHMS)}")
    _check_whole(topology)
    reasons = {}
    for name in PLANNERS if algorithm == "auto" else [algorithm]:
        try:
            return PLANNERS[name].plan(topology)
        except PlanError as error:
            reasons[name] = f"{name} cannot run on {topology}: {error}"
    able = [name for name in PLANNERS if name not in reasons and _can_plan(name, topology)]
    if able:
        raise PlanError(f"{reasons[algorithm]}; use {' or '.join(able)}")
    rest = f"no other algorithm can; the largest whole sub-mesh is {topology.largest_rectangle()}"
    raise PlanError("; ".join([*reasons.values(), rest]))


def _can_plan(name: str, topology: Topology) -> bool:
    try:
        PLANNERS[name].plan(topology)
    except PlanError:
        return False
    return True


def _check_whole(topology: Topology) -> None:
    """Refuse what no algorithm could serve."""
    if topology.num_live < 2:
        raise PlanError(f"{topology} has a single live chip: there is nothing to sum")
    if sum(size > 1 for size in topology.shape) > 2:
        raise PlanError(
            f"{topology} has {len(topology.shape)} axes, and every algorithm here works on two"
        )
    if sum(size > 1 for size in topology.shape) < 2:
        raise PlanError(
            f"{topology} is a line of chips; every algorithm here needs a mesh with two sides of 2 "
            "or more"
        )
    parts = topology.components()
    if len(parts) > 1:
        sizes = ", ".join(f"{len(part)} chips around {part[0]}" for part in parts)
        raise PlanError(
            f"{topology} is cut into {len(parts)} parts that no link joins: {sizes}; "
            f"the largest whole sub-mesh is {topology.largest_rectangle()}"
        )
