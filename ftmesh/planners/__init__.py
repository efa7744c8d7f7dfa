"""The algorithms: one file each, from a topology to a schedule, knowing nothing of JAX.

A planner is a module with two functions: ``refusal(topology)``, which says in a sentence why the
algorithm cannot serve a mesh (None where it can), and ``plan(topology)``.
"""

from __future__ import annotations

from typing import Protocol

from ftmesh.errors import PlanError
from ftmesh.planners import ring, row_pair, two_dim
from ftmesh.schedule import Schedule
from ftmesh.topology import Topology


class Planner(Protocol):
    """What each module in this package offers."""

    def refusal(self, topology: Topology) -> str | None:
        """Why the algorithm cannot serve `topology`; None where it can."""

    def plan(self, topology: Topology) -> Schedule:
        """A schedule for a topology that is not refused."""


PLANNERS: dict[str, Planner] = {"row_pair": row_pair, "two_dim": two_dim, "ring": ring}
ALGORITHMS = ("auto", *PLANNERS)


def schedule(topology: Topology, algorithm: str = "auto") -> Schedule:
    """The schedule of `algorithm`, or a `PlanError` that says why not and which one can.

    ``"auto"`` takes the first of row_pair, two_dim and ring that accepts the mesh.
    """
    if algorithm not in ALGORITHMS:
        raise PlanError(f"there is no algorithm {algorithm!r}: choose from {', '.join(ALGORITHMS)}")
    _check_connected(topology)
    if algorithm in PLANNERS:
        reason = PLANNERS[algorithm].refusal(topology)
        if reason is None:
            return PLANNERS[algorithm].plan(topology)
        able = [name for name, planner in PLANNERS.items() if planner.refusal(topology) is None]
        remedy = f"use {' or '.join(able)}" if able else _no_way_out(topology)
        raise PlanError(f"{algorithm} cannot run on {topology}: {reason}; {remedy}")
    reasons = []
    for name, planner in PLANNERS.items():
        reason = planner.refusal(topology)
        if reason is None:
            return planner.plan(topology)
        reasons.append(f"{name}: {reason}")
    raise PlanError(
        f"no algorithm can run on {topology} ({'; '.join(reasons)}); {_no_way_out(topology)}"
    )


def _check_connected(topology: Topology) -> None:
    if topology.num_live < 2:
        raise PlanError(f"{topology} has a single live chip: there is nothing to sum")
    parts = topology.components()
    if len(parts) > 1:
        sizes = ", ".join(f"{len(part)} around {part[0]}" for part in parts)
        raise PlanError(
            f"{topology} is cut into {len(parts)} parts that no link joins ({sizes} chips); "
            f"the largest whole sub-mesh is {topology.largest_rectangle()}"
        )


def _no_way_out(topology: Topology) -> str:
    block = topology.largest_rectangle()
    return f"no other algorithm can either; the largest whole sub-mesh is {block}"
