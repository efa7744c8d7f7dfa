"""Routes: the links a transfer crosses when its ends are not neighbours.

`dimension_order` is what an undamaged TPU mesh does (the paper's figure 1), `around` what a router
that knows of the damage does (figure 2). `find_cycle` says whether a set of routes could deadlock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import pairwise

from ftmesh.errors import RoutingError
from ftmesh.notation import Coord
from ftmesh.topology import Link, Topology

Route = tuple[Coord, ...]
Router = Callable[[Topology, Coord, Coord], Route]


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


def around(topology: Topology, src: Coord, dst: Coord) -> Route:
    """The dimension-order route where it is whole; else the shortest live one of fewest turns.

    Ties go to the lower coords, so that the route is a function of the topology and the two chips
    alone.

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
    return _shortest(topology, src, dst)


def _shortest(topology: Topology, src: Coord, dst: Coord) -> Route:
    topology.rank(src)  # a failed end gets the topology's own error
    topology.rank(dst)
    queue: list[tuple[int, int, Route, int]] = [(0, 0, (src,), -1)]
    done: set[tuple[Coord, int]] = set()
    while queue:
        hops, turns, route, heading = heapq.heappop(queue)
        here = route[-1]
        if here == dst:
            return route
        if (here, heading) in done:
            continue
        done.add((here, heading))
        for there in topology.neighbours(here):
            axis = next(i for i in range(len(here)) if here[i] != there[i])
            turned = turns + (heading not in (-1, axis))
            heapq.heappush(queue, (hops + 1, turned, (*route, there), axis))
    raise RoutingError(f"no live route leads from chip {src} to chip {dst} on {topology}")


def find_cycle(routes: Iterable[Route]) -> tuple[Link, ...]:
    """A cycle of links, each held while the next is awaited; empty where there is none.

    A message on a route holds each link until it gets the next. If those dependencies close a
    circle, routers with finite buffers can come to a stand. One-hop routes depend on nothing.
    """
    waits_for: dict[Link, set[Link]] = {}
    for route in routes:
        links = list(pairwise(route))
        for held, wanted in pairwise(links):
            waits_for.setdefault(held, set()).add(wanted)
    finished: set[Link] = set()
    for start in sorted(waits_for):
        path: dict[Link, None] = {}
        stack: list[tuple[Link, bool]] = [(start, False)]
        while stack:
            link, leaving = stack.pop()
            if leaving:
                del path[link]
                finished.add(link)
            elif link in path:
                trail = list(path)
                return tuple(trail[trail.index(link) :])
            elif link not in finished:
                path[link] = None
                stack.append((link, True))
                stack.extend((wanted, False) for wanted in sorted(waits_for.get(link, ())))
    return ()
