"""Panels as text, for terminals and for tests that read like pictures.

>>> from ftmesh.draw.panel import routes_panel
>>> from ftmesh.topology.routing import around_failures
>>> from ftmesh.topology.topology import Topology
>>> topo = Topology.from_drawing('''
... ....
... .XX.
... ....''')
>>> print(draw_text(routes_panel(topo, [around_failures(topo, (1, 0), (1, 2))], title="around")))
around
   0   1   2   3
0  o─⇠─o   o   o
   ⇣
1  o   X   X   o
   ⇣
2  o─→─o   o   o
o live   X failed   → arrives   ⇢ passes on
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise

from ftmesh.draw.panel import (
    Colour,
    Direction,
    Panel,
    Position,
    changes_layer,
    direction,
    gaps,
    layer_origins,
    position,
)
from ftmesh.topology.notation import Coord

Ink = tuple[str, Colour | None]
Traffic = dict[Position, tuple[bool, Colour]]

_ACROSS, _DOWN = 4, 2  # characters from chip to chip
_CHIPS = {"live": "o", "failed": "X", "off_ring": "y"}
_STOPS = {(-1, 0): "←", (1, 0): "→", (0, 1): "↓", (0, -1): "↑", (1, -1): "↗", (-1, 1): "↙"}
_PASSES = {(-1, 0): "⇠", (1, 0): "⇢", (0, 1): "⇣", (0, -1): "⇡", (1, -1): "⇗", (-1, 1): "⇙"}
_BOTH_STOP = {(1, 0): "↔", (0, 1): "↕"}
_MEANING = {
    "o": "live",
    "y": "off the rings",
    "X": "failed",
    "╳": "failed link",
    "→←↓↑↔↕": "arrives",
    "⇢⇠⇣⇡": "passes on",
    "↗⇗": "to the next layer",
    "↙⇙": "to the layer before",
}
_ANSI: dict[Colour, str] = {
    "blue": "34",
    "orange": "38;5;208",
    "green": "32",
    "purple": "35",
    "amber": "33",
    "red": "31",
}


def draw_text(panel: Panel, *, colour: bool = False) -> str:
    """Draw a panel as text, x across and y down.

    ``→`` points at the chip where a message stops, ``⇢`` at a chip that passes it on. If a link has
    both in one direction, only the stop is shown. `colour` adds terminal colour codes.
    """
    topology = panel.topology
    canvas = dict(_links(panel))
    for coord in topology.all_coords():
        x, y = position(topology, coord)
        canvas[x * _ACROSS, y * _DOWN] = (_CHIPS[panel.role(coord)], None)
    seen = {char for char, _ in canvas.values()}
    canvas.update(_rulers(panel, left=min(x for x, _ in canvas), top=min(y for _, y in canvas)))
    return "\n".join([panel.title, *_lines(canvas, colour), *_legend(panel, seen, colour)])


def _rulers(panel: Panel, *, left: int, top: int) -> dict[Position, Ink]:
    """The numbers of rows and columns, and of layers if there are several."""
    width, height = (*panel.topology.shape, 1)[:2]
    digits = len(str(height - 1))
    rulers: dict[Position, Ink] = {}
    for z, (across, down) in enumerate(layer_origins(panel.topology)):
        above = down * _DOWN - 2 if down else top - 2
        if len(panel.topology.shape) > 2:
            rulers |= _inks((across * _ACROSS, above), f"z={z}")
        for x in range(width if down == 0 else 0):
            rulers |= _inks(((across + x) * _ACROSS, top - 1), str(x))
        for y in range(height if across == 0 else 0):
            rulers |= _inks((left - digits - 2, (down + y) * _DOWN), f"{y:>{digits}}")
    return rulers


def _links(panel: Panel) -> Iterator[tuple[Position, Ink]]:
    """The characters between the chips."""
    traffic: dict[tuple[Position, bool], Traffic] = {}
    for arrow in panel.arrows:
        for a, b in pairwise(arrow.route):
            step = direction(panel.topology, a, b)
            stops = b == arrow.route[-1]
            if changes_layer(step):
                glyph = (_STOPS if stops else _PASSES)[step]
                yield _to_layer(panel, a, step), (glyph, arrow.colour)
                continue
            for gap in gaps(panel.topology, a, b):
                on_link = traffic.setdefault((gap, step[0] != 0), {})
                if stops or step not in on_link:
                    on_link[step] = (stops, arrow.colour)
    for ((x, y), across), on_link in traffic.items():
        glyphs = _glyphs(on_link)
        if across:
            line: list[Ink] = [("─", next(iter(on_link.values()))[1])] * 3
            if len(glyphs) == 1:
                line[1] = glyphs[0]
            else:
                line[0], line[2] = glyphs
            yield from (((x * _ACROSS + 1 + i, y * _DOWN), ink) for i, ink in enumerate(line))
        else:
            yield from (((x * _ACROSS + i, y * _DOWN + 1), ink) for i, ink in enumerate(glyphs))
    for a, b in sorted(panel.topology.failed_links):
        step = direction(panel.topology, a, b)
        if changes_layer(step):
            back = (-step[0], -step[1])
            yield from ((_to_layer(panel, *end), ("╳", None)) for end in ((a, step), (b, back)))
            continue
        for x, y in gaps(panel.topology, a, b):
            across = step[0] != 0
            yield (x * _ACROSS + 2 * across, y * _DOWN + (not across)), ("╳", None)


def _to_layer(panel: Panel, coord: Coord, step: Direction) -> Position:
    """The position of the sign for a link to another layer: below a chip, to the right."""
    x, y = position(panel.topology, coord)
    return x * _ACROSS + (2 if step[0] > 0 else 3), y * _DOWN + 1


def _glyphs(on_link: Traffic) -> list[Ink]:
    """One arrow for a link used in one direction, or by stops in both; else one for each."""
    if len(on_link) == 2 and all(stops for stops, _ in on_link.values()):
        step = next(step for step in on_link if sum(step) > 0)
        return [(_BOTH_STOP[step], on_link[step][1])]
    used = ((step, *on_link[step]) for step in _STOPS if step in on_link)
    return [((_STOPS if stops else _PASSES)[step], colour) for step, stops, colour in used]


def _inks(spot: Position, text: str) -> dict[Position, Ink]:
    return {(spot[0] + i, spot[1]): (char, None) for i, char in enumerate(text)}


def _lines(canvas: dict[Position, Ink], colour: bool) -> Iterator[str]:
    columns, rows = (range(min(line), max(line) + 1) for line in zip(*canvas, strict=True))
    for row in rows:
        inks = [canvas.get((column, row), (" ", None)) for column in columns]
        runs = groupby(inks, key=lambda ink: ink[1])
        text = (_painted("".join(c for c, _ in run), hue if colour else None) for hue, run in runs)
        yield "".join(text).rstrip()


def _legend(panel: Panel, seen: set[str], colour: bool) -> Iterator[str]:
    yield "   ".join(f"{key[0]} {text}" for key, text in _MEANING.items() if seen & set(key))
    if colour and panel.legend:
        yield "   ".join(_painted(text, hue) for hue, text in panel.legend)


def _painted(text: str, colour: Colour | None) -> str:
    return f"\033[{_ANSI[colour]}m{text}\033[0m" if colour else text
