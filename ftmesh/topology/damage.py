"""The damage of a grid: which chips and links a user says have failed, and the parts that are left.

Users name chips by the coords of their devices, which need not start at zero and may have axes of
size 1 that the grid drops. `CoordFrame` converts them. What is left has connected components,
blocks that stay connected without any one chip, and a largest box.
"""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ftmesh.errors import TopologyError, TopologyWarning
from ftmesh.topology import notation
from ftmesh.topology.notation import Block, Coord, Failed, Link, format_shape

FAILED_VARIABLE = "FTMESH_FAILED"


@dataclass(frozen=True)
class CoordFrame:
    """Maps the coords of devices, with all axes or only those the grid keeps, to grid coords.

    >>> frame = CoordFrame((4, 4), low=(4, 2, 0), kept=(0, 1))
    >>> frame.locate((5, 2)), frame.locate((5, 2, 0)), frame.locate((3, 2))
    ((1, 0), (1, 0), None)
    """

    shape: Coord
    low: Coord  # device coords of the grid's lowest chip
    kept: tuple[int, ...]  # the device axes that the grid keeps

    @classmethod
    def for_grid(cls, shape: str | Sequence[int]) -> CoordFrame:
        sizes = notation.parse_shape(shape)
        return cls(sizes, (0,) * len(sizes), tuple(range(len(sizes))))

    @classmethod
    def for_slice(cls, shape: Coord, low: Coord | None = None) -> CoordFrame:
        """Return the frame of a box of device coords; the grid drops its axes of size 1."""
        kept = tuple(axis for axis, size in enumerate(shape) if size > 1) or (0,)
        return cls(tuple(shape[axis] for axis in kept), low or (0,) * len(shape), kept)

    def locate(self, coord: Coord) -> Coord | None:
        """Return the grid coord of device coord `coord`, or None if it is outside the grid."""
        low, high = self.corners(len(coord))
        if not all(a <= c <= b for a, c, b in zip(low, coord, high, strict=True)):
            return None
        axes = self.axes(len(coord))
        return tuple(coord[axes.index(axis)] - self.low[axis] for axis in self.kept)

    def accepts(self, num_axes: int) -> bool:
        return num_axes == len(self.kept) or max(self.kept) < num_axes <= len(self.low)

    def corners(self, num_axes: int) -> tuple[Coord, Coord]:
        """Return the device coords of the lowest and the highest chip, with `num_axes` axes."""
        size = dict(zip(self.kept, self.shape, strict=True))
        axes = self.axes(num_axes)
        low = tuple(self.low[axis] for axis in axes)
        return low, tuple(self.low[axis] + size.get(axis, 1) - 1 for axis in axes)

    def axes(self, num_axes: int) -> tuple[int, ...]:
        """Return the device axes that coords with `num_axes` axes stand for."""
        return self.kept if num_axes == len(self.kept) else tuple(range(num_axes))


def failed_chips(failed: Failed, frame: CoordFrame) -> frozenset[Coord]:
    """Return the grid coords of the chips that `failed` names, and raise if some lie beyond it.

    Chips below the lowest have no device, so they are unused anyway and are skipped.
    """
    blocks = notation.parse_blocks("" if failed is None else failed)
    for block in blocks:
        _check_inside(f"block {block}", block.corner, block.top, frame=frame)
    return _grid_coords(blocks, frame)


def failed_links(links: Iterable[Link], frame: CoordFrame) -> frozenset[Link]:
    """Return `links` in grid coords, by the rules of `failed_chips`."""
    grid_links = []
    for a, b in links:
        _check_inside(f"failed link {notation.format_links([(a, b)])}", a, b, frame=frame)
        grid_links.append((frame.locate(a), frame.locate(b)))
    return frozenset((a, b) for a, b in grid_links if a is not None and b is not None)


def environment_failed_chips(frame: CoordFrame) -> frozenset[Coord]:
    """Return the grid coords of the chips that the variable ``FTMESH_FAILED`` names.

    The variable describes this machine, and the grid may be another one. So chips outside the grid
    are skipped with a `TopologyWarning`. That all chips of the grid have failed is an error.
    """
    try:
        blocks = notation.parse_blocks(os.environ.get(FAILED_VARIABLE, ""))
    except TopologyError as error:
        raise TopologyError(f"the environment variable {FAILED_VARIABLE}: {error}") from None
    accepted = [block for block in blocks if frame.accepts(len(block.corner))]
    chips = _grid_coords(accepted, frame)
    outside: list[Block] = []
    for block in blocks:
        part = _part_inside(block, frame) if block in accepted else None
        outside += [block] if part is None else _difference(block, part)
    remedy = "if this mesh is not this machine's, pass failed= (failed='' for no failures)"
    if len(chips) == math.prod(frame.shape):
        raise TopologyError(
            f"the environment variable {FAILED_VARIABLE} names every chip of mesh "
            f"{_span(frame, len(frame.kept))}: {remedy}"
        )
    if outside:
        warnings.warn(
            f"the environment variable {FAILED_VARIABLE} names {';'.join(map(str, outside))}, "
            f"which is not on mesh {_span(frame, len(frame.kept))}: ignored; {remedy}",
            TopologyWarning,
            stacklevel=3,
        )
    return chips


def _grid_coords(blocks: Iterable[Block], frame: CoordFrame) -> frozenset[Coord]:
    """The grid coords of the chips of blocks, without those outside the grid."""
    parts = filter(None, (_part_inside(block, frame) for block in blocks))
    chips = (frame.locate(coord) for part in parts for coord in part.coords())
    return frozenset(chip for chip in chips if chip is not None)


def _part_inside(block: Block, frame: CoordFrame) -> Block | None:
    low, high = frame.corners(len(block.corner))
    return _box(tuple(map(max, block.corner, low)), tuple(map(min, block.top, high)))


def _difference(block: Block, inner: Block) -> Iterator[Block]:
    """The rest of `block` without `inner`, as blocks."""
    low, high = block.corner, block.top
    for axis, (first, last) in enumerate(zip(inner.corner, inner.top, strict=True)):
        below, above = _with_axis(high, axis, first - 1), _with_axis(low, axis, last + 1)
        yield from filter(None, (_box(low, below), _box(above, high)))
        low, high = _with_axis(low, axis, first), _with_axis(high, axis, last)


def _box(low: Coord, high: Coord) -> Block | None:
    size = tuple(b - a + 1 for a, b in zip(low, high, strict=True))
    return Block(size, low) if min(size) > 0 else None


def _with_axis(coord: Coord, axis: int, value: int) -> Coord:
    return *coord[:axis], value, *coord[axis + 1 :]


def _check_inside(name: str, *ends: Coord, frame: CoordFrame) -> None:
    num_axes = len(ends[0])
    if not frame.accepts(num_axes) or any(len(end) != num_axes for end in ends):
        mesh = notation.format_shape(frame.shape)
        raise TopologyError(f"{name} does not have the {len(frame.kept)} axes of mesh {mesh}")
    _, high = frame.corners(num_axes)
    for end in ends:
        if not all(0 <= c <= limit for c, limit in zip(end, high, strict=True)):
            raise TopologyError(f"{name} is not inside mesh {_span(frame, num_axes)}")


def _span(frame: CoordFrame, num_axes: int) -> str:
    low, high = map(notation.format_coord, frame.corners(num_axes))
    return f"{notation.format_shape(frame.shape)}, whose chips are {low} to {high}"


# What is left -----------------------------------------------------------------------------------


def connected_components(
    neighbours: Mapping[Coord, Iterable[Coord]],
) -> tuple[tuple[Coord, ...], ...]:
    """Return the connected components of a graph of chips, largest first."""
    remaining = dict.fromkeys(neighbours)
    components = []
    while remaining:
        frontier = [next(iter(remaining))]
        component = set(frontier)
        while frontier:
            frontier = list({b for a in frontier for b in neighbours[a]} - component)
            component.update(frontier)
        components.append(tuple(coord for coord in remaining if coord in component))
        for coord in component:
            del remaining[coord]
    return tuple(sorted(components, key=len, reverse=True))


def largest_box(shape: Coord, failed: Iterable[Coord], failed_links: Iterable[Link]) -> Block:
    """Return the largest box without failed chips and links; of equal ones the squarest, lowest."""
    bad_chips = np.zeros(shape, np.int64)
    for coord in failed:
        bad_chips[coord] = 1
    bad_links = [np.zeros(shape, np.int64) for _ in shape]
    for a, b in failed_links:
        axis = next(i for i in range(len(a)) if a[i] != b[i])
        if b[axis] == a[axis] + 1:
            bad_links[axis][a] = 1
    sums = [_running_sum(bad) for bad in [bad_chips, *bad_links]]
    by_size = sorted(
        itertools.product(*(range(1, n + 1) for n in shape)),
        key=lambda size: (-math.prod(size), max(size), size),
    )
    for size in by_size:
        bad = _box_sums(sums[0], size)
        corners = tuple(slice(0, n) for n in bad.shape)
        for axis, link_sums in enumerate(sums[1:]):
            inner = tuple(n - (i == axis) for i, n in enumerate(size))
            bad = bad + _box_sums(link_sums, inner)[corners]
        free = np.argwhere(bad == 0)
        if len(free):
            corner = min((tuple(int(n) for n in c) for c in free), key=lambda c: c[::-1])
            return Block(size, corner)
    raise TopologyError(f"mesh {format_shape(shape)} has no live chip")


def squarest_tile(shape: Coord, size: int) -> Coord:
    """Return the sides of the squarest box of `size` chips that tiles the grid."""
    tiles = [
        tile
        for tile in itertools.product(*(range(1, n + 1) for n in shape))
        if math.prod(tile) == size and all(n % t == 0 for n, t in zip(shape, tile, strict=True))
    ]
    if not tiles:
        raise TopologyError(
            f"mesh {format_shape(shape)} cannot be cut into equal boxes of {size} chips: "
            f"choose a product of divisors of {' and '.join(map(str, shape))}"
        )
    return min(tiles, key=lambda tile: (max(tile), tile[::-1]))


def _running_sum(values: np.ndarray) -> np.ndarray:
    """The n-dimensional running sum of `values`, with a zero border on the low sides."""
    total = np.pad(values, [(1, 0)] * values.ndim)
    for axis in range(values.ndim):
        total = total.cumsum(axis)
    return total


def _box_sums(running: np.ndarray, size: Coord) -> np.ndarray:
    """The sum over the box of `size` at every corner where it fits."""
    for axis, n in enumerate(size):
        high = running.shape[axis]
        running = np.take(running, range(n, high), axis) - np.take(running, range(high - n), axis)
    return running


def biconnected_blocks(neighbours: Mapping[Coord, Sequence[Coord]]) -> list[list[Coord]]:
    """The largest parts that no single vertex divides, each sharing one with those before it."""
    order: dict[Coord, int] = {}
    low: dict[Coord, int] = {}
    blocks: list[list[Coord]] = []
    root = next(iter(neighbours))
    order[root] = low[root] = 0
    pending = [root]  # vertices that are in no block yet
    path = [(root, iter(neighbours[root]))]
    while path:
        here, ends = path[-1]
        there = next(ends, None)
        if there is not None:
            if there not in order:
                order[there] = low[there] = len(order)
                pending.append(there)
                path.append((there, iter(neighbours[there])))
            else:
                low[here] = min(low[here], order[there])
            continue
        path.pop()
        if not path:
            break
        parent = path[-1][0]
        low[parent] = min(low[parent], low[here])
        if low[here] >= order[parent]:  # nothing below leads above the parent
            start = pending.index(here)
            blocks.append([parent, *pending[start:]])
            del pending[start:]
    return blocks[::-1]  # from the root on, so that each shares a vertex with one before
