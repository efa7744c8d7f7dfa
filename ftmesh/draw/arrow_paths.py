"""The paths of the arrows of a panel, as SVG path data.

An arrow to a neighbour keeps to the right of its link, or to the middle if it is alone there. An
arrow that passes chips leaves its link for a track next to them, so that passing and stopping look
different; arrows that would share a track get one each, the shorter ones nearer to the chips.

Chips are `PITCH` apart, the first at 0 0.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import count, pairwise
from math import dist

from ftmesh.draw.panel import Direction, Panel, changes_layer, direction, position
from ftmesh.topology.notation import Coord
from ftmesh.topology.routing import Route
from ftmesh.topology.topology import Link, Topology

Point = tuple[float, float]

PITCH = 52.0  # from chip to chip
HALF = 10.0  # side of a chip
HEAD = 8.0  # length of an arrowhead, by which its line is shortened
LAYER = 22.0  # across and up: length of a link to another layer, from the middle of a chip
_EDGE = HALF + 2.5  # from the middle of a chip to the ends of its arrows
_SIDE = 3.6  # from the middle of a link to an arrow that shares it
_DOOR = 6.5  # from the middle of a chip's edge to arrows on their way to a track
_TRACKS = (14.5, 18.0, 21.5, 25.0)  # from the middle of a link; four fit before the next link's
_RAMP = 11.0  # length along the link in which an arrow gets from door to track
_BEND = 8.0


def arrow_paths(panel: Panel) -> list[str]:
    """The SVG path data (``d``) of every arrow of `panel`, in order, without arrowheads."""
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
        *pieces, last = _pieces(panel.topology, routes[index], door=door, track=track)
        last[-1] = _towards(last[-1], last[-2], HEAD)  # shortened by the arrowhead
        paths[index] = "".join(map(_rounded, [*pieces, last]))
    return [paths[index] for index in range(len(routes))]


def number(value: float) -> str:
    """Format a coordinate to a tenth, without trailing zeros."""
    return f"{round(value, 1) + 0.0:g}"


def _pieces(topology: Topology, route: Route, *, door: float, track: float) -> list[list[Point]]:
    """The corners of the line from the first chip to the last, cut at edges and layers.

    It leaves and enters the chips at `door`, off the middle, and runs at `track`.
    """
    at = partial(_at, topology)
    directions = [direction(topology, a, b) for a, b in pairwise(route)]
    ramp = _EDGE + min(track - door, _RAMP)
    pieces = [[at(route[0], directions[0], _EDGE, door), at(route[0], directions[0], ramp, track)]]
    before = directions[0]
    for (a, b), step in zip(pairwise(route), directions, strict=True):
        if step != before:
            x, y = at(a, before, 0, track)
            pieces[-1].append((x - track * step[1], y + track * step[0]))
        x, y = position(topology, a)
        if changes_layer(step) or position(topology, b) != (x + step[0], y + step[1]):
            reach = LAYER if changes_layer(step) else PITCH / 2
            pieces[-1].append(at(a, step, reach, track))
            pieces.append([at(b, step, -reach, track)])
        before = step
    pieces[-1] += [at(route[-1], before, -ramp, track), at(route[-1], before, -_EDGE, door)]
    return [_without_kinks(list(dict.fromkeys(piece))) for piece in pieces]


def _without_kinks(points: list[Point]) -> list[Point]:
    """Drop the ends of ramps right before a turn, so that the ramp leads to the turn."""
    ramps = {1: 2, len(points) - 2: len(points) - 3}
    return [
        point
        for i, point in enumerate(points)
        if i not in ramps or len(points) < 4 or dist(point, points[ramps[i]]) > _BEND
    ]


def _at(topology: Topology, coord: Coord, step: Direction, along: float, right: float) -> Point:
    """The point `along` a step from the chip, and to the `right` of it."""
    x, y = position(topology, coord)
    dx, dy = step
    return (x * PITCH + along * dx - right * dy, y * PITCH + along * dy + right * dx)


def _towards(start: Point, goal: Point, distance: float) -> Point:
    share = distance / dist(start, goal)
    return (start[0] + share * (goal[0] - start[0]), start[1] + share * (goal[1] - start[1]))


def _rounded(points: list[Point]) -> str:
    """The path through `points`, with rounded corners."""
    path = ["M", _pair(points[0])]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        bend = min(_BEND, dist(before, corner) / 2, dist(corner, after) / 2)
        path += ["L", _pair(_towards(corner, before, bend)), "Q", _pair(corner), " "]
        path += [_pair(_towards(corner, after, bend))]
    return "".join([*path, "L", _pair(points[-1])])


def _pair(point: Point) -> str:
    return f"{number(point[0])} {number(point[1])}"
