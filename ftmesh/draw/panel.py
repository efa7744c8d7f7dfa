"""Panels: what a drawing shows, before it is text or SVG.

A `Panel` is a topology with arrows on it. `routes_panel` makes one from routes, `phase_panel` from
a phase of a schedule (or one of its rounds, lanes or halves of the payload), `schedule_panels` one
for each phase; `figure` makes those of the paper's figures. Chips come from the topology and arrows
from routes.

>>> from ftmesh.topology.routing import dimension_order
>>> topo = Topology.grid("4x4")
>>> routes_panel(topo, [dimension_order(topo, (0, 0), (2, 1))]).arrows
(Arrow(route=((0, 0), (1, 0), (2, 0), (2, 1)), colour='blue'),)

The page is counted in chips across and down. A mesh of one axis is a row. A mesh of three axes is
its layers along z, next to each other with space for one chip between them, in as many rows as
necessary; a link to the next layer leads up and to the right.

>>> topo = Topology.grid("4x4x8")
>>> page_size(topo), position(topo, (1, 2, 0)), position(topo, (1, 2, 5))
((19, 9), (1, 2), (6, 7))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import ceil
from typing import Literal

import numpy as np

from ftmesh.algorithms import rings, row_pair
from ftmesh.errors import ScheduleError, TopologyError
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import Schedule, SplitSchedule
from ftmesh.schedule.transfers import Transfers
from ftmesh.topology.notation import Coord
from ftmesh.topology.routing import Route, Router, around_failures, dimension_order
from ftmesh.topology.topology import Topology

Colour = Literal["blue", "orange", "green", "purple", "amber", "red"]
Role = Literal["live", "failed", "off_ring"]
Legend = tuple[tuple[Colour, str], ...]

# Adjacent rings have different colours of these, which are safe for colour-blind readers.
PALETTE: tuple[Colour, ...] = ("blue", "orange", "green", "purple")


@dataclass(frozen=True)
class Arrow:
    """The route of a message, from its first chip to its last."""

    route: Route
    colour: Colour = "blue"


@dataclass(frozen=True)
class Panel:
    """A mesh with arrows, a title and a legend of colours with their meanings.

    Chips `off_ring` are drawn yellow: they pass their share to a neighbour on a full ring and own
    no chunk themselves.
    """

    topology: Topology
    title: str
    arrows: tuple[Arrow, ...] = ()
    off_ring: frozenset[Coord] = frozenset()
    legend: Legend = ()

    def __post_init__(self) -> None:
        for arrow in self.arrows:
            for a, b in pairwise(arrow.route):
                direction(self.topology, a, b)

    def role(self, coord: Coord) -> Role:
        """How the chip at `coord` is drawn."""
        if coord in self.topology.failed:
            return "failed"
        return "off_ring" if coord in self.off_ring else "live"

    def only(self, *colours: Colour, title: str | None = None) -> Panel:
        """The same panel with only the arrows and the legend of `colours`."""
        return replace(
            self,
            title=self.title if title is None else title,
            arrows=tuple(arrow for arrow in self.arrows if arrow.colour in colours),
            legend=tuple(entry for entry in self.legend if entry[0] in colours),
        )


def routes_panel(topology: Topology, routes: Iterable[Route], *, title: str | None = None) -> Panel:
    """Draw routes on a mesh, each in the next colour."""
    arrows = tuple(
        Arrow(route, PALETTE[index % len(PALETTE)]) for index, route in enumerate(routes)
    )
    return Panel(topology, str(topology) if title is None else title, arrows)


def phase_panel(
    schedule: Schedule,
    index: int,
    *,
    round: int | None = None,
    lane: int | None = None,
    half: Literal[0, 1] | None = None,
    title: str | None = None,
) -> Panel:
    """Draw the messages of a phase along their routes.

    Colours show chips off the rings, or else thirds or halves of the payload that run on different
    rings, or else the rings.

    Args:
        index: Which of the phases.
        round: Only this round, counted within the phase.
        lane: Only this lane.
        half: Only this half of the payload; one direction of a ring that runs in both.
        title: By default the algorithm, the mesh and the phase.
    """
    name = f"{schedule.algorithm} on {schedule.topology}"
    _check_exists("phase", index, len(schedule.phases) - 1, name)
    phase = schedule.phases[index]
    _check_exists("round", round, phase.num_rounds - 1, f"phase {index}, {phase.name!r},")
    _check_exists("lane", lane, phase.lanes[-1], f"phase {index}, {phase.name!r},")
    transfers = phase.transfers
    shown = np.ones(len(transfers.src), np.bool_)
    columns = transfers.round, transfers.lane, _part(schedule, transfers)
    for wanted, column in zip((round, lane, half), columns, strict=True):
        if wanted is not None:
            shown &= column == wanted
    off_ring = off_ring_chips(schedule)
    colour, legend = _colouring(schedule, phase, off_ring)
    chosen = transfers.take(shown)
    ends = map(_to_ints, (chosen.src, chosen.dst, _part(schedule, chosen)))
    sends = sorted(set(zip(*ends, strict=True)))
    arrows = dict.fromkeys(
        Arrow(schedule.routes[src, dst], colour(src, dst, part)) for src, dst, part in sends
    )
    if title is None:
        title = f"{name}: {phase.name}"
        title += "" if round is None else f", round {round}"
        title += "" if lane is None else f", lane {lane}"
    return Panel(schedule.topology, title, tuple(arrows), off_ring, legend)


def _check_exists(kind: str, number: int | None, last: int, owner: str) -> None:
    if number is not None and not 0 <= number <= last:
        raise ScheduleError(f"{kind} {number} does not exist: {owner} has {kind}s 0 to {last}")


def schedule_panels(schedule: Schedule, *, half: Literal[0, 1] | None = None) -> list[Panel]:
    """Draw each phase of `schedule`; see `phase_panel`."""
    return [phase_panel(schedule, index, half=half) for index in range(len(schedule.phases))]


def off_ring_chips(schedule: Schedule) -> frozenset[Coord]:
    """The live chips that own no chunk; none if the schedule has no owners."""
    if not isinstance(schedule, SplitSchedule):
        return frozenset()
    owners = set(_to_ints(schedule.owner))
    coords = schedule.topology.coords
    return frozenset(coord for rank, coord in enumerate(coords) if rank not in owners)


def _colouring(
    schedule: Schedule, phase: Phase, off_ring: frozenset[Coord]
) -> tuple[Callable[[int, int, int], Colour], Legend]:
    """The colour of a transfer by source, destination and half, and the legend."""
    transfers = phase.transfers
    off = {schedule.topology.rank(coord) for coord in off_ring}
    if any(off.intersection(pair) for pair in phase.pairs):
        by_ends: tuple[Colour, ...] = ("blue", "green", "amber")
        return lambda src, dst, half: by_ends[(src in off) + (dst in off)], (
            ("amber", "off the rings"),
            ("green", "to or from a ring"),
            ("blue", "full rings"),
        )
    thirds = [
        _connected_pairs(transfers.take(_part(schedule, transfers, 3) == part)) for part in range(3)
    ]
    if all(thirds) and not any(one & other for one, other in combinations(thirds, 2)):
        by_third: tuple[Colour, ...] = ("red", "blue", "green")
        third = {cable: by_third[part] for part in range(3) for cable in thirds[part]}
        return lambda src, dst, half: third[frozenset((src, dst))], (
            ("red", "first third of the payload"),
            ("blue", "second third of the payload"),
            ("green", "last third of the payload"),
        )
    first, second = (
        _components(transfers.take(_part(schedule, transfers) == half)) for half in (0, 1)
    )
    if first and second and first != second:
        by_half: tuple[Colour, ...] = ("red", "blue")
        return lambda src, dst, half: by_half[half], (
            ("red", "first half of the payload"),
            ("blue", "second half of the payload"),
        )
    by_ring = _ring_colours(schedule.topology, _components(transfers))
    return lambda src, dst, half: by_ring[src], ()


def _part(schedule: Schedule, transfers: Transfers, num_parts: int = 2) -> np.ndarray:
    """Which of `num_parts` equal parts of the payload has the first chunk of each transfer."""
    return num_parts * transfers.chunk // schedule.num_chunks


def _connected_pairs(transfers: Transfers) -> set[frozenset[int]]:
    """The pairs of ranks between which data travels, in either direction."""
    return set(map(frozenset, zip(_to_ints(transfers.src), _to_ints(transfers.dst), strict=True)))


def _to_ints(column: np.ndarray) -> list[int]:
    return [int(n) for n in column]


def _components(transfers: Transfers) -> dict[int, int]:
    """The ranks that take part, each with the lowest rank that it is connected to."""
    neighbours: dict[int, set[int]] = {}
    for src, dst in set(zip(_to_ints(transfers.src), _to_ints(transfers.dst), strict=True)):
        neighbours.setdefault(src, set()).add(dst)
        neighbours.setdefault(dst, set()).add(src)
    lowest: dict[int, int] = {}
    for start in sorted(neighbours):
        frontier = [start]
        while frontier:
            rank = frontier.pop()
            if rank not in lowest:
                lowest[rank] = start
                frontier.extend(neighbours[rank])
    return lowest


def _ring_colours(topology: Topology, ring_of: dict[int, int]) -> dict[int, Colour]:
    """A colour per rank: the same all along a ring, different for adjacent rings."""
    neighbours: dict[int, set[int]] = {}
    for rank, its_ring in ring_of.items():
        near = (topology.rank(coord) for coord in topology.neighbours(topology.coords[rank]))
        neighbours.setdefault(its_ring, set()).update(ring_of[n] for n in near if n in ring_of)
    colours: dict[int, Colour] = {}
    for index, its_ring in enumerate(sorted(neighbours)):
        taken = {colours.get(other) for other in neighbours[its_ring]}
        free = [colour for colour in PALETTE if colour not in taken]
        colours[its_ring] = free[0] if free else PALETTE[index % len(PALETTE)]
    return {rank: colours[its_ring] for rank, its_ring in ring_of.items()}


# Layout on the page ----------------------------------------------------------------------------

Position = tuple[int, int]
Direction = tuple[int, int]

MAX_ACROSS = 24  # chips, if there are several layers


def page_size(topology: Topology) -> tuple[int, int]:
    """Columns and rows of chips on the page, including the space between layers."""
    width, height, depth = _sides(topology.shape)
    across = _layers_across(topology)
    return across * (width + 1) - 1, ceil(depth / across) * (height + 1) - 1


def position(topology: Topology, coord: Coord) -> Position:
    """The position of a chip on the page: x across, y down."""
    x, y, z = (*coord, 0, 0)[:3]
    across, down = layer_origins(topology)[z]
    return across + x, down + y


def layer_origins(topology: Topology) -> list[Position]:
    """The position of the first chip of each layer; one or two axes make one layer."""
    width, height, depth = _sides(topology.shape)
    across = _layers_across(topology)
    return [(z % across * (width + 1), z // across * (height + 1)) for z in range(depth)]


def direction(topology: Topology, a: Coord, b: Coord) -> Direction:
    """The unit step on the page from chip `a` to its neighbour `b`, over the edge if it wraps."""
    for axis, last in enumerate(n - 1 for n in topology.shape):
        step = b[axis] - a[axis]
        if a[:axis] + a[axis + 1 :] == b[:axis] + b[axis + 1 :]:
            if topology.wrap[axis] and abs(step) == last > 1:
                step = -step // last
            if abs(step) == 1:
                return ((step, 0), (0, step), (step, -step))[axis]
    raise TopologyError(
        f"an arrow goes from chip to neighbouring chip, and {b} is no neighbour of {a} on "
        f"{topology}"
    )


def changes_layer(step: Direction) -> bool:
    """Whether a step leads to another layer."""
    return all(step)


def gaps(topology: Topology, a: Coord, b: Coord) -> Iterator[Position]:
    """The positions left of, or above, the space of a link within a layer on the page.

    One for adjacent chips; a link over the edge takes space at both edges.
    """
    dx, dy = direction(topology, a, b)
    ends = [position(topology, a), position(topology, b)]
    low, high = ends if dx + dy > 0 else reversed(ends)
    before = (high[0] - abs(dx), high[1] - abs(dy))
    yield low
    if low != before:
        yield before


def _sides(shape: Coord) -> tuple[int, int, int]:
    width, height, depth = (*shape, 1, 1)[:3]
    return width, height, depth


def _layers_across(topology: Topology) -> int:
    """As many layers as fit, and as even rows as possible."""
    width, _, depth = _sides(topology.shape)
    most = max(1, MAX_ACROSS // (width + 1))
    return ceil(depth / ceil(depth / most))


# The paper's figures ----------------------------------------------------------------------------

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
    schedule = rings.build_two_dim(FULL)
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
    3: lambda: _phase(rings.build_schedule(FULL), 0),
    4: lambda: _two_dim(0, 1),
    5: lambda: _numbered(_two_dim(0, 1, 2, 3)),
    6: lambda: _phase(row_pair.build_schedule(FULL), 0),
    7: lambda: _phase(row_pair.build_schedule(FULL), 1),
    8: lambda: _phase(rings.build_schedule(DAMAGED), 0),
    9: lambda: _phase(row_pair.build_schedule(DAMAGED), 0),
    10: lambda: _numbered(_forwarding_steps()),
}
