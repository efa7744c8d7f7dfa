"""Damage: what was said to have failed, as chips and links of a grid.

People name chips as their devices do. A slice's devices need not count from zero, and have axes of
size 1 that its grid drops; a `CoordFrame` knows both ways of counting.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ftmesh.errors import TopologyError, TopologyWarning
from ftmesh.topology.notation import (
    Block,
    Coord,
    Failed,
    Link,
    format_coord,
    format_shape,
    parse_blocks,
)

FAILED_VARIABLE = "FTMESH_FAILED"


@dataclass(frozen=True)
class CoordFrame:
    """How people write the coords of a grid: as its devices count.

    The lowest device is at `low`, and of the devices' axes the grid has `kept`. Coords may be
    written with all of those axes or with the kept ones alone.

    >>> frame = CoordFrame((4, 4), low=(4, 2, 0), kept=(0, 1))
    >>> frame.locate((5, 2)), frame.locate((5, 2, 0)), frame.locate((3, 2))
    ((1, 0), (1, 0), None)
    """

    shape: Coord
    low: Coord
    kept: tuple[int, ...]

    @classmethod
    def for_grid(cls, shape: Coord) -> CoordFrame:
        """The frame of a grid whose coords are written as it counts them."""
        return cls(shape, (0,) * len(shape), tuple(range(len(shape))))

    def locate(self, coord: Coord) -> Coord | None:
        """The place on the grid of the chip written as `coord`; None where it lies outside."""
        low, high = self.corners(len(coord))
        if not all(a <= c <= b for a, c, b in zip(low, coord, high, strict=True)):
            return None
        moved = {
            axis: c - self.low[axis] for axis, c in zip(self._axes(len(coord)), coord, strict=True)
        }
        return tuple(moved[axis] for axis in self.kept)

    def fits(self, num_axes: int) -> bool:
        """Whether coords may be written with so many axes."""
        return num_axes == len(self.kept) or max(self.kept) < num_axes <= len(self.low)

    def corners(self, num_axes: int) -> tuple[Coord, Coord]:
        """The lowest and the highest chip, written with so many axes."""
        size = dict(zip(self.kept, self.shape, strict=True))
        axes = self._axes(num_axes)
        low = tuple(self.low[axis] for axis in axes)
        return low, tuple(self.low[axis] + size.get(axis, 1) - 1 for axis in axes)

    def _axes(self, num_axes: int) -> tuple[int, ...]:
        return self.kept if num_axes == len(self.kept) else tuple(range(num_axes))


def failed_chips(failed: Failed, frame: CoordFrame) -> frozenset[Coord]:
    """The chips of the grid that blocks (``"2x2@2,2;4x2@6,14"``) or a list of coords name.

    ``None`` reads the environment variable ``FTMESH_FAILED``; an empty string means no failures.
    The variable speaks of this machine, and the grid may be another: what it names outside the
    grid is left out, with a warning. What is given must not go beyond the highest chip; chips below
    the lowest have no devices, hence are out of use as it is.
    """
    if failed is None:
        return _from_environment(frame)
    blocks = parse_blocks(failed)
    for block in blocks:
        _check(f"block {block}", block.corner, block.top, frame=frame)
    return _places(filter(None, (_inside(block, frame) for block in blocks)), frame)


def failed_links(links: Iterable[Link], frame: CoordFrame) -> frozenset[Link]:
    """The links of the grid among `links`, by the same rule as `failed_chips`."""
    found = set()
    for a, b in links:
        _check(f"failed link {format_coord(a)}-{format_coord(b)}", a, b, frame=frame)
        here, there = frame.locate(a), frame.locate(b)
        if here is not None and there is not None:
            found.add((here, there))
    return frozenset(found)


def _from_environment(frame: CoordFrame) -> frozenset[Coord]:
    try:
        blocks = parse_blocks(os.environ.get(FAILED_VARIABLE, ""))
    except TopologyError as error:
        raise TopologyError(f"the environment variable {FAILED_VARIABLE}: {error}") from None
    parts: list[Block] = []
    outside: list[Block] = []
    for block in blocks:
        inside = _inside(block, frame) if frame.fits(len(block.corner)) else None
        parts += [] if inside is None else [inside]
        outside += [block] if inside is None else _outside(block, inside)
    found = _places(parts, frame)
    elsewhere = (
        "where the mesh is not this machine's, say what has failed there, or failed='' for none"
    )
    if len(found) == math.prod(frame.shape):
        raise TopologyError(
            f"the environment variable {FAILED_VARIABLE} names every chip of mesh "
            f"{_span(frame, len(frame.kept))}: {elsewhere}"
        )
    if outside:
        named = ";".join(map(str, outside))
        warnings.warn(
            f"the environment variable {FAILED_VARIABLE} names {named}, which is not on mesh "
            f"{_span(frame, len(frame.kept))}: left out; {elsewhere}",
            TopologyWarning,
            stacklevel=4,
        )
    return found


def _places(blocks: Iterable[Block], frame: CoordFrame) -> frozenset[Coord]:
    """Where the chips of blocks are that lie on the grid."""
    found: set[Coord] = set()
    for block in blocks:
        num_axes = len(block.corner)
        low, axes = frame.corners(num_axes)[0], frame._axes(num_axes)
        kept = [axes.index(axis) for axis in frame.kept]
        found.update(tuple(coord[at] - low[at] for at in kept) for coord in block.coords())
    return frozenset(found)


def _inside(block: Block, frame: CoordFrame) -> Block | None:
    """What of a block is on the grid."""
    low, high = frame.corners(len(block.corner))
    return _between(tuple(map(max, block.corner, low)), tuple(map(min, block.top, high)))


def _outside(block: Block, inside: Block) -> Iterator[Block]:
    """What is left of a block when one inside it is taken out."""
    low, high = block.corner, block.top
    for axis, (first, last) in enumerate(zip(inside.corner, inside.top, strict=True)):
        below = _between(low, _moved(high, axis, first - 1))
        above = _between(_moved(low, axis, last + 1), high)
        yield from filter(None, (below, above))
        low, high = _moved(low, axis, first), _moved(high, axis, last)


def _between(low: Coord, high: Coord) -> Block | None:
    size = tuple(b - a + 1 for a, b in zip(low, high, strict=True))
    return Block(size, low) if min(size) > 0 else None


def _moved(coord: Coord, axis: int, to: int) -> Coord:
    return *coord[:axis], to, *coord[axis + 1 :]


def _check(name: str, *ends: Coord, frame: CoordFrame) -> None:
    """Refuse what goes below zero or beyond the highest chip: it can only be a mistake."""
    num_axes = len(ends[0])
    if not frame.fits(num_axes) or any(len(end) != num_axes for end in ends):
        raise TopologyError(
            f"{name} does not have the {len(frame.kept)} axes of mesh {format_shape(frame.shape)}"
        )
    _, high = frame.corners(num_axes)
    for end in ends:
        if not all(0 <= c <= limit for c, limit in zip(end, high, strict=True)):
            raise TopologyError(f"{name} is not inside mesh {_span(frame, num_axes)}")


def _span(frame: CoordFrame, num_axes: int) -> str:
    low, high = map(format_coord, frame.corners(num_axes))
    return f"{format_shape(frame.shape)}, whose chips are {low} to {high}"
