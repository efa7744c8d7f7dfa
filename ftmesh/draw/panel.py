"""Panels: what a drawing shows, before it is text or SVG.

A `Panel` is a topology with arrows on it. `routes_panel` makes one of routes, `phase_panel` of a
phase of a schedule (or of one round, one lane, one half of the payload), `schedule_panels` one for
each phase. Nothing is placed by hand: chips come from the topology, arrows from routes.

>>> from ftmesh.topology.routing import dimension_order
>>> topo = Topology.grid("4x4")
>>> routes_panel(topo, [dimension_order(topo, (0, 0), (2, 1))]).arrows
(Arrow(route=((0, 0), (1, 0), (2, 0), (2, 1)), colour='blue'),)

Page: where chips and links stand in a drawing, counted in chips across and down.

A mesh of one axis is a row. One of three is its layers along z, side by side with a chip's room
between them, in as many rows as it takes; a link to the next layer leads up and to the right.

>>> page = Topology.grid("4x4x8")
>>> size(page), place(page, (1, 2, 0)), place(page, (1, 2, 5))
((19, 9), (1, 2), (6, 7))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import ceil
from typing import Literal

import numpy as np

from ftmesh.errors import ScheduleError, TopologyError
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import Schedule, SplitSchedule
from ftmesh.schedule.transfers import Columns
from ftmesh.topology.notation import Coord
from ftmesh.topology.routing import Route
from ftmesh.topology.topology import Topology

Colour = Literal["blue", "orange", "green", "purple", "amber", "red"]
Role = Literal["live", "failed", "off_ring"]
Legend = tuple[tuple[Colour, str], ...]

# Neighbouring rings take different colours of these; people who confuse hues can tell them apart.
PALETTE: tuple[Colour, ...] = ("blue", "orange", "green", "purple")


@dataclass(frozen=True)
class Arrow:
    """A message's way over the mesh: from the first chip of its route to the last."""

    route: Route
    colour: Colour = "blue"


@dataclass(frozen=True)
class Panel:
    """A mesh with arrows, a title, and what the colours mean; a value, equal by content.

    `off_ring` are the live chips drawn yellow: those that hand their share to a neighbour on a
    full ring and own no chunk themselves.
    """

    topology: Topology
    title: str
    arrows: tuple[Arrow, ...] = ()
    off_ring: frozenset[Coord] = frozenset()
    legend: Legend = ()

    def __post_init__(self) -> None:
        for arrow in self.arrows:
            for a, b in pairwise(arrow.route):
                heading(self.topology, a, b)

    def role(self, coord: Coord) -> Role:
        """What the chip at `coord` is drawn as."""
        if coord in self.topology.failed:
            return "failed"
        return "off_ring" if coord in self.off_ring else "live"

    def only(self, *colours: Colour, title: str | None = None) -> Panel:
        """The panel with the arrows of some colours, and what those mean."""
        return replace(
            self,
            title=self.title if title is None else title,
            arrows=tuple(arrow for arrow in self.arrows if arrow.colour in colours),
            legend=tuple(entry for entry in self.legend if entry[0] in colours),
        )


def routes_panel(topology: Topology, routes: Iterable[Route], *, title: str | None = None) -> Panel:
    """Routes on a mesh, each in the next colour."""
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
    """Who sends to whom in phase `index`, along the links the messages take.

    `round` (counted within the phase), `lane` and `half` of the payload narrow it down; where a
    ring runs in both directions, ``half=0`` leaves one. Colours tell apart, in this order: the work
    of chips off the rings, thirds or halves of the payload where they run on different rings, the
    rings.
    """
    if not 0 <= index < len(schedule.phases):
        raise ScheduleError(
            f"phase {index} does not exist: {schedule.algorithm} on {schedule.topology} has "
            f"phases 0 to {len(schedule.phases) - 1}"
        )
    phase = schedule.phases[index]
    if round is not None and not 0 <= round < phase.num_rounds:
        raise ScheduleError(
            f"round {round} does not exist: phase {index}, {phase.name!r}, has rounds 0 to "
            f"{phase.num_rounds - 1}"
        )
    if lane is not None and not 0 <= lane <= phase.lanes[-1]:
        raise ScheduleError(
            f"lane {lane} does not exist: phase {index}, {phase.name!r}, has lanes 0 to "
            f"{phase.lanes[-1]}"
        )
    c = phase.columns
    shown = np.ones(len(c.src), np.bool_)
    for wanted, column in ((round, c.round), (lane, c.lane), (half, _half(schedule, c))):
        if wanted is not None:
            shown &= column == wanted
    off_ring = off_ring_chips(schedule)
    colour, legend = _colouring(schedule, phase, off_ring)
    chosen = c.take(shown)
    columns = map(_plain, (chosen.src, chosen.dst, _half(schedule, chosen)))
    sends = sorted(set(zip(*columns, strict=True)))
    arrows = dict.fromkeys(
        Arrow(schedule.routes[src, dst], colour(src, dst, part)) for src, dst, part in sends
    )
    if title is None:
        title = f"{schedule.algorithm} on {schedule.topology}: {phase.name}"
        title += "" if round is None else f", round {round}"
        title += "" if lane is None else f", lane {lane}"
    return Panel(schedule.topology, title, tuple(arrows), off_ring, legend)


def schedule_panels(schedule: Schedule, *, half: Literal[0, 1] | None = None) -> list[Panel]:
    """A panel for each phase of `schedule`."""
    return [phase_panel(schedule, index, half=half) for index in range(len(schedule.phases))]


def off_ring_chips(schedule: Schedule) -> frozenset[Coord]:
    """The live chips that own no chunk, though others do."""
    if not isinstance(schedule, SplitSchedule):
        return frozenset()
    owners = set(_plain(schedule.owner))
    coords = schedule.topology.coords
    return frozenset(coord for rank, coord in enumerate(coords) if rank not in owners)


def _colouring(
    schedule: Schedule, phase: Phase, off_ring: frozenset[Coord]
) -> tuple[Callable[[int, int, int], Colour], Legend]:
    """The colour of a transfer by source, destination and half; and what the colours mean."""
    c = phase.columns
    off = {schedule.topology.rank(coord) for coord in off_ring}
    if any(off.intersection(pair) for pair in phase.pairs):
        by_ends: tuple[Colour, ...] = ("blue", "green", "amber")
        return lambda src, dst, half: by_ends[(src in off) + (dst in off)], (
            ("amber", "off the rings"),
            ("green", "to or from a ring"),
            ("blue", "full rings"),
        )
    thirds = [_cables(c.take(_part(schedule, c, 3) == part)) for part in range(3)]
    if all(thirds) and not any(one & other for one, other in combinations(thirds, 2)):
        by_third: tuple[Colour, ...] = ("red", "blue", "green")
        third = {cable: by_third[part] for part in range(3) for cable in thirds[part]}
        return lambda src, dst, half: third[frozenset((src, dst))], (
            ("red", "first third of the payload"),
            ("blue", "second third of the payload"),
            ("green", "last third of the payload"),
        )
    first, second = (_joined(c.take(_half(schedule, c) == half)) for half in (0, 1))
    if first and second and first != second:
        by_half: tuple[Colour, ...] = ("red", "blue")
        return lambda src, dst, half: by_half[half], (
            ("red", "first half of the payload"),
            ("blue", "second half of the payload"),
        )
    by_ring = _ring_colours(schedule.topology, _joined(c))
    return lambda src, dst, half: by_ring[src], ()


def _half(schedule: Schedule, c: Columns) -> np.ndarray:
    """0 for transfers whose first chunk is in the first half of the payload, else 1."""
    return _part(schedule, c, 2)


def _part(schedule: Schedule, c: Columns, num_parts: int) -> np.ndarray:
    """Which of so many equal parts of the payload the first chunk of each transfer is in."""
    return num_parts * c.chunk // schedule.num_chunks


def _cables(c: Columns) -> set[frozenset[int]]:
    """The pairs of ranks between which something travels, either way."""
    return set(map(frozenset, zip(_plain(c.src), _plain(c.dst), strict=True)))


def _plain(column: np.ndarray) -> list[int]:
    return [int(n) for n in column]


def _joined(c: Columns) -> dict[int, int]:
    """Every rank that takes part, and the lowest rank that transfers join it to, however far."""
    beside: dict[int, set[int]] = {}
    for src, dst in set(zip(_plain(c.src), _plain(c.dst), strict=True)):
        beside.setdefault(src, set()).add(dst)
        beside.setdefault(dst, set()).add(src)
    lowest: dict[int, int] = {}
    for start in sorted(beside):
        frontier = [start]
        while frontier:
            rank = frontier.pop()
            if rank not in lowest:
                lowest[rank] = start
                frontier.extend(beside[rank])
    return lowest


def _ring_colours(topology: Topology, ring_of: dict[int, int]) -> dict[int, Colour]:
    """A colour per rank, the same all along a ring, not the same for rings side by side."""
    beside: dict[int, set[int]] = {}
    for rank, ring in ring_of.items():
        near = (topology.rank(coord) for coord in topology.neighbours(topology.coords[rank]))
        beside.setdefault(ring, set()).update(ring_of[n] for n in near if n in ring_of)
    colours: dict[int, Colour] = {}
    for index, ring in enumerate(sorted(beside)):
        taken = {colours.get(other) for other in beside[ring]}
        free = [colour for colour in PALETTE if colour not in taken]
        colours[ring] = free[0] if free else PALETTE[index % len(PALETTE)]
    return {rank: colours[ring] for rank, ring in ring_of.items()}


Spot = tuple[int, int]
Way = tuple[int, int]

WIDEST = 24  # chips across, where layers stand side by side


def size(topology: Topology) -> tuple[int, int]:
    """Columns and rows of chips on the page, with the room between layers."""
    width, height, depth = _sides(topology.shape)
    across = _layers_across(topology)
    return across * (width + 1) - 1, ceil(depth / across) * (height + 1) - 1


def place(topology: Topology, coord: Coord) -> Spot:
    """Where a chip stands on the page: x across, y down."""
    x, y, z = (*coord, 0, 0)[:3]
    across, down = layers(topology)[z]
    return across + x, down + y


def layers(topology: Topology) -> list[Spot]:
    """Where the first chip of each layer stands; a mesh of one or two axes is one layer."""
    width, height, depth = _sides(topology.shape)
    across = _layers_across(topology)
    return [(z % across * (width + 1), z // across * (height + 1)) for z in range(depth)]


def heading(topology: Topology, a: Coord, b: Coord) -> Way:
    """The unit step on the page from chip `a` to its neighbour `b`, over the edge if that wraps."""
    for axis, last in enumerate(n - 1 for n in topology.shape):
        step = b[axis] - a[axis]
        if a[:axis] + a[axis + 1 :] == b[:axis] + b[axis + 1 :]:
            if topology.wrap[axis] and abs(step) == last > 1:
                step = -step // last
            if abs(step) == 1:
                return ((step, 0), (0, step), (step, -step))[axis]
    raise TopologyError(
        f"an arrow goes from chip to neighbouring chip, and {b} is not beside {a} on {topology}"
    )


def is_to_layer(way: Way) -> bool:
    """Whether a step leads to another layer."""
    return all(way)


def gaps(topology: Topology, a: Coord, b: Coord) -> Iterator[Spot]:
    """The places left of, or above, the room that a link within a layer takes on the page.

    One for chips that stand side by side; a link over the edge takes room at both edges.
    """
    dx, dy = heading(topology, a, b)
    ends = [place(topology, a), place(topology, b)]
    low, high = ends if dx + dy > 0 else reversed(ends)
    before = (high[0] - abs(dx), high[1] - abs(dy))
    yield low
    if low != before:
        yield before


def _sides(shape: Coord) -> tuple[int, int, int]:
    width, height, depth = (*shape, 1, 1)[:3]
    return width, height, depth


def _layers_across(topology: Topology) -> int:
    """As many as fit, but no more than fill the rows."""
    width, _, depth = _sides(topology.shape)
    most = max(1, WIDEST // (width + 1))
    return ceil(depth / ceil(depth / most))
