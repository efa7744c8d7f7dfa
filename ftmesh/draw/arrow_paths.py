"""Where the arrows of a panel run: paths between and beside chips, in SVG's words.

An arrow to a neighbour keeps to the right of its link, or to the middle where it is alone. An arrow
that passes chips leaves its link for a track beside them, so that passing looks unlike stopping;
those that would share a track get one each, the shorter ones nearer to the chips.

Chips stand `PITCH` apart, the first at 0 0.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import count, pairwise
from math import dist

from ftmesh.draw.panel import Panel, Way, heading, is_to_layer, place
from ftmesh.topology.notation import Coord
from ftmesh.topology.routing import Route
from ftmesh.topology.topology import Link, Topology

Point = tuple[float, float]

PITCH = 52.0  # from chip to chip
HALF = 10.0  # of a chip
HEAD = 8.0  # of an arrow: its line ends that much early
LAYER = 22.0  # across and up, from the middle of a chip, that a link to another layer is drawn
_EDGE = HALF + 2.5  # from the middle of a chip to the ends of its arrows
_SIDE = 3.6  # from the middle of a link to an arrow that shares it
_DOOR = 6.5  # from the middle of a chip's edge to arrows on their way to a track
_TRACKS = (14.5, 18.0, 21.5, 25.0)  # from the middle of a link; four fit before the next link's
_RAMP = 11.0  # the way along the link that an arrow may take from door to track
_BEND = 8.0


def arrow_paths(panel: Panel) -> list[str]:
    """The path of every arrow of `panel`, in order: the ``d`` of an SVG path without its head."""
    routes = [arrow.route for arrow in panel.arrows]
    users = Counter(frozenset(link) for route in routes for link in pairwise(route))
    taken: set[tuple[Link, int, bool]] = set()
    paths = {}
    for index in sorted(range(len(routes)), key=lambda index: len(routes[index])):
        links = list(pairwise(routes[index]))
        passes = len(links) > 1
        slot = next(s for s in count() if not any((link, s, passes) in taken for link in links))
        taken.update((link, slot, passes) for link in links)
        if passes:
            door, track = _DOOR, _TRACKS[slot % len(_TRACKS)]
        else:
            alone = users[frozenset(links[0])] == 1
            door = track = 0.0 if alone else _SIDE * (slot + 1)
        pieces = _pieces(panel.topology, routes[index], door=door, track=track)
        paths[index] = "".join(map(_rounded, [*pieces[:-1], _shortened(pieces[-1])]))
    return [paths[index] for index in range(len(routes))]


def number(value: float) -> str:
    """A coordinate, to a tenth, as short as it can be written."""
    return f"{round(value, 1) + 0.0:g}"


def _pieces(topology: Topology, route: Route, *, door: float, track: float) -> list[list[Point]]:
    """The corners of the line from edge to edge of the first and last chip.

    It leaves and enters them at `door`, off the middle, and runs at `track`; where it goes over the
    edge of the mesh, or to another layer, it is cut.
    """
    at = partial(_at, topology)
    ways = [heading(topology, a, b) for a, b in pairwise(route)]
    ramp = _EDGE + min(track - door, _RAMP)
    pieces = [[at(route[0], ways[0], _EDGE, door), at(route[0], ways[0], ramp, track)]]
    before = ways[0]
    for (a, b), way in zip(pairwise(route), ways, strict=True):
        if way != before:
            x, y = at(a, before, 0, track)
            pieces[-1].append((x - track * way[1], y + track * way[0]))
        x, y = place(topology, a)
        if is_to_layer(way) or place(topology, b) != (x + way[0], y + way[1]):
            reach = LAYER if is_to_layer(way) else PITCH / 2
            pieces[-1].append(at(a, way, reach, track))
            pieces.append([at(b, way, -reach, track)])
        before = way
    pieces[-1] += [at(route[-1], before, -ramp, track), at(route[-1], before, -_EDGE, door)]
    return [_without_kinks(list(dict.fromkeys(piece))) for piece in pieces]


def _without_kinks(points: list[Point]) -> list[Point]:
    """The corners without ramps that end right before a turn: there the slant leads to the turn."""
    ramps = {1: 2, len(points) - 2: len(points) - 3}
    return [
        point
        for i, point in enumerate(points)
        if i not in ramps or len(points) < 4 or dist(point, points[ramps[i]]) > _BEND
    ]


def _at(topology: Topology, coord: Coord, way: Way, along: float, right: float) -> Point:
    """The point `along` the way from the chip, and to the `right` of it."""
    x, y = place(topology, coord)
    dx, dy = way
    return (x * PITCH + along * dx - right * dy, y * PITCH + along * dy + right * dx)


def _shortened(points: list[Point]) -> list[Point]:
    """The line without the room for its head."""
    *rest, before, tip = points
    return [*rest, before, _towards(tip, before, HEAD)]


def _towards(start: Point, goal: Point, distance: float) -> Point:
    share = distance / dist(start, goal)
    return (start[0] + share * (goal[0] - start[0]), start[1] + share * (goal[1] - start[1]))


def _rounded(points: list[Point]) -> str:
    """The line through `points`, its corners bent."""
    path = ["M", _pair(points[0])]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        bend = min(_BEND, dist(before, corner) / 2, dist(corner, after) / 2)
        path += ["L", _pair(_towards(corner, before, bend)), "Q", _pair(corner), " "]
        path += [_pair(_towards(corner, after, bend))]
    return "".join([*path, "L", _pair(points[-1])])


def _pair(point: Point) -> str:
    return f"{number(point[0])} {number(point[1])}"
