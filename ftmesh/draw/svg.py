"""Panels as one self-contained SVG page: no script, no font, nothing to download.

The page is white, so that it is readable on light and dark backgrounds. The same panels give the
same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, pairwise
from math import ceil, dist
from xml.sax.saxutils import escape

from ftmesh.draw.panel import (
    Colour,
    Direction,
    Panel,
    Role,
    changes_layer,
    direction,
    layer_origins,
    page_size,
    position,
)
from ftmesh.errors import ScheduleError
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
_HEX: dict[Colour, str] = {
    "blue": "#0b6bb8",
    "orange": "#d5600a",
    "green": "#07875f",
    "purple": "#94489a",
    "amber": "#cf8a00",
    "red": "#cf2f3a",
}
_CHIPS: dict[Role, tuple[str, str, str]] = {  # meaning, fill, stroke
    "live": ("live chip", "#e3eef8", "#5b87ad"),
    "off_ring": ("live, off the rings", "#ffdf5e", "#b58900"),
    "failed": ("failed", "#d8323c", "#a81f29"),
}
_INK, _SOFT, _LINE, _FAILED = "#24292f", "#848d97", "#d3dae1", "#d8323c"
_MARGIN, _BETWEEN, _PANELS_ACROSS = 30.0, 36.0, 4
_LEGEND_LINE, _LEGEND_GAP = 28.0, 26.0


def draw_svg(panels: Sequence[Panel], *, title: str | None = None) -> str:
    """Draw panels in rows of up to four, with a legend.

    The part of a panel's title after a colon gets its own line. The `title` of the page is for
    screen readers; by default it is the titles of the panels.
    """
    if not panels:
        raise ScheduleError("an SVG page needs at least one panel")
    rows = ceil(len(panels) / _PANELS_ACROSS)
    across = ceil(len(panels) / rows)
    wide = max(map(_width, panels))
    high = max(map(_height, panels))
    room = across * (wide + _BETWEEN) - _BETWEEN
    legend = _legend(panels, room)
    width = room + 2 * _MARGIN
    bottom = _MARGIN + rows * (high + _BETWEEN) - _BETWEEN
    height = bottom + (_MARGIN + _LEGEND_LINE * len(legend) if legend else _MARGIN / 2)
    name = "; ".join(panel.title for panel in panels) if title is None else title
    used = sorted({arrow.colour for panel in panels for arrow in panel.arrows})
    page = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(width)}" height="{_n(height)}" '
        f'viewBox="0 0 {_n(width)} {_n(height)}" role="img" '
        'font-family="Helvetica, Arial, sans-serif">',
        f"<title>{escape(name)}</title>",
        f"<defs>{''.join(map(_marker, used))}</defs>",
        f'<rect x=".5" y=".5" width="{_n(width - 1)}" height="{_n(height - 1)}" rx="12" '
        f'fill="#fff" stroke="{_LINE}"/>',
    ]
    for index, panel in enumerate(panels):
        row, column = divmod(index, across)
        x, y = _MARGIN + column * (wide + _BETWEEN), _MARGIN + row * (high + _BETWEEN)
        page += [_group("panel", x, y), *_panel(panel, wide), "</g>"]
    for line, (parts, line_width) in enumerate(legend):
        x, y = (width - line_width) / 2, bottom + _MARGIN + _LEGEND_LINE * line
        page += [_group("legend", x, y), *parts, "</g>"]
    return "\n".join([*page, "</svg>", ""])


# A panel ------------------------------------------------------------------------------------


def _width(panel: Panel) -> float:
    titles = (_text_width(text, 15) for text in panel.title.split(": ", 1))
    return max(page_size(panel.topology)[0] * PITCH + 16, *titles)


def _height(panel: Panel) -> float:
    return page_size(panel.topology)[1] * PITCH + 26 + 20 * len(panel.title.split(": ", 1))


def _panel(panel: Panel, wide: float) -> Iterator[str]:
    """Title, rulers, links, arrows and chips, centred in a width of `wide`."""
    columns, rows = page_size(panel.topology)
    top = _height(panel) - rows * PITCH
    styles = (f'font-size="15" font-weight="600" fill="{_INK}"', f'font-size="13" fill="{_SOFT}"')
    for line, (text, style) in enumerate(zip(panel.title.split(": ", 1), styles, strict=False)):
        yield f'<text x="{_n(wide / 2)}" y="{_n(6 + 20 * line)}" text-anchor="middle" {style}>'
        yield f"{escape(text)}</text>"
    left = (wide - columns * PITCH) / 2
    yield f'<g transform="translate({_n(left + PITCH / 2 + 6)} {_n(top + PITCH / 2)})">'
    yield f'<g font-size="10" fill="{_SOFT}" text-anchor="middle">'
    yield from _rulers(panel.topology)
    yield "</g>"
    yield from _links(panel)
    yield from _arrows(panel)
    yield from _chips(panel)
    yield "</g>"


def _rulers(topology: Topology) -> Iterator[str]:
    """The numbers of columns and rows, and of layers if there are several."""
    width, height = (*topology.shape, 1)[:2]
    for z, (across, down) in enumerate(layer_origins(topology)):
        left, top = across * PITCH, down * PITCH
        places = ((x, left + x * PITCH) for x in range(width))
        yield "".join(f'<text x="{_n(at)}" y="{_n(top - 34)}">{x}</text>' for x, at in places)
        if across == 0:
            places = ((y, top + y * PITCH) for y in range(height))
            yield "".join(f'<text x="-36" y="{_n(at + 3.5)}">{y}</text>' for y, at in places)
        if len(topology.shape) > 2:
            middle = left + (width - 1) * PITCH / 2
            yield f'<text class="layer" x="{_n(middle)}" y="{_n(top - 48)}">z = {z}</text>'


def _links(panel: Panel) -> Iterator[str]:
    """Thin lines for live links, dashed red ones for failed links."""
    topology = panel.topology
    live = [(a, b) for a, b in topology.links if direction(topology, a, b) > (0, 0)]
    failed = sorted(topology.failed_links)
    for links, style in ((live, _LINE), (failed, f'{_FAILED}" stroke-dasharray="4 3')):
        spans = "".join(_span(topology, *link) for link in links)
        if spans:
            yield f'<path class="links" d="{spans}" fill="none" stroke="{style}"/>'


def _span(topology: Topology, a: Coord, b: Coord) -> str:
    """The link from chip to chip, or half of it at each end if it leaves the edge or the layer."""
    dx, dy = direction(topology, a, b)
    (ax, ay), (bx, by) = position(topology, a), position(topology, b)
    if changes_layer((dx, dy)):
        there, back = (f"l{_n(step * dx)} {_n(step * dy)}" for step in (LAYER, -LAYER))
        return f"M{_n(ax * PITCH)} {_n(ay * PITCH)}{there}M{_n(bx * PITCH)} {_n(by * PITCH)}{back}"
    line, length = "h" if dx else "v", (dx + dy) * PITCH
    start, end = (f"M{_n(x * PITCH)} {_n(y * PITCH)}" for x, y in ((ax, ay), (bx, by)))
    if (bx, by) == (ax + dx, ay + dy):
        return f"{start}{line}{_n(length)}"
    return f"{start}{line}{_n(length / 2)}{end}{line}{_n(-length / 2)}"


def _arrows(panel: Panel) -> Iterator[str]:
    paths = arrow_paths(panel)
    for colour in dict.fromkeys(arrow.colour for arrow in panel.arrows):
        yield f'<g class="arrows" {_stroke(colour)}>'
        for arrow, path in zip(panel.arrows, paths, strict=True):
            if arrow.colour == colour:
                yield f'<path d="{path}"/>'
        yield "</g>"


def _chips(panel: Panel) -> Iterator[str]:
    topology = panel.topology
    coords = list(topology.all_coords())
    for role in _CHIPS:
        chips = [position(topology, coord) for coord in coords if panel.role(coord) == role]
        if chips:
            yield f'<g class="{role}" {_fill(role)}>'
            yield from (_chip(role, x * PITCH, y * PITCH) for x, y in chips)
            yield "</g>"


# Parts --------------------------------------------------------------------------------------


def _chip(role: Role, x: float, y: float) -> str:
    side = _n(2 * HALF)
    box = f'<rect x="{_n(x - HALF)}" y="{_n(y - HALF)}" width="{side}" height="{side}" rx="5"/>'
    if role != "failed":
        return box
    return (
        f'{box}<path d="M{_n(x - 4)} {_n(y - 4)}l8 8m0-8l-8 8" stroke="#fff" stroke-width="2.2"/>'
    )


def _fill(role: Role) -> str:
    _, fill, stroke = _CHIPS[role]
    return f'fill="{fill}" stroke="{stroke}" stroke-width="1.4" stroke-linecap="round"'


def _stroke(colour: Colour) -> str:
    return f'fill="none" stroke="{_HEX[colour]}" stroke-width="2" marker-end="url(#head-{colour})"'


def _marker(colour: Colour) -> str:
    return (
        f'<marker id="head-{colour}" viewBox="0 0 8 8" refX=".6" refY="4" markerWidth="{_n(HEAD)}" '
        f'markerHeight="{_n(HEAD)}" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path d="M0 .4L8 4L0 7.6z" fill="{_HEX[colour]}"/></marker>'
    )


def _group(name: str, x: float, y: float) -> str:
    return f'<g class="{name}" transform="translate({_n(x)} {_n(y)})">'


def _legend(panels: Sequence[Panel], room: float) -> list[tuple[list[str], float]]:
    """Lines of the legend with their widths, at most `room` wide if possible."""
    lines: list[tuple[list[str], float]] = []
    for icon, icon_width, meaning in _entries(panels):
        entry_width = icon_width + 8 + _text_width(meaning, 13)
        if not lines or lines[-1][1] + _LEGEND_GAP + entry_width > room:
            lines.append(([], -_LEGEND_GAP))
        parts, x = lines[-1][0], lines[-1][1] + _LEGEND_GAP
        label = f'<text x="{_n(icon_width + 8)}" y="4.5" font-size="13" fill="{_INK}">'
        parts.append(f"{_group('entry', x, 0)}{icon}{label}{escape(meaning)}</text></g>")
        lines[-1] = (parts, x + entry_width)
    return lines


def _entries(panels: Sequence[Panel]) -> Iterator[tuple[str, float, str]]:
    """Icon, its width and its meaning, for each thing that needs an explanation."""
    roles: set[Role] = {panel.role(coord) for panel in panels for coord in panel.off_ring}
    roles |= {"failed" for panel in panels if panel.topology.failed}
    if roles:
        for role in _CHIPS:
            if role == "live" or role in roles:
                yield f"<g {_fill(role)}>{_chip(role, HALF, 0)}</g>", 2 * HALF, _CHIPS[role][0]
    if any(panel.topology.failed_links for panel in panels):
        dashed = f'stroke="{_FAILED}" stroke-dasharray="4 3"'
        yield f'<path d="M0 0h26" {dashed}/>', 26.0, "failed link"
    if any(len(panel.topology.shape) > 2 for panel in panels):
        yield f'<path d="M0 8L16-8" stroke="{_SOFT}"/>', 16.0, "up to the next layer"
    used = {arrow.colour for panel in panels for arrow in panel.arrows}
    for colour, meaning in dict.fromkeys(entry for panel in panels for entry in panel.legend):
        if colour in used:
            yield f'<path d="M0 0h{_n(26 - HEAD)}" {_stroke(colour)}/>', 26.0, meaning


def _text_width(text: str, font_size: float) -> float:
    """Estimate the width of `text` in a sans-serif font, from narrow and wide letters."""
    return font_size * sum(0.33 if char in "fijlrt ,.:;'()-" else 0.61 for char in text)


# The paths of arrows ----------------------------------------------------------------------------
#
# An arrow to a neighbour keeps to the right of its link, or to the middle if it is alone there. An
# arrow that passes chips leaves its link for a track next to them, so that passing and stopping
# look different; arrows that would share a track get one each, the shorter ones nearer to the
# chips. Chips are `PITCH` apart, the first at 0 0.


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


def _n(value: float) -> str:
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
    return f"{_n(point[0])} {_n(point[1])}"
