"""Panels as one self-contained SVG page: no script, no font, nothing to download.

The page is white, so that it is readable on light and dark backgrounds. The same panels give the
same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from xml.sax.saxutils import escape

from ftmesh.draw.arrow_paths import HALF, HEAD, LAYER, PITCH, arrow_paths
from ftmesh.draw.arrow_paths import number as n
from ftmesh.draw.panel import (
    Colour,
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
from ftmesh.topology.topology import Topology

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
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{n(width)}" height="{n(height)}" '
        f'viewBox="0 0 {n(width)} {n(height)}" role="img" '
        'font-family="Helvetica, Arial, sans-serif">',
        f"<title>{escape(name)}</title>",
        f"<defs>{''.join(map(_marker, used))}</defs>",
        f'<rect x=".5" y=".5" width="{n(width - 1)}" height="{n(height - 1)}" rx="12" fill="#fff" '
        f'stroke="{_LINE}"/>',
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
        yield f'<text x="{n(wide / 2)}" y="{n(6 + 20 * line)}" text-anchor="middle" {style}>'
        yield f"{escape(text)}</text>"
    left = (wide - columns * PITCH) / 2
    yield f'<g transform="translate({n(left + PITCH / 2 + 6)} {n(top + PITCH / 2)})">'
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
        yield "".join(f'<text x="{n(at)}" y="{n(top - 34)}">{x}</text>' for x, at in places)
        if across == 0:
            places = ((y, top + y * PITCH) for y in range(height))
            yield "".join(f'<text x="-36" y="{n(at + 3.5)}">{y}</text>' for y, at in places)
        if len(topology.shape) > 2:
            middle = left + (width - 1) * PITCH / 2
            yield f'<text class="layer" x="{n(middle)}" y="{n(top - 48)}">z = {z}</text>'


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
        there, back = (f"l{n(step * dx)} {n(step * dy)}" for step in (LAYER, -LAYER))
        return f"M{n(ax * PITCH)} {n(ay * PITCH)}{there}M{n(bx * PITCH)} {n(by * PITCH)}{back}"
    line, length = "h" if dx else "v", (dx + dy) * PITCH
    start, end = (f"M{n(x * PITCH)} {n(y * PITCH)}" for x, y in ((ax, ay), (bx, by)))
    if (bx, by) == (ax + dx, ay + dy):
        return f"{start}{line}{n(length)}"
    return f"{start}{line}{n(length / 2)}{end}{line}{n(-length / 2)}"


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
    side = n(2 * HALF)
    box = f'<rect x="{n(x - HALF)}" y="{n(y - HALF)}" width="{side}" height="{side}" rx="5"/>'
    if role != "failed":
        return box
    return f'{box}<path d="M{n(x - 4)} {n(y - 4)}l8 8m0-8l-8 8" stroke="#fff" stroke-width="2.2"/>'


def _fill(role: Role) -> str:
    _, fill, stroke = _CHIPS[role]
    return f'fill="{fill}" stroke="{stroke}" stroke-width="1.4" stroke-linecap="round"'


def _stroke(colour: Colour) -> str:
    return f'fill="none" stroke="{_HEX[colour]}" stroke-width="2" marker-end="url(#head-{colour})"'


def _marker(colour: Colour) -> str:
    return (
        f'<marker id="head-{colour}" viewBox="0 0 8 8" refX=".6" refY="4" markerWidth="{n(HEAD)}" '
        f'markerHeight="{n(HEAD)}" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path d="M0 .4L8 4L0 7.6z" fill="{_HEX[colour]}"/></marker>'
    )


def _group(name: str, x: float, y: float) -> str:
    return f'<g class="{name}" transform="translate({n(x)} {n(y)})">'


def _legend(panels: Sequence[Panel], room: float) -> list[tuple[list[str], float]]:
    """Lines of the legend with their widths, at most `room` wide if possible."""
    lines: list[tuple[list[str], float]] = []
    for icon, icon_width, meaning in _entries(panels):
        entry_width = icon_width + 8 + _text_width(meaning, 13)
        if not lines or lines[-1][1] + _LEGEND_GAP + entry_width > room:
            lines.append(([], -_LEGEND_GAP))
        parts, x = lines[-1][0], lines[-1][1] + _LEGEND_GAP
        label = f'<text x="{n(icon_width + 8)}" y="4.5" font-size="13" fill="{_INK}">'
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
            yield f'<path d="M0 0h{n(26 - HEAD)}" {_stroke(colour)}/>', 26.0, meaning


def _text_width(text: str, font_size: float) -> float:
    """Estimate the width of `text` in a sans-serif font, from narrow and wide letters."""
    return font_size * sum(0.33 if char in "fijlrt ,.:;'()-" else 0.61 for char in text)
