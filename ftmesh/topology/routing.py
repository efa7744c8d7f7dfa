"""Routes: the links a transfer crosses when its ends are not neighbours.

`dimension_order` is what an undamaged TPU mesh does (the paper's figure 1), `around` what a router
that knows of the damage does (figure 2). `find_cycle` says whether a set of routes could deadlock,
and `together` finds a set that could not.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import pairwise, product

from ftmesh.errors import RoutingError
from ftmesh.topology.notation import Coord
from ftmesh.topology.topology import Link, Topology

Route = tuple[Coord, ...]
Channel = tuple[Link, bool]
Router = Callable[[Topology, Coord, Coord], Route]
Way = tuple[int, int]  # an axis, and +1 or -1 along it


def dimension_order(topology: Topology, src: Coord, dst: Coord) -> Route:
    """Along x to the right column, then along y, blind to failures; on a ring, the shorter way.

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
            place = (here[axis] + (1 if gap > 0 else -1)) % size
            route.append((*here[:axis], place, *here[axis + 1 :]))
    return tuple(route)


def around(topology: Topology, src: Coord, dst: Coord, *, first: Way | None = None) -> Route:
    """The dimension-order route where it is whole; else the shortest live one of fewest turns.

    Ties go to the lower coords, so that the route is a function of the topology and the two chips
    alone. With `first`, a detour takes all its steps that way before any other, so that all detours
    pass the damage on one side.

    >>> topo = Topology.from_drawing('''
    ... .....
    ... .XX..
    ... .XX..
    ... .....''')
    >>> around(topo, (2, 0), (2, 3))
    ((2, 0), (3, 0), (3, 1), (3, 2), (3, 3), (2, 3))
    """
    straight = dimension_order(topology, src, dst)
    if all(topology.is_link(a, b) for a, b in pairwise(straight)):
        return straight
    return _shortest(topology, src, dst, first)


def together(topology: Topology, pairs: Iterable[tuple[Coord, Coord]]) -> list[Route]:
    """The routes of all `pairs`: `around` the damage, and such that they cannot deadlock if may be.

    Each goes around on the nearer side. Where those could wait for each other in a circle, all take
    the same side: routes that never turn into one of the four ways close no circle (Glass and Ni's
    turn model). Where no side will do, they are as they were.
    """
    pairs = list(pairs)
    nearest = [around(topology, *pair) for pair in pairs]
    if not find_cycle(nearest):
        return nearest
    for first in product(range(len(topology.shape)), (-1, 1)):
        try:
            routes = [around(topology, *pair, first=first) for pair in pairs]
        except RoutingError:
            continue
        if not find_cycle(routes):
            return routes
    return nearest


def _shortest(topology: Topology, src: Coord, dst: Coord, first: Way | None) -> Route:
    topology.rank(src)  # a failed end gets the topology's own error
    topology.rank(dst)
    queue: list[tuple[int, int, Route, int, bool]] = [(0, 0, (src,), -1, True)]
    done: set[tuple[Coord, int, bool]] = set()
    while queue:
        _, turns, route, heading, at_first = heapq.heappop(queue)
        here = route[-1]
        if here == dst:
            return route
        if (here, heading, at_first) in done:
            continue
        done.add((here, heading, at_first))
        for there in topology.neighbours(here):
            axis = _axis(here, there)
            is_first = first == (axis, _step(here[axis], there[axis]))
            if is_first and not at_first:
                continue
            if (there, axis, is_first) not in done:
                turned = turns + (heading not in (-1, axis))
                at_least = len(route) + _distance(topology, there, dst)
                heapq.heappush(queue, (at_least, turned, (*route, there), axis, is_first))
    raise RoutingError(f"no live route leads from chip {src} to chip {dst} on {topology}")


def _step(here: int, there: int) -> int:
    """The way from a place to the next: 1 up, -1 down; over the edge it is the other way round."""
    is_up = there > here
    return 1 if is_up == (abs(there - here) == 1) else -1


def _axis(a: Coord, b: Coord) -> int:
    """The axis along which neighbours `a` and `b` differ."""
    return next(i for i, (p, q) in enumerate(zip(a, b, strict=True)) if p != q)


def _distance(topology: Topology, a: Coord, b: Coord) -> int:
    """Hops between two chips were nothing damaged."""
    total = 0
    for p, q, size, wraps in zip(a, b, topology.shape, topology.wrap, strict=True):
        total += min(abs(p - q), size - abs(p - q)) if wraps else abs(p - q)
    return total


def find_cycle(routes: Iterable[Route]) -> tuple[Link, ...]:
    """A cycle of links, each held while the next is awaited; empty where there is none.

    A message on a route holds each link until it gets the next. If those dependencies close a
    circle, routers with finite buffers can come to a stand. One-hop routes depend on nothing.
    Where an axis wraps, links are taken to have the second virtual channel that every torus has,
    for messages that have already crossed the edge along that axis.
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
    """The links of a route, each with whether the route has crossed the edge along its axis."""
    channels = []
    crossed: set[int] = set()
    for a, b in pairwise(route):
        axis = _axis(a, b)
        if abs(a[axis] - b[axis]) > 1:
            crossed.add(axis)
        channels.append(((a, b), axis in crossed))
    return channels
