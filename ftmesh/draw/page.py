"""Page: where chips and links stand in a drawing, counted in chips across and down.

A mesh of one axis is a row. One of three is its layers along z, side by side with a chip's room
between them, in as many rows as it takes; a link to the next layer leads up and to the right.

>>> page = Topology.grid("4x4x8")
>>> size(page), place(page, (1, 2, 0)), place(page, (1, 2, 5))
((19, 9), (1, 2), (6, 7))
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from ftmesh.errors import TopologyError
from ftmesh.topology.notation import Coord
from ftmesh.topology.topology import Topology

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
