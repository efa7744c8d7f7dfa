"""Finds the links that a transfer crosses when its ends are not neighbours.

`dimension_order` is how an undamaged TPU mesh routes (the paper's figure 1), `around_failures` how
a router routes that knows of the failures (figure 2).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import pairwise, product

from ftmesh.errors import RoutingError
from ftmesh.topology.notation import Coord
from ftmesh.topology.topology import Link, Topology

Route = tuple[Coord, ...]
Router = Callable[[Topology, Coord, Coord], Route]
Direction = tuple[int, int]  # an axis, and +1 or -1 along it
Channel = tuple[Link, bool]  # a link, and whether the route has crossed the edge along its axis


def dimension_order(topology: Topology, src: Coord, dst: Coord) -> Route:
    """Return the route along x, then y, then z, the shorter way round, ignoring failures.

    >>> dimension_order(Topology.grid("4x4"), (0, 0), (2, 1))
    ((0, 0), (1, 0), (2, 0), (2, 1))
    """
    route = [src]
    for axis, size in enumerate(topology.shape):
        gap = dst[axis] - src[axis]
        if topology.wrap[axis] and abs(gap) * 2 > size:
            gap -= size if gap > 0 else -size
        for _ in range(abs(gap)):
            here = route[-1]
            index = (here[axis] + (1 if gap > 0 else -1)) % size
            route.append((*here[:axis], index, *here[axis + 1 :]))
    return tuple(route)


def around_failures(
    topology: Topology, src: Coord, dst: Coord, *, first: Direction | None = None
) -> Route:
    """Return the dimension-order route if it is live, else the shortest live one of fewest turns.

    Ties go to the lower coords, so the route depends only on the topology and the two chips. A
    detour takes all its steps in the direction `first` before any other, so that all detours pass
    the failures on the same side. Raises a `RoutingError` if no live route exists.

    >>> around_failures(Topology.grid("5x4", failed="2x2@1,1"), (2, 0), (2, 3))
    ((2, 0), (3, 0), (3, 1), (3, 2), (3, 3), (2, 3))
    """
    direct = dimension_order(topology, src, dst)
    if all(topology.is_link(a, b) for a, b in pairwise(direct)):
        return direct
    return _shortest(topology, src, dst, first)


def deadlock_free_routes(topology: Topology, pairs: Iterable[tuple[Coord, Coord]]) -> list[Route]:
    """Return a route around the failures for each pair, such that they cannot deadlock if possible.

    Each route passes the failures on the nearer side. If those routes can deadlock, all take the
    same side: routes that never turn into one of the directions form no cycle (Glass and Ni's turn
    model). If no side works, the nearest routes are returned.
    """
    pairs = list(pairs)
    nearest = [around_failures(topology, *pair) for pair in pairs]
    if not find_cycle(nearest):
        return nearest
    for first in product(range(len(topology.shape)), (-1, 1)):
        try:
            routes = [around_failures(topology, *pair, first=first) for pair in pairs]
        except RoutingError:
            continue
        if not find_cycle(routes):
            return routes
    return nearest


def _shortest(topology: Topology, src: Coord, dst: Coord, first: Direction | None) -> Route:
    topology.rank(src)  # raises the topology's error if an end has failed
    topology.rank(dst)
    queue: list[tuple[int, int, Route, int, bool]] = [(0, 0, (src,), -1, True)]
    done: set[tuple[Coord, int, bool]] = set()
    while queue:
        _, turns, route, heading, in_first = heapq.heappop(queue)
        here = route[-1]
        if here == dst:
            return route
        if (here, heading, in_first) in done:
            continue
        done.add((here, heading, in_first))
        for there in topology.neighbours(here):
            axis = _axis(here, there)
            step = there[axis] - here[axis]
            if abs(step) > 1:  # over the edge: the direction of the walk that goes on
                step = -step
            is_first = first == (axis, 1 if step > 0 else -1)
            if is_first and not in_first:
                continue
            if (there, axis, is_first) not in done:
                turned = turns + (heading not in (-1, axis))
                at_least = len(route) + _distance(topology, there, dst)
                heapq.heappush(queue, (at_least, turned, (*route, there), axis, is_first))
    raise RoutingError(f"no live route leads from chip {src} to chip {dst} on {topology}")


def _axis(a: Coord, b: Coord) -> int:
    return next(i for i, (p, q) in enumerate(zip(a, b, strict=True)) if p != q)


def _distance(topology: Topology, a: Coord, b: Coord) -> int:
    gaps = (abs(p - q) for p, q in zip(a, b, strict=True))
    axes = zip(gaps, topology.shape, topology.wrap, strict=True)
    return sum(min(gap, size - gap) if wraps else gap for gap, size, wraps in axes)


def find_cycle(routes: Iterable[Route]) -> tuple[Link, ...]:
    """Return a cycle of links that messages can hold while waiting for the next; empty if none.

    A message on a route holds each link until it gets the next one. If these dependencies form a
    cycle, routers with finite buffers can deadlock. One-hop routes depend on nothing. On an axis
    that wraps, links are assumed to have the second virtual channel that every torus has, for
    messages that have crossed the edge along that axis.
    """
    waits_for: dict[Channel, set[Channel]] = {}
    for route in (route for route in routes if len(route) > 2):
        for held, wanted in pairwise(_channels(route)):
            waits_for.setdefault(held, set()).add(wanted)
    finished: set[Channel] = set()
    for start in sorted(waits_for):
        path: dict[Channel, None] = {}
        stack: list[tuple[Channel, bool]] = [(start, False)]
        while stack:
            channel, leaving = stack.pop()
            if leaving:
                del path[channel]
                finished.add(channel)
            elif channel in path:
                trail = list(path)
                return tuple(link for link, _ in trail[trail.index(channel) :])
            elif channel not in finished:
                path[channel] = None
                stack.append((channel, True))
                stack.extend((wanted, False) for wanted in sorted(waits_for.get(channel, ())))
    return ()


def _channels(route: Route) -> list[Channel]:
    channels = []
    crossed: set[int] = set()
    for a, b in pairwise(route):
        axis = _axis(a, b)
        if abs(a[axis] - b[axis]) > 1:
            crossed.add(axis)
        channels.append(((a, b), axis in crossed))
    return channels
