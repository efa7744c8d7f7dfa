"""Finds parts of a grid: what is connected, also without any one chip; boxes and tiles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ftmesh.errors import TopologyError
from ftmesh.topology.notation import Block, Coord, Link, format_shape


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
