"""The paper's figures 1 to 10, drawn from the routes and schedules of ftmesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ftmesh.algorithms import ring, row_pair, two_dim
from ftmesh.draw.panel import Panel, phase_panel, routes_panel
from ftmesh.errors import ScheduleError
from ftmesh.schedule.schedule import Schedule
from ftmesh.topology.routing import Router, around_failures, dimension_order
from ftmesh.topology.topology import Topology

FULL = Topology.grid("8x8", failed="")
DAMAGED = Topology.grid("8x8", failed="2x2@2,2")
# The routes of figures 1 and 2. The two in the middle would cross the damage.
ENDS = (((0, 0), (3, 1)), ((1, 3), (5, 2)), ((2, 1), (2, 5)), ((7, 6), (4, 4)))


def figure(number: int) -> list[Panel]:
    """Return the panels of one of the paper's figures, on an 8x8 mesh, whole or less ``2x2@2,2``.

    Of rings in both directions, the one with the first half of the payload is drawn.

    >>> [panel.title for panel in figure(8)]
    ['ring on 8x8 less 2x2@2,2: Hamiltonian ring, reduce-scatter']
    """
    if number not in FIGURES:
        raise ScheduleError(f"the paper has no figure {number}: choose from 1 to {max(FIGURES)}")
    return FIGURES[number]()


def _routes(topology: Topology, router: Router, title: str) -> list[Panel]:
    routes = [router(topology, src, dst) for src, dst in ENDS]
    return [routes_panel(topology, routes, title=f"{title}: {topology}")]


def _phase(schedule: Schedule, index: int) -> list[Panel]:
    return [phase_panel(schedule, index, half=0)]


def _two_dim(*phases: int) -> list[Panel]:
    """Phases with both halves of the payload, which take different routes."""
    schedule = two_dim.build_schedule(FULL)
    return [phase_panel(schedule, index) for index in phases]


def _forwarding_steps() -> list[Panel]:
    """The concurrent steps of the phases of `row_pair` around damage, one per panel."""
    schedule = row_pair.build_schedule(DAMAGED)
    scatter, scatter_across, gather_across, gather = (
        phase_panel(schedule, index, half=0) for index in range(4)
    )
    return [
        scatter.only("amber", title="sum next to the damage"),
        scatter.only("green", title="forward to the full rings"),
        scatter.only("blue", title="full rings, reduce-scatter"),
        replace(scatter_across, title=schedule.phases[1].name),
        replace(gather_across, title=schedule.phases[2].name),
        gather.only("blue", title="full rings, all-gather"),
        gather.only("green", title="return from the full rings"),
        gather.only("amber", title="spread next to the damage"),
    ]


def _numbered(panels: list[Panel]) -> list[Panel]:
    """Number the panels as steps; titles keep what follows their colon."""
    return [
        replace(panel, title=f"{step}. {panel.title.rpartition(': ')[2]}")
        for step, panel in enumerate(panels, start=1)
    ]


FIGURES: dict[int, Callable[[], list[Panel]]] = {
    1: lambda: _routes(FULL, dimension_order, "routes along x, then along y"),
    2: lambda: _routes(DAMAGED, around_failures, "routes around damage"),
    3: lambda: _phase(ring.build_schedule(FULL), 0),
    4: lambda: _two_dim(0, 1),
    5: lambda: _numbered(_two_dim(0, 1, 2, 3)),
    6: lambda: _phase(row_pair.build_schedule(FULL), 0),
    7: lambda: _phase(row_pair.build_schedule(FULL), 1),
    8: lambda: _phase(ring.build_schedule(DAMAGED), 0),
    9: lambda: _phase(row_pair.build_schedule(DAMAGED), 0),
    10: lambda: _numbered(_forwarding_steps()),
}
