"""Panels as text, for a terminal and for tests that read like pictures.

>>> from ftmesh.draw.picture import routes_panel
>>> topo = Topology.from_drawing('''
... ....
... .XX.
... ....''')
>>> print(draw_text(routes_panel(topo, [around(topo, (1, 0), (1, 2))], title="around")))
around
   0   1   2   3
0  o─⇠─o   o   o
   ⇣
1  o   X   X   o
   ⇣
2  o─→─o   o   o
o live  X failed  → arrives  ⇢ passes on
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ftmesh.draw.picture import Colour, Panel, heading, place
from ftmesh.routing import around
from ftmesh.topology import Topology

Spot = tuple[int, int]
Ink = tuple[str, Colour | None]

_ACROSS, _DOWN = 4, 2  # characters from chip to chip
_CHIPS = {"live": "o", "failed": "X", "off_ring": "y"}
_ARRIVES = {(1, 0): "→", (-1, 0): "←", (0, 1): "↓", (0, -1): "↑"}
_PASSES = {(1, 0): "⇢", (-1, 0): "⇠", (0, 1): "⇣", (0, -1): "⇡"}
_BOTH = {(1, 0): "↔", (0, 1): "↕"}
_ANSI = {
    "blue": "34",
    "orange": "38;5;208",
    "green": "32",
    "purple": "35",
    "amber": "33",
    "red": "31",
}


def draw_text(panel: Panel, *, colour: bool = False) -> str:
    """The panel in characters: x across, y down, ``→`` into the chip where a message stops.

    On the way there it is ``⇢``: the chip it points at passes the message on. Where a link has both
    in one direction, only the stop is shown. `colour` adds the ANSI codes of a terminal.
    """
    canvas = dict(_links(panel))
    topology = panel.topology
    width, height = (*topology.shape, 1)[:2]
    for y in range(height):
        for x in range(width):
            coord = (x, y)[: len(topology.shape)]
            canvas[x * _ACROSS, y * _DOWN] = (_CHIPS[panel.role(coord)], None)
    seen = {char for char, _ in canvas.values()}
    left = min(column for column, _ in canvas) - len(str(height - 1)) - 2
    top = min(row for _, row in canvas) - 1
    for y in range(height):
        _write(canvas, (left, y * _DOWN), f"{y:>{len(str(height - 1))}}")
    for x in range(width):
        _write(canvas, (x * _ACROSS, top), str(x))
    return "\n".join([panel.title, *_lines(canvas, colour), _legend(panel, seen, colour)])


def _links(panel: Panel) -> Iterator[tuple[Spot, Ink]]:
    """The characters between chips."""
    traffic: dict[tuple[Spot, Spot], dict[Spot, tuple[bool, Colour]]] = {}
    for arrow in panel.arrows:
        hops = list(pairwise(arrow.route))
        for index, (a, b) in enumerate(hops):
            way = heading(panel.topology, a, b)
            low, high = (place(a), place(b)) if sum(way) > 0 else (place(b), place(a))
            on_link = traffic.setdefault((low, high), {})
            stops = index == len(hops) - 1
            if stops or way not in on_link:
                on_link[way] = (stops, arrow.colour)
    for (low, high), on_link in traffic.items():
        along = tuple(map(abs, next(iter(on_link))))
        starts = [low] if high == (low[0] + along[0], low[1] + along[1]) else [low, _before(high, along)]
        for start in starts:
            draw = _across if along == (1, 0) else _down
            yield from draw(start, on_link)
    for a, b in sorted(panel.topology.failed_links):
        (ax, ay), (bx, by) = place(a), place(b)
        yield ((ax + bx) * _ACROSS // 2, (ay + by) * _DOWN // 2), ("╳", None)
