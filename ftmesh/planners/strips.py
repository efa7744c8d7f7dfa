"""Strips: a circuit through all live chips, joined from rings along an axis and strips of two rows.

A row that closes over the edge is a ring. Two rows side by side are a circuit wherever both are
whole, for two chips or more. If these together hold every live chip, they may be joined at squares
(`ftmesh.planners.circuits`). Rows may lie along any axis, with their pairs along any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, permutations, product

from ftmesh.errors import PlanError
from ftmesh.planners.circuits import join_circuits, wrapping_axes
from ftmesh.topology.notation import Coord
from ftmesh.topology.topology import Link, Topology

TRIES = 5  # to join circuits where squares do not at once

Row = list[Coord]


def circuit_of_strips(topology: Topology) -> list[Coord]:
    """The live chips in the order of a closed walk over neighbours, on one to three axes."""
    _check_balance(topology)
    for links in _partitions(topology):
        try:
            return join_circuits(topology, [links], tries=TRIES)[0]
        except PlanError:
            continue
    raise PlanError(
        f"its live {topology.noun}s do not part into rings over the edge and strips of two rows "
        "that join to one circuit"
    )


def _check_balance(topology: Topology) -> None:
    """Refuse what has no circuit, as every hop leads from one kind of chip to the other."""
    if any(topology.shape[axis] % 2 for axis in wrapping_axes(topology)):
        return  # a hop over that edge does not
    kinds = Counter(sum(coord) % 2 for coord in topology.coords)
    if kinds[0] != kinds[1]:
        raise PlanError(
            f"no circuit visits each {topology.noun} once: hops lead from the {kinds[0]} whose "
            f"coords have an even sum to the {kinds[1]} others and back"
        )


def _partitions(topology: Topology) -> Iterator[list[Link]]:
    """The links of short circuits that visit every live chip, one way after another to find such.

    Where pairs of rows may close over the edge, the first row pairs with the second or the last.
    """
    for along, across in permutations(range(len(topology.shape)), 2):
        for first in (0, 1) if topology.wrap[across] else (0,):
            links = [
                link
                for rows in _planes(topology, along, across)
                for part in _parts(topology, rows[first:] + rows[:first])
                for link in part
            ]
            beside = Counter(chip for link in links for chip in link)
            if all(beside[coord] == 2 for coord in topology.coords):
                yield links


def _planes(topology: Topology, along: int, across: int) -> Iterator[list[Row]]:
    """The rows of every plane, live chips and failed ones."""
    others = [axis for axis in range(len(topology.shape)) if axis not in (along, across)]
    for rest in product(*(range(topology.shape[axis]) for axis in others)):
        place = dict(zip(others, rest, strict=True))
        yield [
            [
                tuple({**place, across: j, along: i}[axis] for axis in range(len(topology.shape)))
                for i in range(topology.shape[along])
            ]
            for j in range(topology.shape[across])
        ]


def _parts(topology: Topology, rows: list[Row]) -> Iterator[list[Link]]:
    """Short circuits of a plane: rings of whole rows, and strips of the others with the next."""
    left = iter(rows)
    for row in left:
        ring = list(pairwise([*row, row[0]]))
        if len(row) > 2 and all(topology.is_link(a, b) for a, b in ring):
            yield ring
        elif any(topology.is_live(chip) for chip in row):
            yield from _strips(topology, row, next(left, row))


def _strips(topology: Topology, row: Row, other: Row) -> Iterator[list[Link]]:
    """Circuits out along a row and back along the other, as long as both are whole."""
    rungs = list(zip(row, other, strict=True))
    goes_on = [
        topology.is_link(a, c) and topology.is_link(b, d)
        for (a, b), (c, d) in pairwise([*rungs, rungs[0]])
    ]
    start = goes_on.index(False) + 1 if False in goes_on else 0
    run: list[Link] = []
    for i in range(len(rungs)):
        at = (start + i) % len(rungs)
        run.append(rungs[at])
        if goes_on[at] and i + 1 < len(rungs):
            continue
        if len(run) > 1 and topology.is_link(*run[0]) and topology.is_link(*run[-1]):
            there, back = zip(*run, strict=True)
            yield list(pairwise([*there, *back[::-1], there[0]]))
        run = []
