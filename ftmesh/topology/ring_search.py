"""Rings through all chips of a connected part, with few steps of more than one hop.

A step of more than one hop takes the route of a TPU mesh, along x, then y, then z, which ignores
failures; a route over one makes a ring so much longer that any other is preferred.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from ftmesh.topology.circuit_search import longest_cycle
from ftmesh.topology.notation import Coord
from ftmesh.topology.routing import Route, dimension_order
from ftmesh.topology.topology import Topology

_BLOCKED = 1_000  # hops: more than any route has
_MAX_TURNED = 100_000  # chips of all paths that are tried for a long step, a fraction of a second

Graph = dict[Coord, tuple[Coord, ...]]


def ring_length(topology: Topology, ring: Sequence[Coord]) -> int:
    """The hops of a ring; blocked routes count as very long."""
    return sum(_distance(topology, a, b) for a, b in pairwise([*ring, ring[0]]))


def ring_of_part(topology: Topology, part: Sequence[Coord]) -> list[Coord]:
    """A ring through the chips of a connected part, with few steps of more than one hop.

    Chips whose loss would divide the part belong to several blocks. The rings of two blocks that
    share a chip are joined there, which makes one step of two hops.
    """
    graph = {a: topology.neighbours(a) for a in part}
    ring: list[Coord] = []
    for block in _blocks(graph):
        own = _ring_of_block(topology, block)
        ring = _joined(topology, ring, own) if ring else own
    return _shortened(topology, ring or list(part))


def _ring_of_block(topology: Topology, block: Sequence[Coord]) -> list[Coord]:
    """The longest cycle that is found in a block, with its other chips put in between."""
    chips = _swept(topology, block)
    number = {coord: i for i, coord in enumerate(chips)}
    links = [
        (number[a], number[b])
        for a in chips
        for b in topology.neighbours(a)
        if b in number and number[a] < number[b]
    ]
    at_most = _longest_possible(topology, chips)
    ring = [chips[i] for i in longest_cycle(len(chips), links, at_most)] or chips[:2]
    left = [chip for chip in chips if chip not in set(ring)]
    while left:
        options = [
            (_extra_hops(topology, ring, i, [chip]), j, i)
            for j, chip in enumerate(left)
            for i in _next_to_neighbours(topology, ring, chip)
        ]
        _, j, i = min(options)
        ring.insert(i, left.pop(j))
    return ring


def _swept(topology: Topology, chips: Iterable[Coord]) -> list[Coord]:
    """Chips in the order of a sweep along the longest axis, which keeps the frontier short."""
    axes = sorted(range(len(topology.shape)), key=lambda axis: -topology.shape[axis])
    return sorted(chips, key=lambda coord: [coord[axis] for axis in axes])


def _longest_possible(topology: Topology, chips: Sequence[Coord]) -> int:
    """How long a cycle can be: where hops alternate between two colours, it has as many of each."""
    colour: dict[Coord, int] = {}
    inside = set(chips)
    stack = [(chips[0], 0)]
    while stack:
        here, own = stack.pop()
        if here in colour:
            if colour[here] != own:
                return len(chips)
            continue
        colour[here] = own
        stack.extend((b, 1 - own) for b in topology.neighbours(here) if b in inside)
    counts = Counter(colour.values())
    return 2 * min(counts[0], counts[1])


def _next_to_neighbours(topology: Topology, ring: Sequence[Coord], chip: Coord) -> list[int]:
    """The positions of a ring before and after each neighbour of `chip`."""
    near = [i for i, coord in enumerate(ring) if topology.is_link(chip, coord)]
    return sorted({position for i in near for position in (i, i + 1)})


def _joined(topology: Topology, ring: list[Coord], other: list[Coord]) -> list[Coord]:
    """One ring from two that share a chip."""
    (shared,) = {*ring} & {*other}
    at, start = ring.index(shared), other.index(shared)
    rest = other[start + 1 :] + other[:start]
    options = [
        (_extra_hops(topology, ring, position, part), position, part)
        for position in (at, at + 1)
        for part in (rest, rest[::-1])
    ]
    _, position, part = min(options)
    return ring[:position] + part + ring[position:]


def _extra_hops(
    topology: Topology, ring: Sequence[Coord], position: int, part: Sequence[Coord]
) -> int:
    """The hops that are added if `part` is put into a ring before `position`."""
    before, after = ring[position - 1], ring[position % len(ring)]
    added = _distance(topology, before, part[0]) + _distance(topology, part[-1], after)
    return added - _distance(topology, before, after)


def _shortened(topology: Topology, ring: list[Coord]) -> list[Coord]:
    """Shorten the long steps of a ring for as long as a change that is tried does so."""
    while len(ring) > 3 and (shorter := _reversed_part(topology, ring) or _turned(topology, ring)):
        ring = shorter
    return ring


def _reversed_part(topology: Topology, ring: list[Coord]) -> list[Coord]:
    """A shorter ring, by reversing a stretch of it that begins or ends at a long step, or none."""
    size = len(ring)
    steps = [_distance(topology, ring[i - 1], ring[i]) for i in range(size)]  # to i
    for i in (i for i in range(size) if steps[i] > 1):
        for j in range(size):
            low, high = min(i, j), max(i, j)
            if high - low < 2 or high - low > size - 2:
                continue
            old = steps[low] + steps[high]
            new = _distance(topology, ring[low - 1], ring[high - 1])
            if new < old and new + _distance(topology, ring[low], ring[high]) < old:
                return ring[:low] + ring[low:high][::-1] + ring[high:]
    return []


def _turned(topology: Topology, ring: list[Coord]) -> list[Coord]:
    """A shorter ring, by moving the ends of a long step along other links, or none.

    Without the step the ring is a path. A link from its last chip to one further back makes another
    path with another end, and so on, until two ends are nearer to each other.
    """
    size, length = len(ring), ring_length(topology, ring)
    for i in range(size):
        closing = _distance(topology, ring[i - 1], ring[i])
        if closing == 1:
            continue
        paths = [(length - closing, ring[i:] + ring[:i])]
        seen = {(ring[i - 1], ring[i])}
        for open_length, path in paths:  # which grows
            for there in (path, path[::-1]):
                for chip in topology.neighbours(there[-1]):
                    at = there.index(chip) if chip in there else size
                    if at > size - 3:
                        continue
                    ends = there[at + 1], there[0]
                    opened = open_length + 1 - _distance(topology, chip, there[at + 1])
                    if opened + _distance(topology, *ends) < length:
                        return there[: at + 1] + there[:at:-1]
                    if (
                        ends not in seen
                        and opened <= open_length
                        and len(paths) * size < _MAX_TURNED
                    ):
                        seen |= {ends, ends[::-1]}
                        paths.append((opened, there[: at + 1] + there[:at:-1]))
    return []


def _distance(topology: Topology, a: Coord, b: Coord) -> int:
    """Hops of the longer route of a step, there or back; many more if a route is blocked."""
    if topology.is_link(a, b):
        return 1
    routes = both_routes(topology, a, b)
    hops = max(map(len, routes)) - 1
    is_blocked = any(obstacle_on(topology, route) for route in routes)
    return hops + _BLOCKED if is_blocked else hops


def both_routes(topology: Topology, a: Coord, b: Coord) -> tuple[Route, Route]:
    return dimension_order(topology, a, b), dimension_order(topology, b, a)


def obstacle_on(topology: Topology, route: Route) -> str:
    """What is in the way on a route; empty if nothing is."""
    for a, b in pairwise(route):
        if not topology.is_live(b):
            return f"failed {topology.noun} {b}"
        if not topology.is_link(a, b):
            return f"failed link {a}-{b}"
    return ""


# Blocks -----------------------------------------------------------------------------------------


def _blocks(graph: Graph) -> list[list[Coord]]:
    """The largest parts that no single vertex divides, each sharing one with those before it."""
    order: dict[Coord, int] = {}
    low: dict[Coord, int] = {}
    blocks: list[list[Coord]] = []
    root = next(iter(graph))
    order[root] = low[root] = 0
    pending = [root]  # vertices that are in no block yet
    path = [(root, iter(graph[root]))]
    while path:
        here, ends = path[-1]
        there = next(ends, None)
        if there is not None:
            if there not in order:
                order[there] = low[there] = len(order)
                pending.append(there)
                path.append((there, iter(graph[there])))
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
