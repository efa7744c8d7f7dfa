"""Cables: the links of a mesh, both directions at once, in turns that share no chip.

>>> from ftmesh.mesh.topology import Topology
>>> line = Topology.grid("4x1")
>>> turns(cables(line), lambda cable: cable)
((((0, 0), (1, 0)), ((2, 0), (3, 0))), (((1, 0), (2, 0)),))
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from ftmesh.mesh.notation import Link
from ftmesh.mesh.topology import Topology


def cables(topology: Topology) -> tuple[Link, ...]:
    """Every cable between live chips once, its lower end first: by axis, even ones before odd."""

    def order(cable: Link) -> tuple[int, int, Link]:
        low, high = cable
        axis = next(i for i in range(len(low)) if low[i] != high[i])
        is_beside = high[axis] == low[axis] + 1
        start = low[axis] if is_beside else high[axis]  # of one over the edge
        return axis, start % 2, cable

    return tuple(sorted({(min(a, b), max(a, b)) for a, b in topology.links}, key=order))


def turns(
    some: Iterable[Link], needs: Callable[[Link], Iterable[Hashable]]
) -> tuple[tuple[Link, ...], ...]:
    """The cables in turns; those of a turn need nothing in common. Each goes into the first it can.

    Where a cable needs its two chips, a mesh whose sides are even takes two turns for each axis.
    """
    found: list[list[Link]] = []
    taken: list[set[Hashable]] = []
    for cable in some:
        own = set(needs(cable))
        turn = next((i for i, others in enumerate(taken) if not own & others), len(found))
        if turn == len(found):
            found.append([])
            taken.append(set())
        found[turn].append(cable)
        taken[turn] |= own
    return tuple(map(tuple, found))
